"""Parts of tensors read from disk straight into a rank's own tensors, in blocks, by a few threads.

Nothing is memory-mapped: mapped pages count as the process's memory, and with several ranks a checkpoint would be in memory
several times (transformers issues 35202, 36467). A thread reads a block into a buffer of its own, pinned where there is a
GPU, and copies it from there, converted to the target's dtype. Memory of the host: READERS * BLOCK bytes.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError
from crosscut.models.slots import Slot
from crosscut.models.stream import DTYPES
from crosscut.sharding.headers import Stored

READERS = 4
BLOCK = 8 << 20
"""Bytes that one thread reads at once, at most."""
_SHORT = 64 << 10  # bytes; to skip less than this costs more than to read it


@dataclass(frozen=True)
class Block:
    """``rows`` runs of ``run`` elements of a file, each ``stride`` elements behind the one before, and where they go."""

    file: Path
    start: int
    dtype: torch.dtype
    stride: int
    target: Tensor
    """``[rows, run]``, a view of the rank's own tensor."""

    @property
    def whole(self) -> bool:
        """Whether what lies between the runs is read too: it is little, or there is nothing."""
        rows, run = self.target.shape
        return rows == 1 or 2 * run >= self.stride or run * self.dtype.itemsize < _SHORT

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        rows, run = self.target.shape
        return ((rows - 1) * (self.stride if self.whole else run) + run) * self.dtype.itemsize


def blocks(stored: Stored, slot: Slot, target: Tensor, group: Group, limit: int = BLOCK) -> Iterator[Block]:
    """The blocks that fill this rank's ``target``, a contiguous tensor, with its part of the ``stored`` tensor."""
    if not target.numel():
        return
    dtype, dim, shape = DTYPES[stored.dtype], slot.cut.dim, slot.shape
    most = max(1, limit // dtype.itemsize)
    outer, step = (1, 1) if dim is None else (math.prod(shape[:dim]), math.prod(shape[dim + 1 :]))
    inner = math.prod(shape) // outer
    runs = [(0, 0, inner)]
    if dim is not None:
        runs = []
        for piece in slot.cut.pieces(shape, group.size, group.rank):
            first, own, run = piece.full.start * step, piece.local.start * step, (piece.full.stop - piece.full.start) * step
            if runs and sum(runs[-1][::2]) == first:  # it goes on where the last one ends, here as there
                first, own, run = *runs[-1][:2], runs.pop()[2] + run
            runs.append((first, own, run))
    flat = target.view(outer, -1)

    def block(row: int, rows: int, first: int, own: int, run: int) -> Block:
        start = stored.start + (row * inner + first) * dtype.itemsize
        return Block(stored.file, start, dtype, inner, flat[row : row + rows, own : own + run])

    for first, own, run in runs:
        if outer == 1 or inner > most:
            for row in range(outer):
                for at in range(0, run, most):
                    yield block(row, 1, first + at, own + at, min(most, run - at))
        elif run:
            for row in range(0, outer, most // inner):
                yield block(row, min(most // inner, outer - row), first, own, run)


class Reader:
    """Reads blocks of files, from any thread. To be closed (``with``)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._files: dict[Path, int] = {}
        self._own = threading.local()
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def fill(self, block: Block) -> Tensor:
        """Read ``block`` into its target; returns the target."""
        rows, run = block.target.shape
        buffer = self._buffer(block.nbytes)
        view, file, item = buffer.numpy().data, self._open(block.file), block.dtype.itemsize
        if block.whole:
            self._read(file, view, block.start, block)
        else:
            for row in range(rows):
                part = view[row * run * item : (row + 1) * run * item]
                self._read(file, part, block.start + row * block.stride * item, block)
        strides = (block.stride if block.whole else run, 1)
        values = buffer.to(self.device, non_blocking=True).view(block.dtype).as_strided((rows, run), strides)
        block.target.copy_(values)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the buffer is used again
        return block.target

    def _read(self, file: int, into: memoryview, at: int, block: Block) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(file, [into[done:]], at + done)
            if not count:
                raise UsageError(
                    f"{str(block.file)!r} ended while it was read", code="file-unreadable", fix="download the file again"
                )
            done += count
        with self._lock:
            self.nbytes += done

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
                self._stack.callback(os.close, self._files[path])
            return self._files[path]

    def _buffer(self, nbytes: int) -> Tensor:
        buffer: Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < nbytes:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread begins on the first GPU, and would make a context there
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._own.buffer = buffer
        return buffer[:nbytes]


def same_bytes(one: Stored, other: Stored, group: Group) -> bool:
    """Whether two stored tensors are equal in those blocks that are this rank's to compare."""
    nbytes = one.stop - one.start
    if nbytes != other.stop - other.start:
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for at in range(group.rank * BLOCK, nbytes, group.size * BLOCK):
            first.seek(one.start + at)
            second.seek(other.start + at)
            count = min(BLOCK, nbytes - at)
            if first.read(count) != second.read(count):
                return False
    return True


Job = Callable[[], Tensor]
"""Fills some tensor and returns it."""


def run_jobs(jobs: list[Job], check: bool, done: Callable[[int], None], threads: int = READERS) -> list[bool]:
    """Run the ``jobs`` on threads; ``done(i)`` is told of each in order. Returns which left NaN or Inf behind (``check``)."""

    def run(job: Job) -> Tensor | None:
        with torch.no_grad():
            filled = job()
            if not check or not filled.is_floating_point() or not filled.numel():
                return None
            return torch.isfinite(torch.stack(torch.aminmax(filled))).all()

    finite = []
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
    try:
        for i, result in enumerate(pool.map(run, jobs)):
            finite.append(result)
            done(i)
    finally:
        pool.shutdown(cancel_futures=True)
    return [result is not None and not bool(result) for result in finite]
