"""``crosscut bench collectives``: every collective, implementation and size; timed, checked to the bit, fitted and judged.

This file plans the run and makes rows and sentences of what is found. How one case is timed and checked is in
:mod:`crosscut.bench.collective_timing`, what a collective is in :mod:`crosscut.bench.collective_cases`, and who carries
it in :mod:`crosscut.bench.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import median
from typing import TypeVar

import torch

from crosscut.bench import clocks, pairs
from crosscut.bench.backends import Implementation, build, first_line, free_memory
from crosscut.bench.collective_cases import CASES, Case, Place
from crosscut.bench.collective_timing import Measured, Problem
from crosscut.bench.context import hardware, make_record
from crosscut.bench.extend import all_exact
from crosscut.bench.fit import summarise
from crosscut.bench.timing import Sampling
from crosscut.bench.verdict import noisy
from crosscut.collectives import all_agree, all_reduce
from crosscut.distributed.launch import RankContext
from crosscut.distributed.mesh import Group, make_mesh
from crosscut.errors import CrosscutError, UsageError, choose
from crosscut.records import Row, RunRecord, now
from crosscut.units import format_size, gbps

T = TypeVar("T")

CPU_SIZES = tuple(1 << power for power in range(10, 21, 2))
GPU_SIZES = tuple(1 << power for power in range(10, 29, 2))
SLOT_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""What the buffers of one case may take together, unless a single set of them takes more."""
PAIR_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Message sizes that show a pair's bandwidth."""
SLOW = 2.0
"""A rank whose own time is more than this many times the others' is named."""


@dataclass(frozen=True)
class CollectivesConfig:
    """What to measure. Empty tuples and ``auto`` mean what suits the ranks: all collectives, every mode that can run."""

    tp: int
    ops: tuple[str, ...] = ()
    redops: tuple[str, ...] = ("sum",)
    dtype: str = "auto"
    sizes: tuple[int, ...] = ()
    """Bytes of the whole tensor, as nccl-tests counts them; a size that does not divide is rounded down."""
    impls: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    places: tuple[str, ...] = ("out", "in")
    """Buffers out of place, in place."""
    root: int = 0
    pairs: bool = False
    """Also measure every pair of ranks: latency and bandwidth, one way and both ways."""
    cold: bool = False
    """Push the buffers out of the cache before each sample."""
    seconds: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """One problem: everything but the mode."""

    case: Case
    redop: str
    nbytes: int
    impl: Implementation
    in_place: bool

    @property
    def title(self) -> str:
        """``'all_reduce sum'``."""
        return f"{self.case.name} {self.redop}" if self.case.reduces else self.case.name

    @property
    def label(self) -> str:
        """``'all_reduce sum, 64 KiB, nccl'``."""
        size = [format_size(self.nbytes)] if self.case.sized else []
        return ", ".join([self.title, *size, self.impl.name])


@dataclass
class Bench:
    """What all jobs of a run share. ``left_out``: (implementation, reason) -> the things that were not measured."""

    config: CollectivesConfig
    group: Group
    dtype: torch.dtype
    modes: tuple[str, ...]
    room: int
    left_out: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def skip(self, impl: str, why: str, what: str) -> None:
        """Note that ``what`` is not measured on ``impl``."""
        found = self.left_out.setdefault((impl, why), [])
        if what not in found:
            found.append(what)


def run(ctx: RankContext, config: CollectivesConfig, cases: Mapping[str, Case] = CASES) -> RunRecord:
    """Measure on the ranks of ``ctx`` and return the record, the same on every rank.

    Rows of each collective, then of pairs, then what :func:`crosscut.bench.fit.summarise` makes of them. Notes name wrong
    results, slow ranks and throttled GPUs, and say what was left out and why. ``cases``: what there is to ask for.
    Raises UsageError (``bad-option``) on a config that cannot work on these ranks, and when nothing of it can run.
    """
    _check(config, ctx)
    mesh = make_mesh(tp=config.tp, device=ctx.device)
    group, started, before = mesh.tp, now(), clocks.read(ctx.device)
    sizes, kind = config.sizes or (GPU_SIZES if _fast(group) else CPU_SIZES), ctx.device.type
    free = torch.tensor([free_memory(ctx.device, group.size)], dtype=torch.float64, device=ctx.device)
    room = min(int(all_reduce(free, group, "min").item()), max(SLOT_BYTES[kind], 2 * max(sizes) + (1 << 20)))
    impls, missing = build(config.impls or _impls(group), group, room)
    bench = Bench(config, group, _dtype(config, group), _modes(config, group), room)
    for name, why in missing.items():
        bench.skip(name, why, "anything")
    jobs = _jobs(bench, [cases[choose("collective", op, cases)] for op in config.ops or cases], impls, sizes)
    rows: list[Row] = []
    with torch.no_grad():
        for index, job in enumerate(jobs):
            ctx.progress(index / (len(jobs) + config.pairs), job.label)
            rows += _measure(bench, job)
        if config.pairs:
            ctx.progress(len(jobs) / (len(jobs) + 1), "pairs")
            rows += _pairs(bench)
    for impl in impls:
        impl.close()
    skipped = [f"{name} did not run {_list(what)}: {why.rstrip('.')}." for (name, why), what in bench.left_out.items()]
    if not rows:
        raise UsageError(
            f"nothing could be measured. {' '.join(skipped)}",
            code="bad-option",
            fix=f"change what that names (--op, --sizes, --dtype, --redop, --mode or --tp), or use --impl {ctx.backend}",
        )
    where = hardware(mesh)
    found = summarise(rows, where.device, where.links)
    wrong, disturbed = _wrong(rows), noisy(rows)
    notes = [
        *([disturbed] if disturbed else (str(row.extra["text"]) for row in found if row.subject == "verdict")),
        *(wrong or [all_exact(rows)]),
        *slow_ranks(rows),
        *clocks.notes(before, clocks.read(ctx.device), group),
        *skipped,
    ]
    settled = asdict(config) | {"backend": ctx.backend, "correct": not wrong}
    return make_record("bench collectives", settled, mesh, [*rows, *found], started, notes)


# ------------------------------------------------------------------------------------------------------ what to do


def _check(config: CollectivesConfig, ctx: RankContext) -> None:
    if ctx.world_size < 2:
        raise UsageError("one rank has nobody to talk to", code="bad-option", fix="ask for at least two: --tp 2")
    if not 0 <= config.root < config.tp:
        raise UsageError(
            f"the root {config.root} is not one of the {config.tp} ranks", code="bad-option", fix=f"use 0 to {config.tp - 1}"
        )


def _fast(group: Group) -> bool:
    return group.device.type == "cuda" and group.backend == "nccl"


def _impls(group: Group) -> tuple[str, ...]:
    return ("nccl", "nccl_symmetric", "torch_one_shot", "torch_two_shot", "crosscut") if _fast(group) else (group.backend,)


def _dtype(config: CollectivesConfig, group: Group) -> torch.dtype:
    name = config.dtype if config.dtype != "auto" else "bfloat16" if _fast(group) else "float32"
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _modes(config: CollectivesConfig, group: Group) -> tuple[str, ...]:
    if "graph" in config.modes and not _fast(group):
        raise UsageError(
            "mode 'graph' cannot run here: CUDA graphs need a GPU for each rank and NCCL",
            code="bad-option",
            fix="leave --mode out, or use eager or host",
        )
    return config.modes or (("graph", "eager") if _fast(group) else ("eager",))


def _jobs(bench: Bench, cases: Sequence[Case], impls: Sequence[Implementation], sizes: Sequence[int]) -> list[Job]:
    """Everything that there is to try, each problem once: sizes that round to the same one are one."""
    jobs, config = dict[tuple[object, ...], Job](), bench.config
    for case in cases:
        redops = config.redops if case.reduces else ("none",)
        places = [place == "in" for place in config.places if place == "out" or case.in_place]
        for redop, size, impl, in_place in product(redops, sizes, impls, places):
            nbytes = _rounded(bench, case, size)
            job = Job(case, redop, nbytes, impl, in_place)
            why = impl.refuses(case, bench.dtype, redop if case.reduces else None, in_place)
            if case.powers_of_two and bench.group.size & (bench.group.size - 1):
                why = f"it needs a number of ranks that is a power of two, not {bench.group.size}"
            if not why and 2 * nbytes > bench.room:
                why = f"its buffers take more than the {format_size(bench.room)} that are free"
            if why:
                bench.skip(impl.name, why, f"{job.title} in place" if in_place and "in place" in why else job.title)
            else:
                jobs.setdefault((case.name, redop, nbytes, impl.name, in_place), job)
    return list(jobs.values())


def _rounded(bench: Bench, case: Case, size: int) -> int:
    world, itemsize = bench.group.size, bench.dtype.itemsize
    return case.nbytes(case.count(size, world, itemsize), world, itemsize)


def attempt(make: Callable[[], T], group: Group) -> tuple[T | None, str]:
    """``make()`` where every rank can, else None and the reason. Only for what all ranks refuse before they talk."""
    found, why = None, ""
    try:
        found = make()
    except UsageError as error:
        why = error.message
    except CrosscutError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        why = first_line(error)
    return (found, "") if all_agree(group, not why) else (None, why or "another rank refused it")


def _measure(bench: Bench, job: Job) -> list[Row]:
    """A row for each mode that this problem can run in."""
    case, impl, group, config = job.case, job.impl, bench.group, bench.config
    count = case.count(job.nbytes, group.size, bench.dtype.itemsize)
    place = Place(group.rank, group.size, count, config.root)
    impl.release()

    def make() -> Problem:
        numbers = case.numbers(group.size, bench.dtype, job.redop, config.seed, impl.group.device)
        return Problem(case, impl, numbers, place, job.in_place, bench.room)

    problem, why = attempt(make, group)
    if problem is None:
        bench.skip(impl.name, why, f"{job.title} of {_name(bench.dtype)}")
        return []
    problem.fill_a_sample(Sampling(config.seconds, least=5))
    rows: list[Row] = []
    own: list[list[float]] = []
    for mode in bench.modes:
        if mode == "graph" and not (case.capturable and _fast(impl.group)):
            bench.skip(impl.name, "a CUDA graph cannot hold it", f"{job.title} in a graph")
            continue
        measured, why = attempt(lambda mode=mode: problem.measure(mode, config.cold), group)  # type: ignore[misc]
        if measured is None:
            bench.skip(impl.name, why, f"{job.title} in mode {mode}")
            continue
        own = own or problem.own_times(measured.us.p50)
        rows.append(_row(bench, job, mode, measured, own))
    return rows


def _pairs(bench: Bench) -> list[Row]:
    rows, group = list[Row](), bench.group
    sampling = Sampling(bench.config.seconds, least=5)
    for pair in pairs.pairs(group.size):
        for nbytes in (pairs.SMALL, PAIR_BYTES[group.device.type]):
            row, why = attempt(lambda p=pair, n=nbytes: pairs.measure(p, n, group, sampling, group.backend), group)  # type: ignore[misc]
            if row is None:
                bench.skip(group.backend, why, "pairs of ranks")
                return rows
            rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------- what came of it


def _row(bench: Bench, job: Job, mode: str, measured: Measured, own: list[list[float]]) -> Row:
    case, impl, world, found = job.case, job.impl, bench.group.size, measured.mistakes
    us, algorithm = measured.us, impl.algorithm(case, job.nbytes)
    rate = gbps(job.nbytes, us.p50)
    extra = {
        "redop": job.redop if case.reduces else None,
        "in_place": job.in_place,
        "root": bench.config.root if case.rooted else None,
        "count": case.count(job.nbytes, world, bench.dtype.itemsize),
        "wrong": found.wrong,
        "first_wrong": found.first,
        "wire_gbps": rate * case.wire_factor(world, impl.kind(algorithm)) if case.sized else None,
        "ranks_us": [middle for middle, _ in own],
        "ranks_least_us": [least for _, least in own],
        "spread": (us.p90 - us.p10) / us.p50,
        "cold": bench.config.cold,
    }
    return Row(
        subject=case.name,
        impl=impl.name,
        mode=mode,
        world=world,
        dtype=_name(bench.dtype),
        bytes=job.nbytes if case.sized else None,
        us=us,
        n=measured.calls,
        algbw_gbps=rate if case.sized else None,
        busbw_gbps=rate * case.busbw(world) if case.sized else None,
        error=found.error if case.sized else None,
        path=algorithm,
        extra={name: value for name, value in extra.items() if value is not None},
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(names: Sequence[str]) -> str:
    """``'a, b and c'``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _wrong(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row with wrong elements, which says where the first one is."""
    found = []
    for row in rows:
        if row.extra.get("wrong"):
            first, place = row.extra["first_wrong"], "in place" if row.extra["in_place"] else "out of place"
            differ = "1 element differs" if row.extra["wrong"] == 1 else f"{row.extra['wrong']} elements differ"
            found.append(
                f"WRONG: {row.subject} by {row.impl} ({row.mode}, {format_size(row.bytes or 0)}, {place}): "
                f"{differ}; the first is element {first['index']} on rank {first['rank']}, "
                f"{first['got']:g} instead of {first['expected']:g}."
            )
    return found


def slow_ranks(rows: Sequence[Row]) -> list[str]:
    """A sentence for each rank whose own time is far above the others' in most sizes of a collective.

    Its least time counts, so that a moment of noise slows nobody. Collectives with a root are left out: there one rank
    has more to do than the others.
    """
    ratios: dict[tuple[int, str], dict[str, list[float]]] = {}
    for row in rows:
        own = row.extra.get("ranks_us", [])
        for rank, least in enumerate(row.extra.get("ranks_least_us", [])) if "root" not in row.extra else ():
            others = median(own[:rank] + own[rank + 1 :])
            ratios.setdefault((rank, row.impl), {}).setdefault(row.subject, []).append(least / others)
    sentences = []
    for (rank, impl), of in sorted(ratios.items()):
        slow = {op: median(values) for op, values in of.items() if median(values) > SLOW}
        if slow:
            sentences.append(
                f"Rank {rank} is {max(slow.values()):.1f}x slower than the others in {_list(list(slow))} ({impl}), "
                "by its own time, without the waiting."
            )
    return sentences
