"""Ranks as real processes that share one GPU: the kernels through torch's symmetric memory, from the layers down.

Without NVLink and by turns on one GPU, so nothing here is fast; what it shows is that processes map each other's memory,
agree on the kernels, compute the right thing, and end in an error when one of them dies.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import rank_checks
from crosscut import collectives as cc
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.distributed.mesh import make_mesh
from crosscut.errors import CollectiveTimeout, RankError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SHARED = LaunchConfig(2, "gloo", "cuda", timeout=60)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "kernels")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)  # each rank is a process: it may load as it goes
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def choices(ctx: Any) -> list[str]:
    group = make_mesh(device=ctx.device).tp
    return [str(cc.choice("all_reduce", nbytes, group)) for nbytes in (16, 1 << 20, 1 << 26)]


def test_the_kernels_are_what_runs() -> None:
    assert run(choices, (), SHARED) == ["crosscut:lanes", "crosscut:lanes", "crosscut:blocks"]


def test_collectives_over_shared_memory() -> None:
    assert run(rank_checks.check_collectives, (), SHARED) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layers_over_shared_memory(dtype: torch.dtype) -> None:
    compared = run(rank_checks.check_layers, (dtype,), SHARED)
    assert compared is not None
    assert compared > 80


def test_layers_in_cuda_graphs_over_shared_memory() -> None:
    assert run(rank_checks.check_graph, (), SHARED) == 20


def test_all_reduce_norm_equals_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(rank_checks.check_norm, (), SHARED) == 12


def dies(ctx: Any) -> str:
    """Rank 1 is killed between two calls; rank 0 must come out of its kernel, with rank 1 named, and go on to exit."""
    group = make_mesh(device=ctx.device).tp
    x = torch.ones(4096, device=ctx.device)
    cc.all_reduce(x, group)
    torch.cuda.synchronize()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    cc.all_reduce(x, group)
    torch.cuda.synchronize()
    cc.all_reduce(x, group)
    return "rank 0 never noticed"


def test_a_killed_peer_ends_in_an_error() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        run(dies, (), SHARED)
    assert time.monotonic() - start < 30


def outlives(ctx: Any) -> str:
    """As ``dies``, but rank 1 only stops calling: the error is rank 0's own, within the group's deadline."""
    group = make_mesh(device=ctx.device).tp
    x = torch.ones(4096, device=ctx.device)
    cc.all_reduce(x, group)
    torch.cuda.synchronize()
    if ctx.rank == 1:
        time.sleep(12)
        return "silent"
    try:
        cc.all_reduce(x, group)
        torch.cuda.synchronize()
        cc.all_reduce(x, group)
    except CollectiveTimeout as error:
        return error.message
    return "rank 0 never noticed"


def test_a_silent_peer_ends_in_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSCUT_TIMEOUT", "3")
    message = run(outlives, (), SHARED)
    assert message is not None
    assert "waited more than 3 s in all_reduce" in message
    assert "nothing came from rank 1" in message
