"""The order of a group's calls over streams, eager and captured, on a driver that only writes down what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from crosscut.kernels import order
from crosscut.kernels.order import Aside, Order

MAIN, OTHER, SIDE = 0, 7, 9  # MAIN is the handle of the default stream


class Driver:
    """What ``stream`` waits for: all that stood on another stream when it was told to wait."""

    def __init__(self) -> None:
        self.events: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []
        self.captures: dict[int, int] = {}
        self.current = MAIN

    def new_event(self) -> int:
        self.events[len(self.events) + 100] = -1
        return len(self.events) + 99

    def record(self, event: int, stream: int) -> None:
        self.events[event] = stream

    def wait(self, stream: int, event: int) -> None:
        before = self.events[event]
        assert before >= 0, "an event that nobody recorded"
        if before in self.captures:
            self.captures.setdefault(stream, self.captures[before])  # a wait pulls a stream into the capture
        self.waits.append((stream, before))

    def capture_of(self, stream: int) -> int:
        return self.captures.get(stream, 0)

    def said(self) -> list[tuple[int, int]]:
        """The waits since the last call of this, as (who waits, for which stream)."""
        said, self.waits = self.waits, []
        return said


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for name in ("new_event", "record", "wait", "capture_of"):
        monkeypatch.setattr(order, name, getattr(made, name))
    monkeypatch.setattr(Order, "side", type("Side", (), {"cuda_stream": SIDE}))
    monkeypatch.setattr(Order, "current", lambda self: made.current)
    return made


def caller(made: Order) -> Callable[[int], None]:
    """A plain call from a stream, as Exchange issues it."""

    def call(stream: int) -> None:
        if stream != made.last:
            made.follow(stream)

    return call


def test_plain_calls_wait_for_the_call_before_on_another_stream(driver: Driver) -> None:
    made = Order(torch.device("cuda", 0))
    call = caller(made)
    call(MAIN)
    call(MAIN)
    assert driver.said() == []
    call(OTHER)
    call(OTHER)
    assert driver.said() == [(OTHER, MAIN)]
    call(MAIN)
    assert driver.said() == [(MAIN, OTHER)], "the default stream waits too"


def test_a_started_call_follows_the_caller_and_the_next_plain_call_follows_it(driver: Driver) -> None:
    made = Order(torch.device("cuda", 0))
    call = caller(made)
    call(OTHER)
    call(made.fork())
    assert driver.said() == [(SIDE, MAIN), (SIDE, OTHER)], "after the caller's stream, and after the call before"
    work = Aside(made, ())
    call(made.fork())
    assert driver.said() == [(SIDE, MAIN)]
    call(MAIN)
    assert driver.said() == [(MAIN, SIDE)]
    driver.current = OTHER
    work.wait()
    work.wait()
    assert driver.said() == [(OTHER, SIDE)], "whoever waits, once"


def test_a_capture_has_an_order_of_its_own(driver: Driver) -> None:
    """No event crosses its border in either direction, and inside it calls are ordered as outside."""
    made = Order(torch.device("cuda", 0))
    call = caller(made)
    call(made.fork())
    driver.said()
    driver.current, driver.captures = OTHER, {OTHER: 1}
    call(OTHER)
    assert driver.said() == [], "eager work on the side stream cannot be waited for here"
    call(made.fork())
    call(OTHER)
    Aside(made, ()).wait()
    assert driver.said() == [(SIDE, OTHER), (SIDE, OTHER), (OTHER, SIDE), (OTHER, SIDE)]
    driver.current, driver.captures = OTHER, {OTHER: 2}
    call(made.fork())
    assert set(driver.said()) == {(SIDE, OTHER)}, "the capture before is no business of this one"
    driver.current, driver.captures = MAIN, {}
    call(MAIN)
    assert driver.said() == [(MAIN, SIDE)], "the last eager call was on the side stream"


def test_a_capture_that_begins_on_the_stream_of_the_call_before_keeps_its_order(driver: Driver) -> None:
    """Seen on a GPU: the first call of a capture came from the stream of the last eager one, so nobody took note of it."""
    made = Order(torch.device("cuda", 0))
    call = caller(made)
    driver.current = OTHER
    call(made.fork())
    driver.said()
    driver.captures = {OTHER: 1}
    call(made.fork())  # the side stream again, now part of the capture
    assert driver.said() == [(SIDE, OTHER)]
    call(OTHER)
    assert driver.said() == [(OTHER, SIDE)], "the plain call overtakes the started one"
    driver.captures = {}
    call(MAIN)
    assert driver.said() == [(MAIN, OTHER)]
    driver.captures = {MAIN: 2}
    call(MAIN)
    driver.captures[OTHER] = 2
    call(OTHER)
    assert driver.said() == [(OTHER, MAIN)], "also without a side stream"


def test_events_are_used_again_and_memory_of_dropped_calls_is_marked(driver: Driver) -> None:
    made, marked = Order(torch.device("cuda", 0)), list[Any]()

    class Memory:
        def record_stream(self, stream: Any) -> None:
            marked.append(stream.cuda_stream)

    for waited in (True, True, False, True):
        work = Aside(made, (Memory(),))  # type: ignore[arg-type]
        if waited:
            work.wait()
        del work
    assert marked == [SIDE]
    assert len(driver.events) == 1
