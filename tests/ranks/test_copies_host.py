"""kernels/copies.py without a GPU: its addresses, pitches and order of issue, with the driver played by host memory.

What a GPU adds (waiting, visibility, graphs) is in tests/gpu/test_copies.py; the protocol between ranks in test_pieces.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from crosscut.distributed.mesh import Group
from crosscut.kernels import copies as module
from crosscut.kernels.copies import Copies, virtual_copies
from crosscut.layers.engines import Engines
from pieces_soak import OPS, draw, wrong

MAIN, SIDE = 1, 2


class Stream:
    """A stream by its number; whom it waits for is written down."""

    def __init__(self, number: int, events: list[tuple[Any, ...]]) -> None:
        self.cuda_stream, self.events, self.device = number, events, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.events.append(("join", self.cuda_stream, other.cuda_stream))

    def wait_event(self, event: Any) -> None:
        self.events.append(("join", self.cuda_stream, event.stream))


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream.cuda_stream


class Driver:
    """Copies at once. Streams are in order, so the copies that are asked for are the copies that are made."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self.events = events

    def cuMemcpyDtoDAsync_v2(self, into: Any, source: Any, count: Any, stream: Any) -> int:
        self.events.append(("copy", stream.value, count.value))
        ctypes.memmove(into.value, source.value, count.value)
        return 0

    def cuMemcpy2DAsync_v2(self, what: Any, stream: Any) -> int:
        c = what._obj
        self.events.append(("copy", stream.value, c.width * c.height))
        for row in range(c.height):
            ctypes.memmove(c.into_device + row * c.into_pitch, c.source_device + row * c.source_pitch, c.width)
        return 0


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is issued: ("say", stream, step, half, piece, peer), ("copy", stream, bytes), ("join", who, whom)."""
    found: list[tuple[Any, ...]] = []
    current = [Stream(MAIN, found)]

    class Launch:
        def __init__(self, step: str, call: Any, programmatic: bool) -> None:
            self.step, self.call, self.total = step, call, ctypes.c_uint64(0)

        def __call__(self, grid: int, block: int, stream: int) -> None:
            half, piece, peer, dry = self.total.value.to_bytes(4, "little")
            found.append(("dry" if dry else "say", stream, self.step, half, piece, peer))

    class Order:
        def __init__(self, device: Any) -> None:
            self.last: int | None = None
            self.side = Stream(SIDE, found)

        def follow(self, stream: int) -> None:
            self.last = stream

        def fork(self) -> None:
            self.side.wait_stream(current[0])

    @contextmanager
    def stream(inner: Stream) -> Iterator[None]:
        outer, current[0] = current[0], inner
        yield
        current[0] = outer

    monkeypatch.setattr(module, "Launch", Launch)
    monkeypatch.setattr(module, "Order", Order)
    monkeypatch.setattr(module, "function", lambda source, name, world, index: name.removeprefix("copies_"))
    monkeypatch.setattr(module, "driver", lambda: Driver(found))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for name, value in (
        ("synchronize", lambda device: None), ("current_device", lambda: 0), ("stream", stream), ("Event", Event),
        ("current_stream", lambda device: current[0]),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0].cuda_stream, raising=False)
    return found


def call(both: list[Copies], op: str, seed: int) -> int:
    """Rank 1's call, then rank 0's, which so finds rank 1's pieces in its memory. Wrong elements on rank 0."""
    groups = [Group("tp", rank, 2, (0, 1), "host", torch.device("cpu")) for rank in range(2)]
    draw(groups[1], seed, op=op).run(Engines(both[1], groups[1]))
    return int(wrong(draw(groups[0], seed, op=op).run(Engines(both[0], groups[0]))))


@pytest.mark.parametrize("op", OPS)
def test_each_piece_lands_in_its_place(events: list[tuple[Any, ...]], op: str) -> None:
    both = virtual_copies(2, torch.device("cpu"), half=1 << 16)
    assert [call(both, op, seed) for seed in range(30)] == [0] * 30
    both[0]._addresses = (both[0]._addresses[0], both[0]._addresses[1] + 4)  # this check can fail
    assert sum(call(both, op, seed) for seed in range(30)) > 0


@pytest.mark.parametrize("op", OPS)
def test_the_order_of_issue(events: list[tuple[Any, ...]], op: str) -> None:
    both = virtual_copies(2, torch.device("cpu"), half=1 << 16)
    assert {step for kind, _, step, *_ in events if kind == "dry"} == set(module.STEPS)
    call(both, op, 3)
    events.clear()
    group = Group("tp", 0, 2, (0, 1), "host", torch.device("cpu"))
    draw(group, 3, op=op).run(Engines(both[0], group))
    said = [event[1:] for event in events if event[0] == "say"]
    steps = [(step, piece) for _, step, _, piece, _ in said]
    assert steps[0] == ("claim", 0)
    assert steps[-1] == ("leave", 0)
    for piece in {piece for step, piece in steps if step == "arrive"}:
        assert steps.index(("publish", piece)) < steps.index(("arrive", piece))
    assert events[-1] == ("join", MAIN, SIDE), "the caller's stream must wait for all that went aside"
    copies = {event[1] for event in events if event[0] == "copy"}
    assert {stream for stream, step, *_ in said if step in ("arrive", "leave")} | copies == {SIDE}
    assert len({half for _, _, half, *_ in said}) == 1, "one half for all of a call"
