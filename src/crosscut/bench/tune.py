"""``crosscut tune``: each algorithm of the kernels next to NCCL, at every size, and from that the table that select reads.

Every case is one CUDA graph of calls in bfloat16, its input in the GPU's L2 cache where it fits, as after a multiply.
Results are compared with NCCL's in the same run: moved data must be equal to the bit, sums to rounding. An algorithm
that is wrong at one size is left out at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.bench.context import make_record
from crosscut.bench.layers import bandwidths
from crosscut.bench.timing import Sampling, time_case
from crosscut.bench.verdict import allowed_error, noisy
from crosscut.collectives import choice
from crosscut.collectives.fast import fast, machine
from crosscut.collectives.functional import all_gather_single, reduce_scatter_single
from crosscut.collectives.select import ALGORITHMS, OPS, Classes, save_table
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Group, make_mesh
from crosscut.errors import UsageError
from crosscut.kernels.exchange import Exchange
from crosscut.records import Row, RunRecord, Times, now
from crosscut.units import format_size, format_us

MARGIN = 0.03
"""How much faster than NCCL a kernel must be to be chosen: what two runs of the same thing differ by."""

Medians = Mapping[int, Mapping[str, float]]
"""Size in bytes -> algorithm, or nccl, -> median in microseconds."""


@dataclass(frozen=True)
class TuneConfig:
    """What to measure: ``sizes`` in bytes of the whole tensor, each case for about ``seconds``."""

    tp: int
    sizes: tuple[int, ...] = tuple(1 << power for power in range(10, 27))
    seconds: float = 0.03


def run(ctx: RankContext, config: TuneConfig) -> RunRecord:
    """Measure on the ranks of ``ctx``, keep the table (rank 0, unless the run was noisy) and return the record.

    Raises UsageError (``no-backend``) where crosscut's kernels cannot run, with the reason.
    """
    mesh = make_mesh(tp=config.tp, device=ctx.device)
    started, exchange, rows = now(), _kernels(mesh.tp), list[Row]()
    cases = [(op, size) for op in OPS for size in config.sizes]
    for index, (op, size) in enumerate(cases):
        ctx.progress(index / len(cases), f"{op}, {format_size(size)}")
        with torch.no_grad():
            rows += measure(exchange, mesh.tp, op, size, "graph", Sampling(config.seconds, most=30))
    times = medians(rows)
    classes = {op: classes_from(times[op]) for op in OPS}
    notes = [line for op in OPS for line in summary(op, times[op], classes[op])] + wrong_algorithms(rows)
    if ctx.rank == 0:
        disturbed = noisy(rows)
        notes.append(f"{disturbed} Nothing was saved." if disturbed else _keep(ctx.device, config.tp, classes, started[:10]))
    settled = asdict(config) | {"backend": ctx.backend, "classes": {op: [*map(list, classes[op])] for op in OPS}}
    return make_record("tune", settled, mesh, rows, started, notes)


def _kernels(group: Group) -> Exchange:
    found = fast(group)
    if found is not None and group.backend == "nccl":
        return found.exchange
    why = choice(OPS[0], 0, group).reason if found is None else f"the ranks talk over {group.backend}, not NCCL"
    raise UsageError(
        f"there is nothing to tune, because crosscut's kernels cannot run here: {why}",
        code="no-backend",
        fix="run it on a host with 2 to 8 linked NVIDIA GPUs, one for each of --tp ranks; elsewhere nothing needs tuning",
    )


def _keep(device: torch.device, world: int, classes: Mapping[str, Classes], date: str) -> str:
    try:
        return f"Saved in {save_table(machine(device), world, classes, date)}; later runs with {world} ranks here use it."
    except OSError as error:
        return f"Not saved, so nothing changes: {error}"


# ------------------------------------------------------------------------------------------------------ measuring


def measure(exchange: Exchange, group: Group, op: str, size: int, mode: str, sampling: Sampling) -> list[Row]:
    """A row for NCCL and one for each algorithm that carries ``size`` bytes (whole tensor, less what does not divide).

    ``extra["difference"]`` is the largest |result - NCCL's result| over the largest |NCCL's result|, of any rank.
    """
    world = group.size
    nbytes = size // (16 * world) * 16 * world
    part = nbytes if op in ("all_reduce", "broadcast") else nbytes // world
    generator = torch.Generator(group.device).manual_seed(group.rank)
    length = (part if op == "all_gather" else nbytes) // 2
    x = torch.randn(length, device=group.device, generator=generator).to(torch.bfloat16)
    reference, buffer = _torch(op, x.clone(), group), x.clone()

    def row(impl: str, call: Callable[[], Tensor], path: str | None) -> Row:
        timed = time_case([lambda: (call(),)], group, mode, sampling)
        us = Times.of(timed.samples)
        algbw, busbw = bandwidths(op, nbytes, us.p50, world)
        extra = {"difference": _difference([output for (output,) in timed.outputs], reference, group)} if path else {}
        return Row(op, impl, mode, world, "bfloat16", bytes=nbytes, us=us, n=timed.calls, algbw_gbps=algbw,
                   busbw_gbps=busbw, path=path, extra=extra)  # fmt: skip

    rows = [row("nccl", lambda: _torch(op, buffer, group), None)]
    for algorithm in ALGORITHMS[op]:
        fits = part <= exchange.most(op, algorithm)
        if fits and (world > 2 or not algorithm.endswith("two_shot")):
            rows.append(row("crosscut", lambda algorithm=algorithm: _CALLS[op](exchange, x, algorithm), algorithm))  # type: ignore[misc]
    return rows


def _torch(op: str, x: Tensor, group: Group) -> Tensor:
    """What torch.distributed makes of ``x``; all_reduce and broadcast work in place, as layers have them do it."""
    ranks = group.process_group
    if op == "all_reduce":
        dist.all_reduce(x, group=ranks)
        return x
    if op == "broadcast":
        dist.broadcast(x, src=group.ranks[0], group=ranks)
        return x
    lengths = {"all_gather": x.numel() * group.size, "reduce_scatter": x.numel() // group.size}
    out = x.new_empty(lengths.get(op, x.numel()))
    if op == "all_gather":
        all_gather_single(out, x, group=ranks)
    elif op == "reduce_scatter":
        reduce_scatter_single(out, x, group=ranks)
    else:
        dist.all_to_all_single(out, x, group=ranks)
    return out


_CALLS: dict[str, Callable[[Exchange, Tensor, str], Tensor]] = {
    "all_reduce": lambda e, x, algorithm: e.all_reduce(x, torch.empty_like(x), "sum", algorithm),
    "all_gather": lambda e, x, algorithm: e.all_gather(x, x.new_empty(x.numel() * e.size), algorithm),
    "reduce_scatter": lambda e, x, algorithm: e.reduce_scatter(x, x.new_empty(x.numel() // e.size), "sum", algorithm),
    "broadcast": lambda e, x, algorithm: e.broadcast(x, torch.empty_like(x), 0, algorithm),
    "all_to_all": lambda e, x, algorithm: e.all_to_all(x, torch.empty_like(x), algorithm),
}


def _difference(outputs: Sequence[Tensor], reference: Tensor, group: Group) -> float:
    """One wrong element shows. torch.distributed finds the worst rank, not the kernels that are on trial."""
    whole = reference.float()
    worst = torch.stack([(output.float() - whole).abs().max() for output in outputs]).max() / whole.abs().max()
    worst.nan_to_num_(nan=float("inf"))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group.process_group)
    return float(worst)


# ----------------------------------------------------------------------------------- from rows to a table: pure


def _wrong(row: Row) -> bool:
    allowed = allowed_error(row.dtype, 0.0, row.world) if row.subject in ("all_reduce", "reduce_scatter") else 0.0
    return row.path is not None and not row.extra["difference"] <= allowed


def wrong_algorithms(rows: Sequence[Row]) -> list[str]:
    """A sentence for each algorithm that gave a wrong result at some size."""
    worst: dict[tuple[str, str | None], Row] = {}
    for row in rows:
        if _wrong(row):
            worst.setdefault((row.subject, row.path), row)
    return [
        f"WRONG, and therefore left out: {op} by {path} differs from NCCL's result by {row.extra['difference']:.3g} "
        f"(relative) at {format_size(row.bytes or 0)}. Please report it with the record."
        for (op, path), row in worst.items()
    ]


def medians(rows: Sequence[Row]) -> dict[str, dict[int, dict[str, float]]]:
    """The medians of each operation, without algorithms that were wrong at any size."""
    wrong = {(row.subject, row.path) for row in rows if _wrong(row)}
    times: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        if row.us is not None and row.bytes is not None and (row.subject, row.path) not in wrong:
            times.setdefault(row.subject, {}).setdefault(row.bytes, {})[row.path or "nccl"] = row.us.p50
    return times


def classes_from(times: Medians, margin: float = MARGIN) -> Classes:
    """The size classes that ``times`` speak for: ascending (largest size, algorithm), and NCCL above the last.

    At each size the fastest kernel counts, and it must take at most (1 - margin) of NCCL's time; neighbours with the same
    winner become one class. A table has no class for NCCL, so the first size at which it wins ends the table. The
    exception: where NCCL leads by no more than the margin, and a kernel wins again above, the kernels keep that size too,
    so that one unlucky measurement does not give away all that follows.
    """
    kept: list[tuple[int, str]] = []
    undecided: list[tuple[int, str]] = []
    for size in sorted(times):
        kernels = {name: us for name, us in times[size].items() if name != "nccl"}
        name = min(kernels, key=lambda name: kernels[name], default="")
        if not kernels or kernels[name] > times[size]["nccl"] * (1 + margin):
            break
        undecided.append((size, name))
        if kernels[name] <= times[size]["nccl"] * (1 - margin):
            kept += undecided
            undecided = []
    return tuple(here for here, after in zip_longest(kept, kept[1:]) if after is None or here[1] != after[1])


def summary(op: str, times: Medians, classes: Classes) -> list[str]:
    """A line for each class: sizes, algorithm, its times and NCCL's over these sizes, and how many times faster it is."""
    lines, below = [], 0
    for largest, name in classes:
        sizes = [size for size in sorted(times) if below < size <= largest]
        ours, theirs = [times[size][name] for size in sizes], [times[size]["nccl"] for size in sizes]
        gains = [b / a for a, b in zip(ours, theirs, strict=True)]
        lines.append(
            f"{op:<15}{_span(sizes, format_size):<20} {name:<16}{_span(ours, format_us):<20} "
            f"NCCL {_span(theirs, format_us):<20} {_span(gains, '{:.2f}x'.format)}"
        )
        below = largest
    rest = f"above {format_size(below)}" if classes else "any size"
    return [*lines, f"{op:<15}{rest:<20} nccl"]


def _span(values: Sequence[float], style: Callable[[float], str]) -> str:
    low, high = style(min(values)), style(max(values))
    return low if low == high else f"{low} to {high}"
