"""Several ranks on one GPU whose pieces go by copy engines: memory, flags and a stream for each.

One thread issues for all of them, and a kernel of one rank may wait for another rank whose turn has not come. Until then
nothing may block the host or load code, so each call is made once before with its waits left out (``silent``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from crosscut.distributed.mesh import Group
from crosscut.kernels.copies import Copies, virtual_copies
from crosscut.layers.engines import Engines


class Virtual:
    """``size`` ranks with a stream and memory each."""

    def __init__(self, size: int, deadline: float = 20.0) -> None:
        device = torch.device("cuda", 0)
        self.size = size
        self.streams = [torch.cuda.Stream(device) for _ in range(size)]
        self.copies = virtual_copies(size, device, deadline)
        for copies in self.copies:  # of the same pool: streams of another priority might share a hardware queue with these
            copies._order._side = torch.cuda.Stream(device)
        ranks = tuple(range(size))
        self.groups = [Group("tp", rank, size, ranks, "virtual", device) for rank in ranks]

    def engines(self, rank: int) -> Engines:
        return Engines(self.copies[rank], self.groups[rank])

    def each(self, fn: Callable[[int], Any], only: list[int] | None = None) -> list[Any]:
        torch.cuda.synchronize()
        found = []
        for rank in range(self.size) if only is None else only:
            with torch.cuda.stream(self.streams[rank]):
                found.append(fn(rank))
        torch.cuda.synchronize()
        return found

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """``fn(rank)`` on every rank, first without waits, so that what it needs is loaded and allocated."""
        with silent(self.copies):
            self.each(fn)
        found = self.each(fn)
        for copies in self.copies:
            copies.check()
        return found


@contextmanager
def silent(all_copies: list[Copies]) -> Iterator[None]:
    """Without flags: nothing waits and nothing is counted."""
    for copies in all_copies:
        copies._say = lambda *step: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for copies in all_copies:
            del copies._say
