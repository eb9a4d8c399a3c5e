"""What the layer benches share: every way to compute a layer, timed and checked in one run, as rows and sentences.

``bench linear``, ``bench mlp`` and ``bench block`` each give :func:`measured` their problems. The record holds a row for each
way, size, mode and pass (forward, or forward and backward), a row for the collective alone, and says whether the split pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from crosscut.bench.calls import Problem, Way
from crosscut.bench.context import make_record
from crosscut.bench.memory import peak_bytes, saved_bytes
from crosscut.bench.timing import Call, Sampling, pilot, slowest, time_case
from crosscut.bench.verdict import kept, label, noisy, pays_from, wrong_results
from crosscut.collectives import all_gather, all_reduce, choice, fast
from crosscut.collectives.select import Choice
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Group, Mesh
from crosscut.distributed.rank_main import out_of_memory
from crosscut.errors import UsageError
from crosscut.layers import matmul
from crosscut.layers.explain import explain
from crosscut.records import Row, RunRecord, Times, now
from crosscut.sharding import shard_sizes
from crosscut.units import format_size, gbps

FORWARD, BOTH = "forward", "forward+backward"
ONE_DEVICE = ("single", "single_best")
"""cuBLAS (on a CPU torch's multiply) as a user has it, and crosscut's layer unsplit, with the better of that and its own."""
WEIGHED = ("single", "crosscut", "crosscut_sp")
"""Implementations whose memory is measured where there is a backward."""


@dataclass(frozen=True)
class LayerConfig:
    """What every layer bench is asked for. ``against``: peers beside the backend's plain split."""

    tp: int
    dtype: str = "auto"
    modes: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    seconds: float = 0.3
    seed: int = 0
    backward: bool = False
    explain: bool = False
    """Say in the record's notes what carries each shape's collective, and why."""

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype asked for; auto is bfloat16 on GPUs and float32 on CPU."""
        name = ("bfloat16" if device.type == "cuda" else "float32") if self.dtype == "auto" else self.dtype
        found: torch.dtype = getattr(torch, name)
        return found


def measured(
    ctx: RankContext, mesh: Mesh, config: LayerConfig, command: str, builders: Sequence[Callable[[], Problem]]
) -> RunRecord:
    """Measure the problems that ``builders`` make, one after the other, and return the record; rank 0's holds every row.

    Raises UsageError on a config that cannot work on these ranks.
    """
    started, rows, reasons = now(), list[Row](), list[str]()
    modes, against = possible_modes(config.modes, mesh), _against(config.against, ctx)
    for index, build in enumerate(builders):
        try:
            run = _Run(build(), mesh, modes, against, Sampling(config.seconds), ctx, (index, len(builders)))
            rows += run.rows(config.backward)
            reasons += run.reasons() if config.explain else []
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UsageError(
                f"size {index + 1} of {len(builders)} does not fit into the memory of rank {mesh.rank}",
                code="bad-shape",
                fix="choose a smaller size, or a narrower --dtype",
            ) from None
    wrong = wrong_results(rows)
    notes = _verdicts(rows, modes, mesh, config.backward)
    notes += wrong or [f"All {sum(row.error is not None for row in rows)} results equal the float64 reference to rounding."]
    notes += reasons
    return make_record(command, asdict(config) | {"backend": ctx.backend, "correct": not wrong}, mesh, rows, started, notes)


def possible_modes(asked: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """The modes asked for, or all that can run. Raises UsageError (``bad-option``) for one that cannot."""
    possible = ("graph", "eager") if mesh.device.type == "cuda" and mesh.tp.backend in ("nccl", "none") else ("eager",)
    for mode in asked:
        if mode not in possible:
            raise UsageError(
                f"mode {mode!r} cannot run here: CUDA graphs need a GPU for each rank and NCCL",
                code="bad-option",
                fix=f"leave --mode out, or use {' or '.join(possible)}",
            )
    return tuple(asked) or possible


def _against(asked: Sequence[str], ctx: RankContext) -> tuple[str, ...]:
    """The plain split over the ranks' backend, by which the share hidden is judged, and the other peers asked for."""
    for name in asked:
        if name in ("nccl", "gloo") and name != ctx.backend:
            raise UsageError(
                f"{name} cannot be compared: these ranks talk over {ctx.backend}",
                code="no-backend",
                fix=f"use --against {ctx.backend}, or choose the ranks' backend with --backend {name}",
            )
    return tuple(dict.fromkeys((ctx.backend, *asked)))


def _verdicts(rows: list[Row], modes: Sequence[str], mesh: Mesh, backward: bool) -> list[str]:
    disturbed = noisy(rows)
    if mesh.tp.size == 1:
        return [disturbed] if disturbed else []
    passes = (FORWARD, BOTH) if backward else (FORWARD,)
    notes = [disturbed] if disturbed else [pays_from("crosscut", mode, rows, p) for p in passes for mode in modes]
    if mesh.device.type != "cuda":
        notes.append(
            "These ranks are processes that share the cores of one CPU: the times show what splitting costs, "
            "not what it gains on GPUs. One device could use all the cores."
        )
    return notes + kept(rows)


@contextmanager
def _all_cores(calls: Sequence[Call], mesh: Mesh, alone: bool) -> Iterator[None]:
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


@dataclass
class _Run:
    """One problem on its way to rows; ``place`` is its number and how many there are."""

    problem: Problem
    mesh: Mesh
    modes: Sequence[str]
    against: Sequence[str]
    sampling: Sampling
    ctx: RankContext
    place: tuple[int, int]

    def __post_init__(self) -> None:
        self.carrier = _carrier(self.problem, self.mesh)
        self.dtype = str(self.problem.x.dtype).removeprefix("torch.")

    def rows(self, backward: bool) -> list[Row]:
        """Every way in every mode, forward and then, when asked, with its backward; then the collective alone."""
        passes, rows = ((FORWARD, BOTH) if backward else (FORWARD,)), list[Row]()
        for turn, kind in enumerate(passes):
            ways = self.problem.ways(self.mesh, self.against, kind == BOTH)
            found: list[Row] = []
            for number, (name, build) in enumerate(ways.items()):
                done = (self.place[0] + (turn + number / len(ways)) / len(passes)) / self.place[1]
                self.ctx.progress(done, f"{label(self.problem.shape)}: {name}")
                with torch.set_grad_enabled(kind == BOTH):
                    found += self._way(name, build(), kind)
            rows += with_gains(found, self.ctx.backend)
        return rows + (self._exchange() if self.mesh.tp.size > 1 else [])

    def reasons(self) -> list[str]:
        """What carries the collective, the schedules of crosscut's layer in both forms, and its local multiplies; and why."""
        problem, told = self.problem, dict[str, None]()
        tokens = problem.exchange()[1]
        for sequence_parallel in (False, True):
            layer = problem.build(self.mesh, sequence_parallel)
            for line in explain(layer, tokens).splitlines() if self.mesh.tp.size > 1 else ():
                if f"schedule: {line}" not in told:
                    told[f"schedule{' with sequence parallelism' if sequence_parallel else ''}: {line}"] = None
            for name, weight in layer.named_parameters():
                if weight.dim() == 2 and weight.is_meta and self.problem.x.is_cuda:
                    told[f"multiply of {name}: {self._multiply(weight, tokens, name)}"] = None
        return [str(self.carrier), *(f"{label(problem.shape)}: {line}" for line in told)]

    def _multiply(self, weight: Tensor, tokens: int, name: str) -> str:
        """Which multiply crosscut takes for this rank's ``weight [N, K]`` where no gradient is recorded."""
        x = self.problem.x.new_empty(tokens, weight.shape[1])
        row = name in ("down.weight", "mlp.down.weight", "attention.o.weight") or self.problem.kind == "row"
        with torch.no_grad():
            then = ("all_reduce", self.mesh.tp) if row else None
            chosen = matmul.explain(x, torch.empty_like(weight, device=x.device), then=then)
        return f"{chosen.impl}, {chosen.reason}"

    def _way(self, name: str, way: Way, kind: str) -> Iterator[Row]:
        alone = name == "single" and self.mesh.device.type == "cpu"
        extra = {"split": self.problem.kind} | ({"pass": BOTH} if kind == BOTH else {})
        weighed = self._memory(way, alone) if kind == BOTH and name in WEIGHED else {}
        for mode in self.modes:
            if mode == "graph" and name == "dtensor":
                continue  # its dispatch is what is compared, and a graph has none
            with _all_cores(way.calls, self.mesh, alone):
                timed = time_case(way.calls, self.mesh.tp, mode, self.sampling, alone=alone)
            worst = max(_relative_errors(timed.outputs if way.expected else [], way.expected), default=0.0)
            yield Row(
                subject=self.problem.subject,
                impl=name,
                mode=mode,
                world=1 if name in ONE_DEVICE else self.mesh.tp.size,
                dtype=self.dtype,
                shape=self.problem.shape,
                us=Times.of(timed.samples),
                n=timed.calls,
                error=slowest([worst], self.mesh.tp)[0] if way.expected else None,
                path=self.carrier.path if name == "crosscut" else None,
                extra=extra | weighed,
            )

    def _memory(self, way: Way, alone: bool) -> dict[str, int]:
        """Bytes that one call keeps for its backward, and on GPUs its peak; the largest of any rank."""
        idle = alone and self.mesh.tp.rank != 0
        found = {"saved_bytes": 0 if idle else saved_bytes(way.calls[0], way.parameters)}
        if self.mesh.device.type == "cuda":
            found["peak_bytes"] = peak_bytes(way.calls[0])
        return {name: int(slowest([float(value)], self.mesh.tp)[0]) for name, value in found.items()}

    def _exchange(self) -> list[Row]:
        """The collective of the split, alone: its time and bandwidths."""
        rows, world, carrier = [], self.mesh.tp.size, self.carrier
        call = _exchange_call(self.problem, self.mesh.tp)
        for mode in self.modes:
            with torch.no_grad():
                times = Times.of(time_case([call], self.mesh.tp, mode, self.sampling).samples)
            algbw, busbw = bandwidths(carrier.op, carrier.nbytes, times.p50, world)
            rows.append(
                Row(carrier.op, carrier.choice.impl, mode, world, self.dtype, bytes=carrier.nbytes, us=times, algbw_gbps=algbw,
                    busbw_gbps=busbw, path=carrier.path, extra={"shape_of": self.problem.shape, "split": self.problem.kind})
            )  # fmt: skip
        return rows


@dataclass(frozen=True)
class _Carrier:
    """The collective of a split, its bytes (whole tensor), and what carries it."""

    op: str
    nbytes: int
    choice: Choice
    shape: str

    @property
    def path(self) -> str:
        """The algorithm of crosscut's kernels, or the backend."""
        return self.choice.algorithm or self.choice.impl

    def __str__(self) -> str:
        return f"{self.shape}: {self.op} of {format_size(self.nbytes)} goes by {self.choice}: {self.choice.reason}"


def _carrier(problem: Problem, mesh: Mesh) -> _Carrier:
    """Asks the table, and then the kernels themselves, which decline some tensors of a size that they carry."""
    (op, rows, width), x, group = problem.exchange(), problem.x, mesh.tp
    nbytes = rows * width * x.element_size()
    chosen = choice(op, nbytes, group)
    if chosen.impl == "crosscut":
        if op == "all_reduce":
            taken = fast.all_reduce(x.new_zeros(rows, width), group)
        else:
            part = x.new_zeros(rows, shard_sizes(width, group.size)[0])  # the largest: the others are padded to it
            taken = fast.all_gather_into(part, group, x.new_empty(group.size * rows, part.shape[1]))
        if taken is None:
            chosen = Choice(group.backend, None, "the kernels sum bfloat16, float16 and float32 alone, and up to their room")
    return _Carrier(op, nbytes, chosen, label(problem.shape))


def _exchange_call(problem: Problem, group: Group) -> Call:
    (op, rows, width), x = problem.exchange(), problem.x
    if op == "all_gather":
        sizes = shard_sizes(width, group.size)
        part = torch.randn(rows, sizes[group.rank], dtype=torch.float32, device=x.device).to(x.dtype)
        return lambda: (all_gather(part, group, 1, sizes),)
    partial = torch.zeros(rows, width, dtype=x.dtype, device=x.device)
    return lambda: (all_reduce(partial, group, out=partial),)


def bandwidths(op: str, nbytes: int, us: float, world: int) -> tuple[float, float]:
    """algbw and busbw in GB/s of ``op`` on ``nbytes`` (whole tensor), by the definitions of nccl-tests' PERFORMANCE.md."""
    factors = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}
    rate = gbps(nbytes, us)
    return rate, rate * factors.get(op, (world - 1) / world)


def with_gains(rows: list[Row], plain: str) -> list[Row]:
    """Add to each split row of one problem and pass its speed-up over one device, its share of communication (what it takes
    beyond no_comm) and, to crosscut's, the share hidden: how much of what the split ``plain`` takes beyond no_comm it saves.
    """
    p50 = {(row.impl, row.mode): row.us.p50 for row in rows if row.us is not None}
    for row in rows:
        if row.us is None or row.impl == "single":
            continue
        mine, floor, plainly = row.us.p50, p50.get(("no_comm", row.mode)), p50.get((plain, row.mode))
        row.extra["speedup"] = round(p50["single", row.mode] / mine, 4)
        if floor is not None and row.impl not in ("no_comm", *ONE_DEVICE):
            row.extra["comm_share"] = round(max(0.0, 1 - floor / mine), 4)
            if row.impl.startswith("crosscut") and plainly is not None and plainly > floor:
                row.extra["hidden_share"] = round(1 - (mine - floor) / (plainly - floor), 4)
    return rows


def _relative_errors(outputs: Sequence[tuple[Tensor, ...]], expected: Sequence[Tensor]) -> Iterator[float]:
    """||out - ref|| / ||ref|| of each output of each call; NaN counts as infinite."""
    for output in outputs:
        for part, reference in zip(output, expected, strict=True):
            off, size = float((part.double() - reference).norm()), float(reference.norm())
            # a shard may be empty and a gradient exactly zero: there nothing is off, or all of it
            yield 0.0 if off == 0 else off / size if off == off and size else float("inf")
