"""What kernels/copies.py does, for rank threads in host memory: the same protocol, each wait taken at once where it is issued.

It shows that rooms, offsets and places fit together, that no wait of the protocol needs something issued after it (all
streams of a rank are one here), and that nobody writes what a peer has not read: each byte's readers are counted.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from crosscut.kernels.copies import Piece

PATIENCE = 20.0


class Shared:
    """The memory of all ranks, and their flags."""

    def __init__(self, size: int, half: int = 1 << 16) -> None:
        self.size, self.half = size, half
        self.memory = [torch.zeros(2 * half, dtype=torch.uint8) for _ in range(size)]
        self.ready: dict[tuple[int, int, int], int] = defaultdict(int)  # owner, half, piece -> call
        self.done: dict[tuple[int, int, int], int] = defaultdict(int)  # owner, half, reader -> call
        self.changed = threading.Condition()
        self.begun: dict[tuple[int, int], int] = defaultdict(int)

    def wait_for(self, flags: dict[tuple[int, int, int], int], key: tuple[int, int, int], call: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: flags[key] >= call, PATIENCE), f"waited {PATIENCE} s for {key}, call {call}"

    def tell(self, flags: dict[tuple[int, int, int], int], key: tuple[int, int, int], call: int) -> None:
        with self.changed:
            flags[key] = call
            self.changed.notify_all()


class Place:
    """What mark() gives: everything has happened already."""

    def wait(self) -> None:
        pass


class ThreadCopies:
    """One rank's end, with the interface of kernels.copies.Copies."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank = shared, rank
        self._half, self._used, self._start, self._piece = 1, 0, 0, 0
        self.calls = 0

    def begin(self) -> None:
        self.calls += 1
        self._half, self._used, self._piece = 1 - self._half, 0, -1
        for peer in range(self.shared.size):
            if peer != self.rank:
                self.shared.wait_for(self.shared.done, (self.rank, self._half, peer), self._call)
        self.shared.begun[self.rank, self._half] += 1
        mine = self.shared.memory[self.rank]
        mine[self._half * self.shared.half : (self._half + 1) * self.shared.half].fill_(0xA5)  # what is read too late is wrong

    @property
    def _call(self) -> int:
        return self.shared.begun[self.rank, self._half]

    def room(self, nbytes: int) -> Tensor:
        self._piece, self._start = self._piece + 1, self._half * self.shared.half + self._used
        self._used += -(-nbytes // 256) * 256
        assert self._used <= self.shared.half
        return self.shared.memory[self.rank][self._start : self._start + nbytes]

    def publish(self) -> Piece:
        self.shared.tell(self.shared.ready, (self.rank, self._half, self._piece), self._call)
        return Piece(self._piece, self._start)

    def pull(self, piece: Piece, peer: int, offset: int, into: Tensor) -> None:
        self.shared.wait_for(self.shared.ready, (peer, self._half, piece.number), self._call)
        self._copy(self.shared.memory[peer][piece.start + offset :], into)

    def lay(self, source: Tensor, into: Tensor) -> None:
        self._copy(source.reshape(-1).view(torch.uint8), into)

    @staticmethod
    def _copy(source: Tensor, into: Tensor) -> None:
        if into.numel():
            assert into[0].is_contiguous(), "a row must be dense"
            into.copy_(source[: into.nbytes].view(into.dtype).view(into.shape))

    def mark(self) -> Place:
        return Place()

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        for peer in range(self.shared.size):
            if peer != self.rank:
                self.shared.tell(self.shared.done, (peer, self._half, self.rank), self._call)
