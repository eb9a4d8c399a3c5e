"""Timing of one call on all ranks: what is timed is what is checked, and the slowest rank counts.

A case is a list of equivalent calls over different buffers, taken in turn, so that weights come from memory and not
from the cache, as in a model whose layers all differ. One sample is a run of ``inner`` calls between two CUDA events
(on CPU: two looks at the clock), divided by ``inner``; ranks meet before each sample; each sample is the slowest
rank's. In graph mode the ``inner`` calls are one CUDA graph. An eager call of less than 2 ms has another one before the
sample: its time is Python's, whose own code and data the meeting of the ranks has driven out of the caches; in a model one
layer follows the other. Before a checked run outputs are poisoned with NaN.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

import torch
from torch import Tensor

from crosscut.collectives import all_reduce, barrier
from crosscut.distributed.mesh import Group

T = TypeVar("T")
Call = Callable[[], tuple[Tensor, ...]]
NO_CACHE_HOLDS = {"cuda": 512 << 20, "cpu": 64 << 20}
"""Bytes that no cache holds, by type of device."""
MOSTLY_PYTHON = 2000.0
"""Microseconds of an eager call below which Python's share of it counts."""


@dataclass(frozen=True)
class Sampling:
    """How long one case is sampled: about ``seconds``, between ``least`` and ``most`` samples."""

    seconds: float = 0.3
    least: int = 7
    most: int = 60
    sample_us: float = 1000.0
    """A sample lasts about this long, so that the events' own cost does not count."""

    def reps(self, sample_us: float) -> int:
        """How many samples to take when one takes ``sample_us``."""
        return int(min(max(self.seconds * 1e6 / sample_us, self.least), self.most))


@dataclass(frozen=True)
class Timed:
    """Samples in microseconds a call, how many calls they took together, and what each call of a poisoned run gave."""

    samples: list[float]
    calls: int
    outputs: list[tuple[Tensor, ...]]


def time_case(calls: Sequence[Call], group: Group, mode: str, sampling: Sampling, *, alone: bool = False) -> Timed:
    """Time ``calls`` on every rank of ``group``, in ``mode`` eager or graph.

    ``alone``: only the group's first rank calls (one device, while the others wait); the others return its samples and
    no outputs. All ranks must call this alike.
    """
    idle = alone and group.rank != 0
    device = group.device
    for call in islice(cycle(calls), 0 if idle else len(calls) + 2):
        call()
    roughly = slowest([0.0 if idle else pilot(calls, device)], group)[0]
    inner = int(min(max(sampling.sample_us / roughly, 1), 64))
    if mode == "graph":
        inner = max(inner, len(calls))
    reps = sampling.reps(roughly * inner)
    outputs: list[tuple[Tensor, ...]] = []
    turn = cycle(calls)
    lead = _eager(turn, 1) if mode == "eager" and roughly < MOSTLY_PYTHON else None
    if idle:
        samples = [0.0] * reps
        for _ in range(reps):
            barrier(group)
    else:
        run, outputs = _graph(calls, inner, device) if mode == "graph" else (_eager(turn, inner), [])
        run()
        samples = [sample(run, inner, group, lead=lead) for _ in range(reps)]
        outputs = _checked(run, outputs) if mode == "graph" else [_poisoned(call) for call in calls]
    return Timed(slowest(samples, group), inner * reps, outputs)


def pilot(calls: Sequence[Call], device: torch.device) -> float:
    """Microseconds of one call, roughly, from the host's clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    for call in islice(cycle(calls), 3):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max((time.perf_counter_ns() - start) / 3e3, 0.1)


def copies(nbytes: int, device: torch.device) -> int:
    """How many copies of a buffer of ``nbytes`` make a set that no cache holds (512 MiB on GPUs, 64 MiB on CPU), at most 12."""
    return max(1, min(12, -(-NO_CACHE_HOLDS[device.type] // max(nbytes, 1))))


def _eager(turn: Iterator[Call], inner: int) -> Callable[[], None]:
    def run() -> None:
        for call in islice(turn, inner):
            call()

    return run


def _graph(calls: Sequence[Call], inner: int, device: torch.device) -> tuple[Callable[[], None], list[tuple[Tensor, ...]]]:
    def warm() -> None:
        for call in calls[:2]:
            call()

    return captured(warm, lambda: [call() for call in islice(cycle(calls), inner)], device)


def captured(warm: Callable[[], None], body: Callable[[], T], device: torch.device) -> tuple[Callable[[], None], T]:
    """``body`` as one CUDA graph: what replays it, and what it returned. ``warm`` runs first, on a stream of its own."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        warm()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph.replay, result


def _checked(run: Callable[[], None], outputs: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Poison the graph's outputs, replay it as it was timed, and give what it wrote."""
    for output in outputs:
        for part in output:
            part.fill_(float("nan"))
    run()
    return [tuple(part.clone() for part in output) for output in outputs]


def _poisoned(call: Call) -> tuple[Tensor, ...]:
    """The outputs of ``call`` when memory that torch hands out uninitialised holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)  # what makes torch.empty fill with NaN
        try:
            return tuple(part.clone() for part in call())
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def sample(
    run: Callable[[], None], inner: int, group: Group, host: bool = False, lead: Callable[[], None] | None = None
) -> float:
    """Microseconds of one of the ``inner`` calls that ``run`` makes, on this rank, after all ranks have met (and ``lead``)."""
    barrier(group)
    if lead is not None:
        lead()
    return clock(run, group.device, host) / inner


def clock(run: Callable[[], None], device: torch.device, host: bool = False) -> float:
    """Microseconds that ``run`` takes, between two CUDA events; on CPU, and with ``host``, by the host's clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if host or device.type != "cuda":
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3


def slowest(samples: list[float], group: Group) -> list[float]:
    """Each sample of the rank that took longest."""
    return all_reduce(torch.tensor(samples, dtype=torch.float32, device=group.device), group, "max").tolist()
