"""Shared by all tests: ranks as threads, and a timer that kills a stuck test."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

T = TypeVar("T")
TEST_SECONDS = 180


@pytest.fixture(autouse=True)
def kill_timer() -> Iterator[None]:
    """A test that hangs ends the whole run with every thread's stack, instead of holding CI for ever."""
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """``on_ranks(world, fn, *args)`` runs ``fn(mesh, *args)`` as one thread per rank and returns their results in order."""
    from rank_threads import run_ranks

    return run_ranks
