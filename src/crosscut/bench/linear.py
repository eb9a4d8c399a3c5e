"""``crosscut bench linear``: the classic experiment. One layer on one device, and the same layer split.

Every way is timed and checked in the same run against float64. The record holds a row for each way, size and mode, a row
for the collective alone, and sentences that say whether the split pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from crosscut.bench.context import make_record
from crosscut.bench.shapes import parse_shape
from crosscut.bench.source import real_problems
from crosscut.bench.split import Problem, exchange, implementations, random_problem
from crosscut.bench.timing import Call, Sampling, Timed, pilot, time_case
from crosscut.bench.verdict import label, noisy, pays_from, wrong_results
from crosscut.collectives import choice, fast
from crosscut.collectives.select import Choice
from crosscut.distributed.launch import RankContext
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.records import Row, RunRecord, Times, now
from crosscut.units import format_size, gbps

GPU_SHAPES = (
    "1x1024->1024", "32x1024->1024", "1x4096->8192", "32x4096->8192", "128x4096->8192", "512x4096->8192",
    "2048x4096->8192", "32x8192->28672", "4096x8192->28672", "8192x8192->8192",
    "1x4096->14336->4096", "32x4096->14336->4096",
)  # fmt: skip
CPU_SHAPES = ("1x1024->1024", "32x1024->1024", "1x1024->4096->1024", "64x1024->4096->1024")


@dataclass(frozen=True)
class LinearConfig:
    """What to measure. ``shapes``: ``TxI->O`` (one layer) or ``TxH->F->H`` (the column-row pair), empty for the defaults."""

    tp: int
    shapes: tuple[str, ...] = ()
    dtype: str = "auto"
    modes: tuple[str, ...] = ()
    split: str = "column"
    against: tuple[str, ...] = ()
    source: str | None = None
    inputs: str = "embedding"
    text: str | None = None
    tokens: tuple[int, ...] = (1, 32)
    seconds: float = 0.3
    seed: int = 0
    explain: bool = False
    """Say in the record's notes what carries each shape's collective, and why."""


def run(ctx: RankContext, config: LinearConfig) -> RunRecord:
    """Measure on the ranks of ``ctx`` and return the record; rank 0's holds every row.

    Raises UsageError on a config that cannot work on these ranks.
    """
    mesh = make_mesh(tp=config.tp, device=ctx.device)
    started, rows, reasons = now(), list[Row](), list[str]()
    modes, against = _modes(config, mesh), _against(config, ctx)
    problems = list(_problems(config, mesh))
    for index, build in enumerate(problems):
        with torch.no_grad():
            found, why = _measure(build(), mesh, modes, against, config.seconds, ctx, (index, len(problems)))
        rows += found
        reasons.append(why)
    on_gpu = mesh.device.type == "cuda"
    disturbed = noisy(rows)
    notes = [disturbed] if disturbed else [pays_from("crosscut", mode, rows) for mode in modes if mesh.tp.size > 1]
    if not on_gpu and mesh.tp.size > 1:
        notes.append(
            "These ranks are processes that share the cores of one CPU: the times show what splitting costs, "
            "not what it gains on GPUs. One device could use all the cores."
        )
    wrong = wrong_results(rows)
    notes += wrong or [f"All {sum(row.error is not None for row in rows)} results equal the float64 reference to rounding."]
    notes += reasons if config.explain else []
    settled = asdict(config) | {"backend": ctx.backend, "correct": not wrong}
    return make_record("bench linear", settled, mesh, rows, started, notes)


def _modes(config: LinearConfig, mesh: Mesh) -> tuple[str, ...]:
    possible = ("graph", "eager") if mesh.device.type == "cuda" and mesh.tp.backend in ("nccl", "none") else ("eager",)
    for mode in config.modes:
        if mode not in possible:
            raise UsageError(
                f"mode {mode!r} cannot run here: CUDA graphs need a GPU for each rank and NCCL",
                code="bad-option",
                fix=f"leave --mode out, or use {' or '.join(possible)}",
            )
    return config.modes or possible


def _against(config: LinearConfig, ctx: RankContext) -> tuple[str, ...]:
    for name in config.against:
        if name in ("nccl", "gloo") and name != ctx.backend:
            raise UsageError(
                f"{name} cannot be compared: these ranks talk over {ctx.backend}",
                code="no-backend",
                fix=f"use --against {ctx.backend}, or choose the ranks' backend with --backend {name}",
            )
    return config.against or (ctx.backend,)


def _problems(config: LinearConfig, mesh: Mesh) -> Iterator[Callable[[], Problem]]:
    on_gpu = mesh.device.type == "cuda"
    dtype = getattr(torch, ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype)
    if config.source is not None:
        yield from real_problems(config.source, config.split, config.inputs, config.text, config.tokens, dtype, mesh.tp)
        return
    for text in config.shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES):
        shape = parse_shape(text)
        kind = "pair" if shape.pair else config.split
        yield lambda kind=kind, sizes=shape.sizes: random_problem(kind, sizes, dtype, mesh.device, config.seed)  # type: ignore[misc]


@contextmanager
def _all_cores(calls: list[Call], mesh: Mesh, alone: bool) -> Iterator[None]:
    """On CPU, one device means the whole processor: the one rank that computes may use the cores of all, if that is faster."""
    own = torch.get_num_threads()
    if alone and mesh.tp.rank == 0:
        tried = []
        for threads in (own, own * mesh.tp.size):
            torch.set_num_threads(threads)
            tried.append((min(pilot(calls, mesh.device) for _ in range(3)), threads))
        torch.set_num_threads(min(tried)[1])
    try:
        yield
    finally:
        torch.set_num_threads(own)


def _measure(
    problem: Problem,
    mesh: Mesh,
    modes: tuple[str, ...],
    against: tuple[str, ...],
    seconds: float,
    ctx: RankContext,
    place: tuple[int, int],
) -> tuple[list[Row], str]:
    """All rows of one problem, and what carries its collective; ``place`` is its number and how many there are."""
    builders, carrier = implementations(problem, mesh, against), _carrier(problem, mesh)
    reference, sampling = problem.reference(), Sampling(seconds)
    rows: list[Row] = []
    for number, (name, build) in enumerate(builders.items()):
        ctx.progress((place[0] + number / len(builders)) / place[1], f"{label(problem.shape)}: {name}")
        calls = build()
        for mode in modes:
            if mode == "graph" and name == "dtensor":
                continue  # its dispatch is what is compared, and a graph has none
            alone = name == "single" and mesh.device.type == "cpu"
            with _all_cores(calls, mesh, alone):
                timed = time_case(calls, mesh.tp, mode, sampling, alone=alone)
            rows.append(_row(problem, name, mode, mesh, timed, reference, carrier.path))
        del calls
    if mesh.tp.size > 1:
        rows += _exchange_rows(problem, mesh, modes, sampling, carrier)
    return _with_gains(rows), f"{label(problem.shape)}: {carrier}"


@dataclass(frozen=True)
class _Carrier:
    """The collective of a split, its bytes (whole tensor), and what carries it."""

    op: str
    nbytes: int
    choice: Choice

    @property
    def path(self) -> str:
        """The algorithm of crosscut's kernels, or the backend."""
        return self.choice.algorithm or self.choice.impl

    def __str__(self) -> str:
        return f"{self.op} of {format_size(self.nbytes)} goes by {self.choice}: {self.choice.reason}"


def _carrier(problem: Problem, mesh: Mesh) -> _Carrier:
    """Asks the table, and then the kernels themselves, which decline some tensors of a size that they carry."""
    op, nbytes, _ = exchange(problem, mesh)
    chosen, x, group = choice(op, nbytes, mesh.tp), problem.x, mesh.tp
    if chosen.impl == "crosscut":
        tokens, width = x.shape[0], nbytes // x.element_size() // x.shape[0]
        if op == "all_reduce":
            taken = fast.all_reduce(x.new_zeros(tokens, width), group)
        else:
            taken = None if width % group.size else fast.all_gather(x.new_zeros(tokens, width // group.size), group, 1)
        if taken is None:
            chosen = Choice(group.backend, None, "the kernels take even parts of whole 16-byte vectors, and sum no float64")
    return _Carrier(op, nbytes, chosen)


def _row(problem: Problem, name: str, mode: str, mesh: Mesh, timed: Timed, reference: Tensor, path: str) -> Row:
    error = None
    if name != "no_comm" and timed.outputs:
        error = max(_relative_error(output, reference) for output in timed.outputs)
    return Row(
        subject=problem.subject,
        impl=name,
        mode=mode,
        world=1 if name == "single" else mesh.tp.size,
        dtype=problem.dtype,
        shape=problem.shape,
        us=Times.of(timed.samples),
        n=timed.calls,
        error=error,
        path=path if name == "crosscut" else None,
        extra={"split": problem.kind},
    )


def _exchange_rows(problem: Problem, mesh: Mesh, modes: tuple[str, ...], sampling: Sampling, carrier: _Carrier) -> list[Row]:
    """The collective of the split, alone: its time and bandwidths."""
    name, nbytes, call = exchange(problem, mesh)
    rows, world = [], mesh.tp.size
    for mode in modes:
        times = Times.of(time_case([call], mesh.tp, mode, sampling).samples)
        algbw, busbw = bandwidths(name, nbytes, times.p50, world)
        rows.append(
            Row(name, carrier.choice.impl, mode, world, problem.dtype, bytes=nbytes, us=times, algbw_gbps=algbw,
                busbw_gbps=busbw, path=carrier.path, extra={"shape_of": problem.shape, "split": problem.kind})
        )  # fmt: skip
    return rows


def bandwidths(op: str, nbytes: int, us: float, world: int) -> tuple[float, float]:
    """algbw and busbw in GB/s of ``op`` on ``nbytes`` (whole tensor), by the definitions of nccl-tests' PERFORMANCE.md."""
    factors = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}
    rate = gbps(nbytes, us)
    return rate, rate * factors.get(op, (world - 1) / world)


def _with_gains(rows: list[Row]) -> list[Row]:
    """Add each split row's speed-up over one device, and its share of communication: what it takes beyond no_comm."""
    p50 = {(row.impl, row.mode): row.us.p50 for row in rows if row.shape is not None and row.us is not None}
    for row in rows:
        if row.shape is None or row.us is None or row.impl == "single":
            continue
        row.extra["speedup"] = round(p50["single", row.mode] / row.us.p50, 4)
        if row.impl != "no_comm":
            row.extra["comm_share"] = round(max(0.0, 1 - p50["no_comm", row.mode] / row.us.p50), 4)
    return rows


def _relative_error(output: Tensor, reference: Tensor) -> float:
    error = float((output.double() - reference).norm() / reference.norm())
    return error if error == error else float("inf")
