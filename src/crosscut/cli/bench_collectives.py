"""``crosscut bench collectives``: flags, the table with nccl-tests' columns, and the CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crosscut.cli.ranks import Backend, Device, Json, Out, Tp, deliver, load_numpy, refuse, run_on_ranks
from crosscut.env import settings
from crosscut.errors import MismatchError, UsageError, choose
from crosscut.records import check_target, write_file
from crosscut.units import SHORT_DTYPES, format_size, parse_size

if TYPE_CHECKING:
    from crosscut.records import Row, RunRecord

IMPLS = ("nccl", "nccl_symmetric", "torch_one_shot", "torch_two_shot", "crosscut", "gloo", "mpi")
OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
    "all_to_all_uneven", "send_recv", "incast", "multicast", "hypercube", "barrier",
)  # fmt: skip
REDOPS = ("sum", "max", "min", "avg", "prod")
MODES = ("eager", "graph", "host")
SHORT = {
    "float32": "float", "float64": "double", "float16": "half", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
}  # fmt: skip
"""nccl-tests' names of dtypes, where they are not torch's."""
DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint8", "float8_e4m3fn", "float8_e5m2")
MEASURING = (
    "redop", "dtype", "minbytes", "maxbytes", "stepfactor", "sizes", "impl", "mode", "in_place", "root", "pairs", "cold",
    "seconds", "seed", "algo", "proto", "link", "backend", "device", "csv_file",
)  # fmt: skip
"""Parameters that a simulation has no use for."""
MOST = 1 << 40
MOST_SIZES = 1000
FACTOR = 4.0


def _option(*flags: str, help: str, **more: Any) -> Any:
    return typer.Option(*flags, help=help, show_default=False, **more)


Op = Annotated[str, _option("--op", help="Collectives, with commas; all of them by default.", metavar="NAME,...")]
Redop = Annotated[str, typer.Option("--redop", help="Reductions: sum, max, min, avg, prod; with commas, or all.")]
Dtype = Annotated[
    str, _option("--dtype", help="bf16, fp32, fp16, fp64, int8, ..., f8e4m3; by default bf16 on GPUs, else fp32.")
]
Begin = Annotated[
    str | None, _option("-b", "--minbytes", help="The smallest size, as nccl-tests counts it (1K).", metavar="SIZE")
]
End = Annotated[str | None, _option("-e", "--maxbytes", help="The largest size (64M).", metavar="SIZE")]
Factor = Annotated[float | None, _option("-f", "--stepfactor", help="From size to size times this much (4).", metavar="N")]
Sizes = Annotated[
    str | None, _option("--sizes", help="These sizes; without any of them 1K to 1M (GPUs: 256M).", metavar="SIZE,...")
]
Impl = Annotated[str, _option("--impl", help=f"Implementations: {', '.join(IMPLS)}.", metavar="NAME,...")]
Mode = Annotated[str, _option("--mode", help="eager, graph (CUDA graphs), host (issue, wait; host's clock); with commas.")]
InPlace = Annotated[bool | None, _option("--in-place/--out-of-place", help="Only this placement of buffers; default: both.")]
Root = Annotated[int, typer.Option("--root", min=0, help="The root of broadcast, reduce, gather and scatter.")]
Pairs = Annotated[bool, typer.Option("--pairs", help="Also every pair of ranks: latency and bandwidth, one way and both.")]
Cold = Annotated[bool, typer.Option("--cold", help="Push buffers out of the cache before each sample.")]
Seconds = Annotated[float, typer.Option("--seconds", min=0.001, help="How long each case is sampled.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=1 << 20, help="Seed of the inputs.")]
Algo = Annotated[str, _option("--algo", help="Also NCCL with this algorithm forced: ring, tree, ...", metavar="NAME,...")]
Proto = Annotated[str, _option("--proto", help="Also NCCL with this protocol: simple, ll, ll128.", metavar="NAME,...")]
Link = Annotated[str, _option("--link", help="Also NCCL kept to this link: nvlink, shm, socket.", metavar="NAME,...")]
Simulate = Annotated[
    str,
    _option(
        "--simulate", help="Run ring, tree, one-shot or two-shot by hand on CPU ranks, and show each step.", metavar="NAME"
    ),
]
World = Annotated[int | None, _option("--world", help="With --simulate: how many ranks; else --tp.", metavar="N")]
Bytes = Annotated[str | None, _option("--bytes", help="With --simulate: the size (1M).", metavar="SIZE")]
Csv = Annotated[Path | None, _option("--csv", help="Also write the rows to this file, with commas.", metavar="FILE")]


def collectives(
    ctx: typer.Context,
    tp: Tp = 2,
    op: Op = "",
    redop: Redop = "sum",
    dtype: Dtype = "auto",
    minbytes: Begin = None,
    maxbytes: End = None,
    stepfactor: Factor = None,
    sizes: Sizes = None,
    impl: Impl = "",
    mode: Mode = "",
    in_place: InPlace = None,
    root: Root = 0,
    pairs: Pairs = False,
    cold: Cold = False,
    seconds: Seconds = 0.05,
    seed: Seed = 0,
    algo: Algo = "",
    proto: Proto = "",
    link: Link = "",
    simulate: Simulate = "",
    world: World = None,
    size: Bytes = None,
    backend: Backend = "auto",
    device: Device = "auto",
    json: Json = False,
    csv_file: Csv = None,
    out: Out = None,
) -> None:
    """Every collective and size on each implementation: latency, bandwidth, fit, verdict, with every element checked.

    Columns are nccl-tests': sizes of the whole tensor, time in us, algbw and busbw in GB/s (1e9), elements that differ.
    """
    if simulate:
        from crosscut.cli.bench_simulate import simulate as run_by_hand

        refuse(ctx, "--simulate runs an algorithm by hand and takes no", *MEASURING)
        run_by_hand(simulate, op or "all_reduce", tp if world is None else world, size or "1M", json, out)
        return
    refuse(ctx, "only --simulate takes", "world", "size")
    asked: dict[str, Any] = {
        "ops": names("collective", op, OPS),
        "redops": REDOPS if redop == "all" else names("reduction", redop, REDOPS) or ("sum",),
        "dtype": read_dtype(dtype),
        "sizes": read_sizes(minbytes, maxbytes, stepfactor, sizes),
        "impls": names("implementation", impl, IMPLS),
        "modes": names("mode", mode, MODES),
        "places": ("out", "in") if in_place is None else ("in",) if in_place else ("out",),
    }
    if tp < 2:
        raise UsageError("one rank has nobody to talk to", code="bad-option", fix="ask for at least two: --tp 2")
    if root >= tp:
        raise UsageError(f"the root {root} is not one of the {tp} ranks", code="bad-option", fix=f"use --root 0 to {tp - 1}")
    if csv_file is not None:
        check_target(csv_file)
        if out is not None and check_target(out).resolve() == csv_file.resolve():
            raise UsageError(f"--csv and --out are both {str(out)!r}", code="bad-option", fix="name two files")
    common = {"root": root, "seconds": seconds, "seed": seed}
    record = _measured(tp, asked, common | {"pairs": pairs, "cold": cold}, (algo, proto, link), backend, device, out)
    if "mpi" in asked["impls"]:
        record = _with_mpi(tp, asked, common, record)
    if record is None:
        return
    if not record.rows:
        raise UsageError(
            f"nothing could be measured. {' '.join(record.notes)}", code="bad-option", fix="choose another --dtype or --impl"
        )
    show(record, json, csv_file, out)
    if not record.config["correct"]:
        raise MismatchError(
            "a collective gave wrong elements (see above)",
            code="result-differs",
            fix="run it again; if it stays, the link, the driver or the library is broken: please report the record (--json)",
        )


def _measured(
    tp: int,
    asked: dict[str, Any],
    more: dict[str, Any],
    forced: tuple[str, str, str],
    backend: str,
    device: str,
    out: Path | None,
) -> RunRecord | None:
    """The record of everything that crosscut's own ranks measure; None where nothing but MPI was asked for."""
    load_numpy()
    from crosscut.bench import nccl_forced
    from crosscut.bench.collectives import CollectivesConfig, run

    if out is not None:
        check_target(out)
    if asked["impls"] == ("mpi",):
        return None
    impls = tuple(name for name in asked["impls"] if name != "mpi")
    config = CollectivesConfig(tp, **(asked | more | {"impls": impls}))
    choices = nccl_forced.parse_choices(*forced)
    if not choices:
        return run_on_ranks(run, config, tp, backend, device)
    nccl_forced.need_nccl(tp, backend, device)
    return nccl_forced.run(config, choices, lambda c: run_on_ranks(run, c, tp, "nccl", "cuda"))


def _with_mpi(tp: int, asked: dict[str, Any], common: dict[str, Any], record: RunRecord | None) -> RunRecord | None:
    """``record`` with MPI's rows, in a world of its own."""
    from crosscut.bench import mpi
    from crosscut.bench.collectives import CPU_SIZES

    config = mpi.MpiConfig(
        tp,
        ops=asked["ops"] or OPS,
        sizes=asked["sizes"] or CPU_SIZES,
        dtypes=("float32" if asked["dtype"] == "auto" else asked["dtype"],),
        redops=asked["redops"],
        in_place=tuple(place == "in" for place in asked["places"]),
        timeout=settings().timeout,
        **common,
    )
    return mpi.run(config, record)


def show(record: RunRecord, json: bool, csv_file: Path | None, out: Path | None) -> None:
    """Print the record or its table, and write what was asked for."""
    if csv_file is not None:
        write_csv(record, csv_file)
    if json:
        deliver(record, json, out)
        return
    if out is not None:
        record.write(out)
    for line in lines(record):
        typer.echo(line)
    for name, path in (("rows", csv_file), ("record", out)):
        if path is not None:
            typer.echo(f"{name}: {path}")


# ------------------------------------------------------------------------------------------------------- what is asked


def names(what: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """``'a,b'`` as names that are all in ``allowed``, each once. Raises UsageError (``bad-option``)."""
    return tuple(dict.fromkeys(choose(what, name.strip(), allowed) for name in text.split(",") if name.strip()))


def read_dtype(text: str) -> str:
    """The dtype's full name, from ``bf16``, nccl-tests' name or itself; ``auto`` stays. Raises UsageError (``bad-dtype``)."""
    short = SHORT_DTYPES | {short: name for name, short in SHORT.items()}
    return choose("dtype", short.get(text.lower(), text.lower()), ("auto", *DTYPES), code="bad-dtype")


def read_sizes(begin: str | None, end: str | None, factor: float | None, listed: str | None) -> tuple[int, ...]:
    """The sizes in bytes, ascending; empty when nothing was said. Raises UsageError (``bad-option``)."""
    if listed is not None:
        if (begin, end, factor) != (None, None, None):
            raise UsageError("--sizes and -b, -e, -f were both given", code="bad-option", fix="use one or the other")
        found = tuple(sorted({_size(part) for part in listed.split(",") if part.strip()}))
        if not found:
            raise UsageError(f"--sizes {listed!r} names no size", code="bad-option", fix="write sizes with commas: 1K,64K,1M")
        return found
    if (begin, end, factor) == (None, None, None):
        return ()
    step = FACTOR if factor is None else factor
    low = _size(begin or "1K")
    high = _size(end) if end else max(low, _size("64M"))
    if not 1 < step <= MOST:
        raise UsageError(
            f"-f {step:g} never reaches the largest size", code="bad-option", fix="use a factor above 1, such as 2"
        )
    if high < low:
        raise UsageError(
            f"the sizes go from {format_size(low)} to {format_size(high)}",
            code="bad-option",
            fix="make -e at least as large as -b",
        )
    found = tuple(dict.fromkeys(islice(_steps(low, high, step), MOST_SIZES + 1)))
    if len(found) > MOST_SIZES:
        raise UsageError(
            f"-f {step:g} makes more than {MOST_SIZES} sizes from {format_size(low)} to {format_size(high)}",
            code="bad-option",
            fix="use a larger factor, such as 2",
        )
    return found


def _steps(low: int, high: int, step: float) -> Iterator[int]:
    exact = float(low)
    while exact <= high:
        yield round(exact)
        exact = max(exact * step, round(exact) + 1.0)


def _size(text: str) -> int:
    nbytes = parse_size(text)
    if not 1 <= nbytes <= MOST:
        raise UsageError(f"{text!r} is not a size to measure", code="bad-option", fix=f"use 1 byte to {format_size(MOST)}")
    return nbytes


# ------------------------------------------------------------------------------------------------------- what is shown

COLUMNS = (11, 11, 9, 6, 5, 8, 7, 7, 7, 8, 7, 7, 7)
"""Widths of the table, 100 characters together."""


def _columns(*cells: object) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(map(str, cells), COLUMNS, strict=True))


_PLACE = ("time", "algbw", "busbw", "#wrong")
_UNITS = ("(us)", "(GB/s)", "(GB/s)", "")
HEAD = (
    f"{'':42}{'out-of-place':>20}{'in-place':>28}",
    _columns("size", "count", "type", "redop", "root", *_PLACE, *_PLACE),
    _columns("(B)", "(elements)", "", "", "", *_UNITS, *_UNITS),
)


def lines(record: RunRecord) -> Iterator[str]:
    """The record for a terminal of 100 columns: a table for each collective, implementation and mode; pairs, fits, notes."""
    tables: dict[tuple[str, ...], dict[tuple[Any, ...], dict[bool, Row]]] = {}
    for row in record.rows:
        if row.us is not None and "in_place" in row.extra:
            impl = " ".join(filter(None, (row.impl, row.extra.get("forced"))))
            table = tables.setdefault((row.subject, impl, row.mode), {})
            table.setdefault((row.extra.get("redop"), row.bytes), {})[row.extra["in_place"]] = row
    for (op, impl, mode), sets in tables.items():
        yield f"# {op}, {impl}, {mode}, {record.config['tp']} ranks"
        yield from HEAD
        yield from map(_line, sets.values())
        yield ""
    for subject, heading, show_row in (("pair", PAIRS, _pair), ("fit", FITS, _fit), ("crossover", CROSSINGS, _crossing)):
        rows = [row for row in record.rows if row.subject == subject]
        yield from (*heading, *map(show_row, rows), "") if rows else ()
    yield from record.notes


PAIRS = (
    "# pairs of ranks: -> one way, <-> both ways at once",
    f"{'pair':>12}{'size (B)':>14}{'time (us)':>12}{'GB/s':>9}",
)
FITS = (
    "# fit: time = latency + size / rate; below the half size latency weighs more, above it the rate",
    f"{'collective':<26}{'by':<24}{'latency (us)':>13}{'rate (GB/s)':>12}{'half size':>12}{'r2':>6}",
)
CROSSINGS = ("# crossover sizes",)


def _line(places: dict[bool, Row]) -> str:
    row = next(iter(places.values()))
    dtype, redop, root = SHORT.get(row.dtype, row.dtype), row.extra.get("redop", "none"), row.extra.get("root", -1)
    numbers = [cell for in_place in (False, True) for cell in _numbers(places.get(in_place))]
    return _columns(row.bytes or 0, row.extra["count"], dtype, redop, root, *numbers)


def _numbers(row: Row | None) -> list[str]:
    if row is None or row.us is None:
        return ["N/A"] * 4
    return [*map(_short, (row.us.p50, row.algbw_gbps or 0.0, row.busbw_gbps or 0.0)), str(row.extra["wrong"])]


def _fit(row: Row) -> str:
    fit = row.extra
    name, by = " ".join(filter(None, (fit["op"], fit.get("redop")))), f"{row.impl}, {row.mode}"
    half = format_size(fit["half_bytes"]) if isinstance(fit.get("half_bytes"), (int, float)) else "-"
    return f"{name:<26}{by:<24}{_figure(fit['alpha_us']):>13}{_figure(fit['gbps']):>12}{half:>12}{_figure(fit['r2']):>6}"


def _crossing(row: Row) -> str:
    where = row.extra
    name = " ".join(filter(None, (where["op"], where.get("redop"))))
    return f"{name}, {row.mode}: {where['below']} is faster below {format_size(where['bytes'])}, {where['above']} above"


def _figure(value: Any) -> str:
    return _short(value) if isinstance(value, (int, float)) else "-"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


def _pair(row: Row) -> str:
    arrow = "<->" if row.extra["direction"] == "bi" else "->"
    name = f"{row.extra['src']} {arrow} {row.extra['dst']}"
    us = row.us.p50 if row.us else 0.0
    return f"{name:>12}{row.bytes or 0:>14}{_short(us):>12}{_short(row.algbw_gbps or 0.0):>9}"


def write_csv(record: RunRecord, path: Path) -> None:
    """One line for each row: its plain fields, the percentiles, and each of ``extra`` in a column of its own."""
    flat = []
    for row in record.rows:
        fields = {name: value for name, value in asdict(row).items() if name not in ("us", "extra", "shape")}
        times = {f"{name}_us": value for name, value in asdict(row.us).items()} if row.us else {}
        flat.append(fields | times | row.extra)
    columns = list(dict.fromkeys(name for row in flat for name in row if any(r.get(name) is not None for r in flat)))
    text = StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(flat)
    write_file(path, text.getvalue())
