"""Ranks as threads of one process, over torch's own threaded process group: milliseconds instead of seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from crosscut.distributed.mesh import make_mesh

T = TypeVar("T")

if not hasattr(ThreadLocalWorld, "comms"):  # torch 2.11's threaded world lacks what its own teardown reads
    ThreadLocalWorld.comms = property(lambda self: [])


def _wake_peers(failure: BaseException) -> None:
    """End the waits of the other ranks. torch walks a dict that they may be changing: look again until it stands still."""
    for _ in range(1000):
        with suppress(RuntimeError):
            ProcessLocalGroup.exception_handle(failure)
            return


def run_ranks(world: int, fn: Callable[..., T], *args: Any, tp: int | None = None) -> list[T]:
    """Run ``fn(mesh, *args)`` on ``world`` rank threads. The first rank's own error is raised, not its peers' echoes."""
    if world == 1:
        return [fn(make_mesh(device="cpu"), *args)]
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    shared = _install_threaded_pg()
    store = dist.HashStore()

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=20))
            results[rank] = fn(make_mesh(tp=tp, device="cpu"), *args)
        except BaseException as failure:  # a peer's echo is a BrokenBarrier; the origin is recorded first
            failures.append(failure)
            _wake_peers(failure)
        finally:
            with suppress(Exception):  # after a failure the peers may be gone, and the failure is what counts
                dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stuck = [thread.name for thread in threads if thread.is_alive()]
        assert not stuck or failures, f"ranks never returned: {stuck}"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert shared is not None
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world)]
