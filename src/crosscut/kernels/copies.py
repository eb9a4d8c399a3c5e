"""Pieces moved between the ranks' memories by copy engines, which leave the multiprocessors to a multiply.

Every rank puts a piece into its own shared memory and raises a flag; each peer, on a stream of its own, waits for the flag
and pulls the piece to where its caller wants it, rows with a pitch included. A call is::

    copies.begin()                       # the half of the memory that this call may use is free
    room = copies.room(nbytes)           # the same bytes on every rank, piece after piece
    ...write room...
    piece = copies.publish()             # on the current stream
    copies.pull(piece, peer, offset, out)  # on the side stream, as lay() and what aside() holds
    copies.end()                         # the current stream goes on when all is here

**Why memory can be reused.** A call uses one half, the next call the other. A rank writes a half again only after every peer
has said that it has read all of the last call there (``claim``), and says so itself when its last pull is done (``leave``).
**Why nothing waits in a circle.** Each wait is for a flag that the peer issued before any wait of the same piece or a later
one, so even if all streams of a GPU ran one after the other in the order of issue, each wait would come to its end.
Flags are counted on the GPU, so calls may be captured into CUDA graphs; a wait that runs out becomes an error at the next
call, as with the exchange kernels.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.errors import CollectiveTimeout
from crosscut.kernels.compile import function
from crosscut.kernels.launch import RANKS, Call, Launch, driver
from crosscut.kernels.order import Order

PIECES = 16  # as in copies.cu
STEPS = ("claim", "publish", "arrive", "leave")
_ALIGN = 256


@dataclass(frozen=True)
class CopyLayout:
    """The shared memory of each of ``size`` ranks: two halves of ``half`` bytes, then the flags."""

    size: int
    half: int = 128 << 20

    @property
    def flags_at(self) -> int:
        """Offset of the flags."""
        return 2 * self.half

    @property
    def nbytes(self) -> int:
        """Bytes on each rank."""
        return self.flags_at + 4 * 2 * (PIECES + 1) * self.size


class Piece(NamedTuple):
    """What a rank has published: the number of the piece in its call, and where it starts in the memory of each rank."""

    number: int
    start: int


class Copies:
    """One rank's end. Calls must come in the same order, with the same rooms, on every rank of the group."""

    def __init__(
        self, name: str, rank: int, layout: CopyLayout, own: Tensor, addresses: Sequence[int], deadline: float
    ) -> None:
        assert layout.size <= RANKS, "more ranks than a kernel's parameters hold"
        assert own.nbytes >= layout.nbytes, "memory smaller than its layout"
        self.name, self.rank, self.layout, self.deadline = name, rank, layout, deadline
        self.device = own.device
        self._own, self._addresses = own, tuple(addresses)
        own[layout.flags_at :].zero_()
        self._counters = torch.zeros(2, dtype=torch.int32, device=own.device)
        self._record = torch.zeros(4 + RANKS, dtype=torch.int32).pin_memory()
        self._seen = self._record.numpy()
        self._order = Order(self.device)
        self._index = own.device.index if own.device.index is not None else torch.cuda.current_device()
        source = files("crosscut.kernels").joinpath("copies.cu").read_text()
        self._launches = {
            step: Launch(function(source, f"copies_{step}", layout.size, self._index), self._call(op), programmatic=False)
            for op, step in enumerate(STEPS)
        }
        self._half, self._used, self._start, self._piece = 1, 0, 0, 0
        for launch in self._launches.values():  # loaded now: later, loading would wait for kernels that wait for peers
            launch.total.value = 1 << 24
            launch(1, 32, self._stream())
        torch.cuda.synchronize(own.device)

    def _call(self, op: int) -> Call:
        call = Call(
            epochs=self._counters.data_ptr(), record=self._record.data_ptr(), deadline=int(self.deadline * 1e9),
            flags_at=self.layout.flags_at, rank=self.rank, op=op,
        )  # fmt: skip
        for peer, address in enumerate(self._addresses):
            call.mail[peer] = address
        return call

    @property
    def side(self) -> torch.cuda.Stream:
        """The stream on which pieces are pulled."""
        return self._order.side

    def aside(self) -> AbstractContextManager[None]:
        """Within: torch's operations go to the side stream."""
        return torch.cuda.stream(self.side)

    def mark(self) -> Mark:
        """The place where the side stream is now, to wait for."""
        return Mark(self.side)

    def begin(self) -> None:
        """Begin a call on the current stream. Raises CollectiveTimeout (``rank-timeout``) if an earlier wait ran out."""
        self.check()
        stream = self._stream()
        if stream != self._order.last:
            self._order.follow(stream)
        self._half, self._used, self._piece = 1 - self._half, 0, -1
        self._say("claim", stream)
        self._order.fork()

    def room(self, nbytes: int) -> Tensor:
        """``nbytes`` of this rank's memory for the next piece, as bytes; the same count on every rank."""
        self._piece, self._start = self._piece + 1, self._half * self.layout.half + self._used
        self._used += _rounded(nbytes)
        assert self._piece < PIECES, "more pieces than there are flags"
        assert self._used <= self.layout.half, "more bytes than a half holds"
        return self._own[self._start : self._start + nbytes]

    def publish(self) -> Piece:
        """The last room is written on the current stream: let the peers have it, and let the side stream follow."""
        self._say("publish", self._stream(), self._piece)
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        return Piece(self._piece, self._start)

    def pull(self, piece: Piece, peer: int, offset: int, into: Tensor) -> None:
        """On the side stream, when rank ``peer``'s ``piece`` is there: ``into`` from ``offset`` bytes into it, dense.

        ``into``: rows along dim 0, each dense.
        """
        stream = self.side.cuda_stream
        self._say("arrive", stream, piece.number, peer)
        copy(self._addresses[peer] + piece.start + offset, into, stream)

    def lay(self, source: Tensor, into: Tensor) -> None:
        """On the side stream: the dense ``source`` of this rank ``into`` its place, rows along dim 0, each dense."""
        copy(source.data_ptr(), into, self.side.cuda_stream)

    def end(self) -> None:
        """End the call: the peers may use the half again, and the current stream goes on when the side stream is done."""
        self._say("leave", self.side.cuda_stream)
        torch.cuda.current_stream(self.device).wait_stream(self.side)

    def check(self) -> None:
        """Raise CollectiveTimeout (``rank-timeout``) if a wait of an earlier call ran out. The group is of no use then."""
        if self._seen[0]:
            missing = [str(peer) for peer in range(self.layout.size) if self._seen[4 + peer]]
            raise CollectiveTimeout(
                f"rank {self.rank} of group {self.name!r} waited more than {self.deadline:g} s for a copy "
                f"({STEPS[int(self._seen[1])]}, call {int(self._seen[2]) & 0xFFFFFFFF}); "
                f"nothing came from rank {', '.join(missing) or 'unknown'} of the group",
                code="rank-timeout",
                fix="see what those ranks do: not called, called with another size, busy, or dead; then start the ranks anew",
            )

    def _stream(self) -> int:
        raw: int = torch._C._cuda_getCurrentRawStream(self._index)
        return raw

    def _say(self, step: str, stream: int, piece: int = 0, peer: int = 0) -> None:
        launch = self._launches[step]
        launch.total.value = self._half | piece << 8 | peer << 16
        launch(1, 32, stream)


class Mark:
    """A place in the work of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """Let the current stream go on when the other has come to this place."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


_END = (
    ("x", c_size_t), ("y", c_size_t), ("type", c_int), ("host", c_void_p), ("device", c_uint64), ("array", c_void_p),
    ("pitch", c_size_t),
)  # fmt: skip


class _Copy2D(ctypes.Structure):  # CUDA_MEMCPY2D
    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _END),
        *((f"into_{name}", kind) for name, kind in _END),
        ("width", c_size_t),
        ("height", c_size_t),
    )


_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the addresses say whose memory it is


def copy(source: int, into: Tensor, stream: int) -> None:
    """Queue a copy of dense bytes at the address ``source`` into ``into``, rows along dim 0, by a copy engine.

    Raises RuntimeError when the driver refuses.
    """
    if into.numel() == 0:
        return
    rows, width, pitch = into.shape[0], into.nbytes // into.shape[0], into.stride(0) * into.element_size()
    assert into[0].is_contiguous(), "a row must be dense"
    if rows == 1 or pitch == width:
        status = driver().cuMemcpyDtoDAsync_v2(
            c_uint64(into.data_ptr()), c_uint64(source), c_size_t(into.nbytes), c_void_p(stream)
        )
    else:
        what = _Copy2D(
            source_type=_UNIFIED, source_device=source, source_pitch=width,
            into_type=_UNIFIED, into_device=into.data_ptr(), into_pitch=pitch, width=width, height=rows,
        )  # fmt: skip
        status = driver().cuMemcpy2DAsync_v2(ctypes.byref(what), c_void_p(stream))
    if status:
        raise RuntimeError(f"the CUDA driver refused a copy of {rows} rows of {width} bytes: error {status}")


def shared_copies(
    name: str, group: dist.ProcessGroup, device: torch.device, deadline: float, half: int, agree: Callable[[bool], bool]
) -> Copies | None:
    """This rank's end for ``group``, whose ranks must all call this; None on all when one of them has no memory for it.

    ``agree``: whether something holds on every rank. Raises RuntimeError when the GPUs cannot share.
    """
    import torch.distributed._symmetric_memory as symmetric

    layout = CopyLayout(group.size(), half)
    own: Tensor | None = None
    with suppress(RuntimeError):  # torch's OutOfMemoryError is one
        own = symmetric.empty(layout.nbytes, dtype=torch.uint8, device=device)
    if not agree(own is not None) or own is None:
        return None
    handle = symmetric.rendezvous(own, group.group_name)
    copies = Copies(name, group.rank(), layout, own, handle.buffer_ptrs, deadline)
    dist.barrier(group)  # nobody writes before everybody has cleared
    return copies


def virtual_copies(size: int, device: torch.device, deadline: float = 30.0, half: int = 8 << 20) -> list[Copies]:
    """``size`` ranks on one GPU, for tests and trials: each rank's calls go to a stream of its own."""
    layout = CopyLayout(size, half)
    memory = [torch.empty(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(size)]
    addresses = [part.data_ptr() for part in memory]
    return [Copies("virtual", rank, layout, memory[rank], addresses, deadline) for rank in range(size)]


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize
