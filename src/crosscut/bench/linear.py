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

from crosscut.bench.context import hardware, versions
from crosscut.bench.shapes import parse_shape
from crosscut.bench.source import real_problems
from crosscut.bench.split import Problem, exchange, implementations, random_problem
from crosscut.bench.timing import Call, Sampling, Timed, pilot, time_case
from crosscut.bench.verdict import label, noisy, pays_from, wrong_results
from crosscut.distributed.launch import RankContext
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.records import Row, RunRecord, Times, now, source_commit
from crosscut.units import gbps

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


def run(ctx: RankContext, config: LinearConfig) -> RunRecord:
    """Measure on the ranks of ``ctx`` and return the record; rank 0's holds every row.

    Raises UsageError on a config that cannot work on these ranks.
    """
    mesh = make_mesh(tp=config.tp, device=ctx.device)
    started, rows = now(), list[Row]()
    modes, against = _modes(config, mesh), _against(config, ctx)
    problems = list(_problems(config, mesh))
    for index, build in enumerate(problems):
        with torch.no_grad():
            rows += _measure(build(), mesh, modes, against, config.seconds, ctx, (index, len(problems)))
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
    return RunRecord(
        command="bench linear",
        config=asdict(config) | {"backend": ctx.backend, "correct": not wrong},
        hardware=hardware(mesh),
        versions=versions(mesh),
        rows=rows,
        commit=source_commit(),
        started=started,
        notes=notes,
    )


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
) -> list[Row]:
    """All rows of one problem; ``place`` is its number and how many there are."""
    builders = implementations(problem, mesh, against)
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
            rows.append(_row(problem, name, mode, mesh, timed, reference))
        del calls
    if mesh.tp.size > 1:
        rows += _exchange_rows(problem, mesh, modes, sampling)
    return _with_gains(rows)


def _row(problem: Problem, name: str, mode: str, mesh: Mesh, timed: Timed, reference: Tensor) -> Row:
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
        path=mesh.tp.backend if name == "crosscut" else None,
        extra={"split": problem.kind},
    )


def _exchange_rows(problem: Problem, mesh: Mesh, modes: tuple[str, ...], sampling: Sampling) -> list[Row]:
    """The collective of the split, alone: its time and bandwidths by nccl-tests' definitions."""
    name, nbytes, call = exchange(problem, mesh)
    world = mesh.tp.size
    factor = (world - 1) / world * (2 if name == "all_reduce" else 1)
    rows = []
    for mode in modes:
        times = Times.of(time_case([call], mesh.tp, mode, sampling).samples)
        rate = gbps(nbytes, times.p50)
        rows.append(
            Row(name, mesh.tp.backend, mode, world, problem.dtype, bytes=nbytes, us=times, algbw_gbps=rate,
                busbw_gbps=rate * factor, extra={"shape_of": problem.shape, "split": problem.kind})
        )  # fmt: skip
    return rows


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
