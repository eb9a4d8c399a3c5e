"""``crosscut bench``: measurements. Flags become a frozen config, the bench room does the rest."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from crosscut.cli.bench_collectives import collectives
from crosscut.cli.ranks import Backend, Device, Json, Out, Tp, deliver, run_on_ranks
from crosscut.errors import MismatchError, choose

bench = typer.Typer(help="Measure layers and collectives, with every result checked in the same run.", no_args_is_help=True)


def _option(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, show_default="metavar" not in more, **more)


Shapes = Annotated[list[str] | None, _option("--shape", "A size, or a pair TxH->F->H. Repeatable.", metavar="TxI->O")]
Dtype = Annotated[str, _option("--dtype", "float32, bfloat16, float16, float64; auto: bfloat16 on GPUs.")]
Mode = Annotated[str, _option("--mode", "eager, graph (CUDA graphs) or eager,graph; auto: all that can run.")]
Split = Annotated[str, _option("--split", "column (output features, gathered) or row (input features, summed).")]
Against = Annotated[str, _option("--against", "Peers beside the textbook: nccl, gloo, dtensor.", metavar="NAME,...")]
From = Annotated[
    str | None,
    _option("--from", "A checkpoint's weight (...mlp.up_proj.weight) or MLP (...layers.3.mlp).", metavar="DIR:PARAM"),
]
Inputs = Annotated[str, _option("--inputs", "With --from: embedding (of the text) or hidden (what the module receives).")]
Text = Annotated[str | None, _option("--text", "With --from: the text file; else a sample.", metavar="FILE")]
Tokens = Annotated[str, _option("--tokens", "With --from: how many tokens, several with commas.")]
Seconds = Annotated[float, _option("--seconds", "How long each case is sampled.", min=0.01)]
Seed = Annotated[int, _option("--seed", "Seed of the random inputs and weights.")]
Explain = Annotated[bool, typer.Option("--explain", help="Say what carries each shape's collective, and why.")]


@bench.callback()
def group() -> None:
    """Measure layers and collectives, with every result checked in the same run."""


bench.command()(collectives)


@bench.command()
def linear(
    tp: Tp = 2,
    shape: Shapes = None,
    dtype: Dtype = "auto",
    mode: Mode = "auto",
    split: Split = "column",
    against: Against = "",
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
    from crosscut.bench.shapes import parse_counts, parse_dtype, parse_list, parse_shape

    for one in shape or ():
        parse_shape(one)
    modes = () if mode == "auto" else parse_list(mode, "mode", ("eager", "graph"))
    peers = parse_list(against, "peer", ("nccl", "gloo", "dtensor"))
    choose("split", split, ("column", "row"))
    choose("inputs", inputs, ("embedding", "hidden"))
    counts = parse_counts(tokens, "--tokens")
    parse_dtype(dtype)
    if source is not None:
        from crosscut.bench.source import check_source

        check_source(source)
    from crosscut.bench.linear import LinearConfig, run

    config = LinearConfig(
        tp, tuple(shape or ()), parse_dtype(dtype), modes, split, peers, source, inputs, text, counts, seconds, seed, explain
    )
    record = run_on_ranks(run, config, tp, backend, device, out)
    if record is None:
        return
    deliver(record, json, out)
    if not record.config["correct"]:
        raise MismatchError(
            "a split result differs from the unsplit one by more than rounding (see above)",
            code="result-differs",
            fix="please report it with the record (--json)",
        )
