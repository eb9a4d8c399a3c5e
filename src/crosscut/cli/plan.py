"""``crosscut plan DIR``: what each rank of a split model would hold, and what fits on which GPU. Loads no torch, no weights."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crosscut.errors import UsageError
from crosscut.units import SHORT_DTYPES, format_size, parse_size

if TYPE_CHECKING:
    from crosscut.hardware import Gpu
    from crosscut.sharding.describe import Model
    from crosscut.sharding.plan import Split

SCHEMA = "crosscut-plan/1"
SHOWN = ("h200", "h100-80", "l40s", "4090")
"""GPUs shown when none is asked for."""

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face directory: config.json, and weights if any.")]
Tp = Annotated[
    str | None, typer.Option("--tp", help="Numbers of ranks, as 1,2,4,8. By default those up to 8 that divide evenly.")
]
Gpus = Annotated[str | None, typer.Option("--gpu", help="GPUs that it must fit on, as h200,h100-80,a100-40,l40s,l4,4090.")]
Uneven = Annotated[bool, typer.Option("--uneven", help="Allow ranks with unequal numbers of heads.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Load in bfloat16, float16 or float32. By default as config.json says.")
]
Reserve = Annotated[str, typer.Option("--reserve", help="Memory of each GPU set aside for CUDA, NCCL and activations.")]
Guess = Annotated[bool, typer.Option("--guess", help="Accept a guessed plan for a model_type without a table.")]
Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of the table.")]


def plan(
    directory: Directory,
    tp: Tp = None,
    gpu: Gpus = None,
    uneven: Uneven = False,
    dtype: Dtype = None,
    reserve: Reserve = "2GiB",
    guess: Guess = False,
    json: Json = False,
) -> None:
    """Check how a model can be split, from its config and headers alone: bytes per rank, KV cache, what fits on which GPU.

    Exit code 0 when every --tp works and every --gpu has one on which the model fits, 1 when not, 2 when nothing works.
    """
    asked, gpus, kept = _tps(tp), _gpus(gpu), parse_size(reserve)
    from crosscut.sharding.describe import describe
    from crosscut.sharding.plan import even_sizes, refused, require, split

    model = describe(directory, SHORT_DTYPES.get(dtype, dtype) if dtype else None, guess)
    tps = asked or [size for size in even_sizes(model.config) if size <= 8]
    bad = refused(model.config, tps, uneven)
    if len(bad) == len(tps):
        require(model.config, tps[0], uneven)
    splits = [split(model, size) for size in tps if size not in bad]
    if json:
        typer.echo(json_text.dumps(_as_json(model, splits, bad, gpus, kept), indent=1))
    else:
        _print(model, splits, bad, gpus, kept)
    homeless = [one for one in gpus if not any(_room(model, cut, one, kept) for cut in splits)]
    if bad or (gpu and homeless):
        raise typer.Exit(1)


def _tps(text: str | None) -> list[int]:
    """``'1,2,4'`` as numbers. Raises UsageError (``bad-option``)."""
    try:
        sizes = list(dict.fromkeys(int(word) for word in text.split(","))) if text is not None else []
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise UsageError(f"--tp {text!r} is not a list of sizes", code="bad-option", fix="write it as --tp 1,2,4,8")
    return sizes


def _gpus(text: str | None) -> list[Gpu]:
    from crosscut.hardware import named_gpu

    keys = text.split(",") if text is not None else SHOWN
    return list(dict.fromkeys(named_gpu(key.strip()) for key in keys))


def _room(model: Model, split: Split, gpu: Gpu, reserve: int) -> int:
    """The longest sequence that fits, at most the model's longest."""
    most = model.config.max_positions or 1 << 40
    return max(0, min(split.context((gpu.memory_mib << 20) - reserve), most))


def _print(model: Model, splits: list[Split], bad: list[int], gpus: list[Gpu], reserve: int) -> None:
    from rich.console import Console

    from crosscut.report.sheets import Cell, Column, Sheet, drawn
    from crosscut.sharding.plan import notes, remedy

    columns = [Column(name) for name in ("tp", "weights", "copied", "KV/token", *(gpu.key for gpu in gpus))]
    rows = []
    for one in splits:
        cells = [str(one.tp), _span(one.weights), format_size(one.copied), format_size(one.kv_token)]
        cells += [_fit(model, one, gpu, reserve) for gpu in gpus]
        rows.append([*map(Cell, cells), Cell(_verdict(model, one, gpus, reserve))])
    rows += [[Cell(str(size)), *[Cell("-")] * (len(columns) - 1), Cell("no")] for size in bad]
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=120, highlight=False)
    config = model.config
    experts = f", {config.experts} experts, {config.experts_per_token} a token" if config.experts else ""
    console.print(
        f"{model.family.name} ({config.model_type}): {config.layers} layers, hidden {config.hidden}, "
        f"{config.heads} query and {config.kv_heads} KV heads{experts}, {model.dtype}, {format_size(splits[0].total)}",
        markup=False,
    )
    console.print(
        drawn(Sheet("", "", [*columns, Column("verdict", numeric=False)], sorted(rows, key=lambda r: int(r[0].text))))
    )
    console.print(
        "weights: of one rank, or of the smallest and the largest. copied: bytes beyond one copy of the weights, over all "
        "ranks. KV/token: on the rank with most. GPU columns: the longest sequence that fits beside the weights, and how "
        f"many such; {format_size(reserve)} of each GPU are set aside for CUDA, NCCL and activations (an assumption).",
        style="dim",
    )
    refusal = [f"{config.heads} query heads: {remedy(config, bad)}"] if bad else []
    for text in (*refusal, *notes(model, splits)):
        console.print(f"- {text}", markup=False)


def _span(sizes: tuple[int, ...]) -> str:
    low, high = format_size(min(sizes)), format_size(max(sizes))
    return high if low == high else f"{low} to {high}"


def _fit(model: Model, split: Split, gpu: Gpu, reserve: int) -> str:
    tokens = _room(model, split, gpu, reserve)
    if not tokens:
        return "no"
    return f"{tokens} x{split.sequences((gpu.memory_mib << 20) - reserve, tokens)}"


def _verdict(model: Model, split: Split, gpus: list[Gpu], reserve: int) -> str:
    fits = [gpu.key for gpu in gpus if _room(model, split, gpu, reserve)]
    heads = "" if split.even else f", {min(split.query_heads)} to {max(split.query_heads)} heads a rank"
    return ("fits" if len(fits) == len(gpus) else f"fits {', '.join(fits)}" if fits else "too large") + heads


def _as_json(model: Model, splits: list[Split], bad: list[int], gpus: list[Gpu], reserve: int) -> dict[str, Any]:
    from crosscut.sharding.plan import even_sizes, notes

    config = model.config
    return {
        "schema": SCHEMA,
        "family": model.family.name,
        "guessed": model.family.guessed,
        "model_type": config.model_type,
        "from_config": model.from_config,
        "dtype": model.dtype,
        "weights_bytes": splits[0].total,
        "even_tp": even_sizes(config),
        "reserve_bytes": reserve,
        "splits": [
            {
                "tp": one.tp,
                "even": one.even,
                "query_heads": one.query_heads,
                "kv_heads": one.kv_heads,
                "weights_bytes": one.weights,
                "copied_bytes": one.copied,
                "kv_bytes_per_token": one.kv_token,
                "longest_sequence": {gpu.key: _room(model, one, gpu, reserve) for gpu in gpus},
            }
            for one in splits
        ],
        "refused": bad,
        "notes": notes(model, splits),
    }
