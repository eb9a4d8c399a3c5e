"""One collective on one size: buffers, timing and the check of every element, whoever carries it.

A sample is ``len(slots)`` calls, each on buffers of its own (a slot), so that calls in place do not feed on each other's
results, a cold cache stays cold, and a CUDA graph can be checked. Before the last sample inputs are written anew and
outputs poisoned; after it every element of every slot is compared: the calls that are checked are calls that were timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from crosscut.bench.backends import ALIGN, Implementation
from crosscut.bench.collective_cases import FP8, Ask, Buffers, Case, Numbers, Piece, Place
from crosscut.bench.timing import NO_CACHE_HOLDS, Sampling, captured, clock, sample, slowest
from crosscut.collectives import barrier
from crosscut.collectives.functional import all_gather_single
from crosscut.distributed.mesh import Group
from crosscut.records import Times

MOST_CALLS = 64
"""Calls of one sample at most, each on buffers of its own."""


@dataclass(frozen=True)
class Mistakes:
    """What a check found on all ranks: how many elements differ, the first one, and ||out - ref|| / ||ref|| at worst."""

    wrong: int
    first: dict[str, Any] | None
    error: float


@dataclass(frozen=True)
class Measured:
    """One mode of one problem: the slowest rank's times, how many calls they took, and what the check found."""

    us: Times
    calls: int
    mistakes: Mistakes


class Problem:
    """A case at one size and place on one implementation, with its buffers. All ranks make the same ones together.

    Making one makes the call once, so what the backend cannot do raises its own error (RuntimeError, ValueError,
    TypeError). ``room``: bytes that all buffers together may take.
    """

    def __init__(self, case: Case, impl: Implementation, numbers: Numbers, place: Place, in_place: bool, room: int) -> None:
        self.case, self.impl, self.numbers, self.place, self.in_place = case, impl, numbers, place, in_place
        each = 2 * (case.nbytes(place.count, place.world, numbers.dtype.itemsize) + ALIGN)
        self._most = min(MOST_CALLS, max(1, room // each))
        self._sent = [Piece(place.rank, 0, case.sends(place))]
        self._wanted = case.receives(place)
        self._flush: Tensor | None = None
        self.slots = [self._buffers()]
        self.reset()
        self.once()

    def fill_a_sample(self, sampling: Sampling) -> None:
        """Make as many slots as calls fit in a sample. All ranks call this together, once, before :meth:`measure`."""
        roughly = slowest([self._pilot()], self.impl.group)[0]
        calls = int(min(max(sampling.sample_us / roughly, 1), self._most))
        self.slots += [self._buffers() for _ in range(calls - 1)]
        self._reps = sampling.reps(roughly * calls)

    def _buffers(self) -> Buffers:
        sent, got = self._sent[0].length, sum(piece.length for piece in self._wanted)
        empty, dtype = self.impl.empty, self.numbers.dtype
        if not self.in_place or not sent or not got:
            return Buffers(empty(sent, dtype), empty(got, dtype), self.place.world)
        whole = empty(max(sent, got), dtype)
        start = 0 if self.case.in_place == "same" else self.place.rank * self.place.count
        own = whole[start : start + min(sent, got)]  # what the smaller of the two is of the larger
        return Buffers(own if sent < got else whole, own if got < sent else whole, self.place.world)

    def once(self, slot: int = 0, later: bool = False) -> None:
        """One call on one slot; with ``later`` issued first and then waited for."""
        ask = Ask(self.impl.group, self.place, self.numbers.redop, later and self.impl.starts)
        for work in self.impl.issue(self.case, ask, self.slots[slot]):
            if work is not None:
                work.wait()

    def _pilot(self) -> float:
        def three() -> None:
            for _ in range(3):
                self.once()

        return max(clock(three, self.impl.group.device) / 3, 0.1)

    def reset(self) -> None:
        """Poison the outputs, then write the inputs (in place they overlap), which are the same in all slots."""
        for slot in self.slots:
            poison(slot.output)
        first = self.numbers.write(self.slots[0].input, self._sent)
        for slot in self.slots[1:]:
            slot.input.copy_(first)

    def measure(self, mode: str, cold: bool) -> Measured:
        """Time and check in ``mode``: eager, graph (one CUDA graph of the calls) or host (issue, wait; the host's clock)."""
        group, host = self.impl.group, mode == "host"
        run = self._runner(mode)
        run()
        calls = len(self.slots)
        samples = []
        for left in reversed(range(self._reps)):
            if left == 0:
                self.reset()
            if cold:
                self._flush_cache()
            samples.append(sample(run, calls, group, host))
        return Measured(Times.of(slowest(samples, group)), calls * self._reps, self.check())

    def _runner(self, mode: str) -> Callable[[], None]:
        device, host = self.impl.group.device, mode == "host"

        def run() -> None:
            for slot in range(len(self.slots)):
                self.once(slot, later=host)
                if host and device.type == "cuda":
                    torch.cuda.synchronize(device)

        return captured(self.once, run, device)[0] if mode == "graph" else run

    def _flush_cache(self) -> None:
        if self._flush is None:
            device = self.impl.group.device
            self._flush = torch.empty(NO_CACHE_HOLDS[device.type], dtype=torch.uint8, device=device)
        self._flush.zero_()

    def check(self) -> Mistakes:
        """Compare every element of every slot, on its device, and put together what all ranks found."""
        found = compare(self.slots, self.numbers, self._wanted)
        return put_together(tell_all(found, self.impl.group))

    def own_times(self, us: float) -> list[list[float]]:
        """Each rank's own time in microseconds: of a call that it makes when all others already wait for it in theirs.

        A collective takes equally long on all ranks, since all wait for the slowest; the one that comes last waits for
        nobody, and so its time is its own. ``us``: how long the call usually takes. Eager. Returns (median, least) of 3
        calls of each rank; of one call when it takes long.
        """
        group, mine = self.impl.group, list[float]()
        for late in range(group.size):
            for _ in range(3 if us < 20_000 else 1):
                barrier(group)
                if group.rank == late:
                    time.sleep(1.5 * us / 1e6 + 2e-4)
                    mine.append(clock(self.once, group.device))
                else:
                    self.once()
        return [[round(value, 3) for value in times] for times in tell_all([median(mine), min(mine)], group)]


def tell_all(values: Sequence[float], group: Group) -> list[list[float]]:
    """Each rank's ``values``, carried by torch.distributed and not by what may be on trial."""
    mine = torch.tensor(values, dtype=torch.float64, device="cpu" if group.backend == "gloo" else group.device)
    told = mine.new_empty(group.size * len(mine))
    all_gather_single(told, mine, group=group.process_group)
    return told.view(group.size, -1).tolist()


def poison(tensor: Tensor) -> None:
    """Fill with what no right result holds: NaN, or the largest byte for integers (-1, and 255 of uint8)."""
    if tensor.is_floating_point() and tensor.dtype not in FP8:
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(0x7F if tensor.dtype in FP8 else 0xFF)  # 0x7F is a NaN of both fp8 kinds


def compare(slots: Sequence[Buffers], numbers: Numbers, wanted: Sequence[Piece]) -> list[float]:
    """[elements that differ, index of the first, got, expected, squared error, squared reference] of this rank's outputs."""
    wrong, first, off, whole = 0, (-1.0, 0.0, 0.0), 0.0, 0.0
    for position, right in numbers.chunks(wanted):
        exact = right.double()
        whole += float(exact.square().sum()) * len(slots)
        for slot in slots:
            got = slot.output[position : position + len(right)].double()
            differs = got != exact
            count = int(differs.sum())
            if count:
                at = int(differs.nonzero()[0])
                first = (float(position + at), float(got[at]), float(exact[at])) if not wrong else first
                wrong += count
                off += float((got - exact).square().sum())
    return [float(wrong), *first, off, whole]


def put_together(told: Sequence[Sequence[float]]) -> Mistakes:
    """From what :func:`compare` gave on each rank to one finding: the first element of the first rank, the worst error."""
    first, error = None, 0.0
    for rank, (wrong, index, got, expected, off, whole) in enumerate(told):
        if wrong:
            first = first or {"rank": rank, "index": int(index), "got": got, "expected": expected}
            relative = (off / whole) ** 0.5 if whole else float("inf")
            error = max(error, relative if relative == relative else float("inf"))
    return Mistakes(int(sum(row[0] for row in told)), first, error)
