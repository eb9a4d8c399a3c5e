"""Timing of one call on all ranks: what is timed is what is checked, and the slowest rank counts.

A case is a list of equivalent calls over different buffers, taken in turn, so that weights come from memory and not
from the cache, as in a model whose layers all differ. One sample is a run of ``inner`` calls between two CUDA events
(on CPU: two looks at the clock), divided by ``inner``; ranks meet before each sample; each sample is the slowest
rank's. In graph mode the ``inner`` calls are one CUDA graph. Before a checked run outputs are poisoned with NaN.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from crosscut.collectives import all_reduce, barrier
from crosscut.distributed.mesh import Group

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How long one case is sampled: about ``seconds``, between ``least`` and ``most`` samples."""

    seconds: float = 0.3
    least: int = 7
    most: int = 60
    sample_us: float = 1000.0
    """A sample lasts about this long, so that the events' own cost does not count."""


@dataclass(frozen=True)
class Timed:
    """Samples in microseconds a call, how many calls they took together, and the outputs of a poisoned run."""

    samples: list[float]
    calls: int
    outputs: list[Tensor]


def time_case(calls: Sequence[Call], group: Group, mode: str, sampling: Sampling, *, alone: bool = False) -> Timed:
    """Time ``calls`` on every rank of ``group``, in ``mode`` eager or graph.

    ``alone``: only the group's first rank calls (one device, while the others wait); the others return its samples and
    no outputs. All ranks must call this alike.
    """
    idle = alone and group.rank != 0
    device = group.device
    for call in islice(cycle(calls), 0 if idle else len(calls) + 2):
        call()
    roughly = _slowest([0.0 if idle else pilot(calls, device)], group)[0]
    inner = int(min(max(sampling.sample_us / roughly, 1), 64))
    if mode == "graph":
        inner = max(inner, len(calls))
    reps = int(min(max(sampling.seconds * 1e6 / (roughly * inner), sampling.least), sampling.most))
    outputs: list[Tensor] = []
    if idle:
        samples = [0.0] * reps
        for _ in range(reps):
            barrier(group)
    else:
        run, outputs = _graph(calls, inner, device) if mode == "graph" else _eager(calls, inner)
        run()
        samples = [_sample(run, inner, group) for _ in range(reps)]
        outputs = _checked(run, outputs) if mode == "graph" else [_poisoned(call) for call in calls]
    return Timed(_slowest(samples, group), inner * reps, outputs)


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
    beyond = (512 << 20) if device.type == "cuda" else (64 << 20)
    return max(1, min(12, -(-beyond // max(nbytes, 1))))


def _eager(calls: Sequence[Call], inner: int) -> tuple[Callable[[], None], list[Tensor]]:
    turn = cycle(calls)

    def run() -> None:
        for _ in range(inner):
            next(turn)()

    return run, []


def _graph(calls: Sequence[Call], inner: int, device: torch.device) -> tuple[Callable[[], None], list[Tensor]]:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in islice(cycle(calls), inner)]
    return graph.replay, outputs


def _checked(run: Callable[[], None], outputs: list[Tensor]) -> list[Tensor]:
    """Poison the graph's outputs, replay it as it was timed, and give what it wrote."""
    for output in outputs:
        output.fill_(float("nan"))
    run()
    return [output.clone() for output in outputs]


def _poisoned(call: Call) -> Tensor:
    """The output of ``call`` when memory that torch hands out uninitialised holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)  # what makes torch.empty fill with NaN
        try:
            return call().clone()
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _sample(run: Callable[[], None], inner: int, group: Group) -> float:
    barrier(group)
    if group.device.type != "cuda":
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e3 / inner
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(group.device)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3 / inner


def _slowest(samples: list[float], group: Group) -> list[float]:
    return all_reduce(torch.tensor(samples, dtype=torch.float32, device=group.device), group, "max").tolist()
