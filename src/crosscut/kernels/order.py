"""Calls of a group happen in the order in which they are issued, whatever stream each comes from.

The kernels count their exchanges, so two of one group must never overlap. On one stream they cannot; between streams an
event is put. Eager calls and calls inside a CUDA graph capture are two worlds: an event of one cannot be waited for in the
other, so each capture has an order of its own, and between a replay and other calls the stream orders.

Streams and events are the driver's handles here, and the driver is called directly: torch's objects take three times as long.
"""

from __future__ import annotations

from ctypes import CDLL, byref, c_int, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


@cache
def _driver() -> Any:
    driver = CDLL("libcuda.so.1")
    driver.cuEventRecord.argtypes = (c_void_p, c_void_p)
    driver.cuStreamWaitEvent.argtypes = (c_void_p, c_void_p, c_uint)
    driver.cuStreamGetCaptureInfo_v2.argtypes = (c_void_p,) * 6
    return driver


def new_event() -> int:
    """An event without a clock. It is never destroyed: a group uses a few, again and again."""
    event = c_void_p()
    _checked(_driver().cuEventCreate(byref(event), _NO_TIMING))
    return int(event.value or 0)


def record(event: int, stream: int) -> None:
    """Let ``event`` stand for all that ``stream`` holds now."""
    _checked(_driver().cuEventRecord(event, stream))


def wait(stream: int, event: int) -> None:
    """Have ``stream`` go on only after ``event``."""
    _checked(_driver().cuStreamWaitEvent(stream, event, 0))


def capture_of(stream: int) -> int:
    """The number of the CUDA graph capture that ``stream`` is part of, 0 when it is in none."""
    status, number = c_int(0), c_uint64(0)
    _driver().cuStreamGetCaptureInfo_v2(stream, byref(status), byref(number), None, None, None)
    return number.value if status.value == _CAPTURE_ACTIVE else 0


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused an event: error {status}")


class Aside:
    """A call on the group's side stream, under way. Holds its tensors until somebody has waited for it."""

    __slots__ = ("_event", "_order", "_tensors")

    def __init__(self, order: Order, tensors: tuple[Tensor, ...]) -> None:
        self._order, self._tensors = order, tensors
        self._event: int | None = order.mark()

    def wait(self) -> None:
        """Make the current stream wait; from then on the tensors may be used and freed there."""
        if self._event is not None:
            wait(self._order.current(), self._event)
            self._order.free(self._event)
            self._event, self._tensors = None, ()

    def __del__(self) -> None:
        if self._event is not None:  # nobody waited: the memory must not be dealt out again before the kernel is done
            self._order.free(self._event)
            for tensor in self._tensors:
                tensor.record_stream(self._order.side)


class Order:
    """The order of one group's calls on this rank. ``last``: the stream of the call before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last: int | None = None
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._eager: int | None = None
        self._captured: tuple[int, int] | None = None  # (capture, stream) of the last call inside a capture
        self._free: list[int] = []
        self._between: int | None = None  # the event that orders one stream after another, used again each time
        self._side: torch.cuda.Stream | None = None

    def current(self) -> int:
        """The current stream of the group's device."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def follow(self, stream: int) -> None:
        """Have ``stream``, which is not ``last``, wait for the call before, and take note of it."""
        if self.last is not None:  # calls that stayed on one stream were not told when a capture began or ended there
            self._note(self.last)
        capture = capture_of(stream)
        before = self._eager
        if capture:
            before = self._captured[1] if self._captured is not None and self._captured[0] == capture else None
        self._note(stream)
        if before is not None and before != stream:
            self._link(before, stream)
        self.last = stream

    def _note(self, stream: int) -> None:
        """The last call of a capture, or of those outside any, is on ``stream``."""
        capture = capture_of(stream)
        if capture:
            self._captured = (capture, stream)
        else:
            self._eager = stream

    def fork(self, _: int = 0) -> int:
        """The side stream, ordered after the current stream. In a capture it becomes part of the capture."""
        side = int(self.side.cuda_stream)
        self._link(self.current(), side)
        return side

    def mark(self) -> int:
        """An event behind all that the side stream holds; hand it back with :meth:`free`."""
        event = self._free.pop() if self._free else new_event()
        record(event, int(self.side.cuda_stream))
        return event

    def free(self, event: int) -> None:
        """``event`` has been waited for and may be used again."""
        self._free.append(event)

    @property
    def side(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls. Of high priority: its few blocks start when a multiply's next ones would."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)
        return self._side

    def _link(self, before: int, after: int) -> None:
        if self._between is None:
            self._between = new_event()
        record(self._between, before)
        wait(after, self._between)
