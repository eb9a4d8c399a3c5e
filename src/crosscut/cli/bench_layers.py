"""``crosscut bench linear``, ``mlp`` and ``block``: flags become a frozen config, the bench room does the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crosscut.cli.ranks import Backend, Device, Json, Out, Tp, deliver, load_numpy, refuse, run_on_ranks
from crosscut.errors import MismatchError, choose

if TYPE_CHECKING:
    from crosscut.records import RunRecord

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


def _option(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, show_default="metavar" not in more, **more)


Shapes = Annotated[list[str] | None, _option("--shape", "A size, or a pair TxH->F->H. Repeatable.", metavar="TxI->O")]
Dtype = Annotated[str, _option("--dtype", "float32, bfloat16, float16, float64; auto: bfloat16 on GPUs, else float32.")]
Mode = Annotated[str, _option("--mode", "eager, graph (CUDA graphs) or eager,graph; auto: all that can run.")]
Split = Annotated[str, _option("--split", "column (output features, gathered) or row (input features, summed).")]
Against = Annotated[str, _option("--against", "More peers beside the plain split: nccl, gloo, dtensor.", metavar="NAME,...")]
From = Annotated[
    str | None,
    _option("--from", "A checkpoint's weight (...mlp.up_proj.weight) or MLP (...layers.3.mlp).", metavar="DIR:PARAM"),
]
Inputs = Annotated[str, _option("--inputs", "With --from: embedding (of the text) or hidden (what the module receives).")]
Text = Annotated[str | None, _option("--text", "With --from: the text file; else a sample.", metavar="FILE")]
Tokens = Annotated[str, _option("--tokens", "With --from: how many tokens, several with commas.")]
Seconds = Annotated[float, _option("--seconds", "How long each case is sampled.", min=0.01)]
Seed = Annotated[int, _option("--seed", "Seed of the random inputs and weights.", min=0, max=1 << 20)]
Explain = Annotated[bool, typer.Option("--explain", help="Say what carries each shape's collective, and why.")]
Backward = Annotated[bool, typer.Option("--backward/--no-backward", help="Also forward and backward together, as in training.")]

MLPShapes = Annotated[
    list[str] | None,
    _option("--shape", "A size; repeatable. Without it a list from 1 token on.", metavar="TOKENSxHIDDENxFFN"),
]
Gated = Annotated[bool, typer.Option("--gated", help="down(act(gate(x)) * up(x)) in place of down(act(up(x))).")]
Activation = Annotated[str, _option("--activation", f"{', '.join(ACTIVATIONS)}; auto: silu when gated, else gelu_tanh.")]

BlockTokens = Annotated[str, _option("--tokens", "Sequence lengths; on GPUs 1,32,512,4096 by default.", metavar="N,...")]
Batch = Annotated[int, _option("--batch", "Sequences of that length.", min=1)]
Hidden = Annotated[int | None, _option("--hidden", "Hidden size; 4096 on GPUs, else 256.", metavar="N", min=1)]
Heads = Annotated[int | None, _option("--heads", "Query heads; by default hidden/128 (on CPU hidden/32).", metavar="N", min=1)]
KVHeads = Annotated[int | None, _option("--kv-heads", "KV heads; by default a quarter of the heads.", metavar="N", min=1)]
FFN = Annotated[int | None, _option("--ffn", "Features of the gated MLP; by default 3.5 x hidden.", metavar="N", min=1)]
Memory = Annotated[bool, typer.Option("--memory", help="What a GPT-like layer keeps for its backward, next to the formulas.")]
Sequence = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel", help="With --memory: only this form; else both.", show_default=False
    ),
]
Layers = Annotated[int, _option("--layers", "With --memory: layers in the measured stack.", min=2)]
Limit = Annotated[
    str | None,
    _option("--limit", "With --memory: the stack must run in this beyond its weights (512M).", metavar="SIZE"),
]


def linear(
    ctx: typer.Context,
    tp: Tp = 2,
    shape: Shapes = None,
    dtype: Dtype = "auto",
    mode: Mode = "auto",
    split: Split = "column",
    against: Against = "",
    backward: Backward = False,
    source: From = None,
    inputs: Inputs = "embedding",
    text: Text = None,
    tokens: Tokens = "1,32",
    seconds: Seconds = 0.3,
    seed: Seed = 0,
    explain: Explain = False,
    backend: Backend = "auto",
    device: Device = "auto",
    json: Json = False,
    out: Out = None,
) -> None:
    """The classic experiment: one linear layer (or up and down) on one device, against the same layer split over ranks.

    Prints times, speed-up, the share of communication and the error against float64, and says from which size the split pays.
    """
    from crosscut.bench.shapes import parse_counts, parse_shape

    for one in shape or ():
        parse_shape(one)
    if source is None:
        refuse(ctx, "only --from takes", "inputs", "text", "tokens")
    else:
        refuse(ctx, "--from takes the layer from a checkpoint, and no", "shape")
    choose("split", split, ("column", "row"))
    choose("inputs", inputs, ("embedding", "hidden"))
    own: dict[str, Any] = {
        "split": split,
        "source": source,
        "inputs": inputs,
        "text": text,
        "tokens": parse_counts(tokens, "--tokens"),
    }
    common = _common(tp, dtype, mode, against, seconds, seed, backward, explain)
    if source is not None:
        from crosscut.bench.source import check_source

        check_source(source)
    from crosscut.bench.linear import LinearConfig, run

    _measure(run, LinearConfig(**common, **own, shapes=tuple(dict.fromkeys(shape or ()))), backend, device, json, out)


def mlp(
    tp: Tp = 2,
    shape: MLPShapes = None,
    gated: Gated = False,
    activation: Activation = "auto",
    dtype: Dtype = "auto",
    mode: Mode = "auto",
    against: Against = "",
    backward: Backward = False,
    seconds: Seconds = 0.3,
    seed: Seed = 0,
    explain: Explain = False,
    backend: Backend = "auto",
    device: Device = "auto",
    json: Json = False,
    out: Out = None,
) -> None:
    """A Transformer's MLP, up and down with one sum, on one device against the same MLP split over ranks.

    Side by side: one device, the textbook's two gathered layers, the plain split
    by hand, DTensor if asked, crosscut with whole and with own tokens (sequence
    parallelism), and no_comm, the floor: the same work without communication.
    Prints times, speed-up, the share of communication and how much of it is
    hidden, and the error against float64.
    """
    from crosscut.bench.shapes import parse_sizes

    for one in shape or ():
        parse_sizes(one)
    used = choose("activation", ("silu" if gated else "gelu_tanh") if activation == "auto" else activation, ACTIVATIONS)
    common = _common(tp, dtype, mode, against, seconds, seed, backward, explain)
    from crosscut.bench.mlp import MLPConfig, run

    _measure(
        run,
        MLPConfig(**common, shapes=tuple(dict.fromkeys(shape or ())), gated=gated, activation=used),
        backend,
        device,
        json,
        out,
    )


def block(
    ctx: typer.Context,
    tp: Tp = 2,
    tokens: BlockTokens = "",
    batch: Batch = 1,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KVHeads = None,
    ffn: FFN = None,
    dtype: Dtype = "auto",
    mode: Mode = "auto",
    backward: Backward = True,
    memory: Memory = False,
    sequence_parallel: Sequence = None,
    layers: Layers = 2,
    limit: Limit = None,
    seconds: Seconds = 0.3,
    seed: Seed = 0,
    explain: Explain = False,
    backend: Backend = "auto",
    device: Device = "auto",
    json: Json = False,
    out: Out = None,
) -> None:
    """A Transformer's decoder block (norm, attention, norm, gated MLP) on one device against the same block split over ranks.

    Side by side, forward and with backward: one device, the plain split by hand,
    crosscut with whole and with own tokens (sequence parallelism), and no_comm,
    the floor: the same work without communication.

    With --memory bytes in place of times: what a GPT-like layer (layer norm, GELU
    MLP of 4 x hidden, dropout, 16-bit) keeps for its backward, and the formulas.
    """
    from crosscut.bench.shapes import parse_counts
    from crosscut.units import parse_size

    common = _common(tp, dtype, mode, "", seconds, seed, backward, explain)
    own: dict[str, Any] = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "batch": batch}
    own |= {"tokens": parse_counts(tokens, "--tokens") if tokens else None, "memory": memory, "layers": layers}
    own["limit"] = None if limit is None else parse_size(limit)
    if memory:
        refuse(ctx, "--memory measures a layer with as many KV heads as heads and an MLP of 4 x hidden: it takes no",
               "kv_heads", "ffn")  # fmt: skip
        refuse(ctx, "--memory counts bytes, not time: it takes no", "mode", "backward", "seconds", "explain")
    else:
        refuse(ctx, "only --memory takes", "sequence_parallel", "layers", "limit")
    from crosscut.bench.block import BlockConfig, run

    forms = (False, True) if sequence_parallel is None else (sequence_parallel,)
    _measure(run, BlockConfig(**common, **own, forms=forms), backend, device, json, out)


def _common(
    tp: int, dtype: str, mode: str, against: str, seconds: float, seed: int, backward: bool, explain: bool
) -> dict[str, Any]:
    """What all layer benches are asked for, checked; torch may be loaded afterwards."""
    from crosscut.bench.shapes import parse_dtype, parse_list

    modes = () if mode == "auto" else parse_list(mode, "mode", ("eager", "graph"))
    peers = parse_list(against, "peer", ("nccl", "gloo", "dtensor"))
    given = {"tp": tp, "dtype": parse_dtype(dtype), "modes": modes, "against": peers}
    load_numpy()
    return given | {"seconds": seconds, "seed": seed, "backward": backward, "explain": explain}


def _measure(run: Callable[..., RunRecord], config: Any, backend: str, device: str, json: bool, out: Path | None) -> None:
    record = run_on_ranks(run, config, config.tp, backend, device, out)
    if record is None:
        return
    deliver(record, json, out)
    if not record.config.get("correct", True):
        raise MismatchError(
            "a split result differs from the unsplit one by more than rounding (see above)",
            code="result-differs",
            fix="please report it with the record (--json)",
        )
