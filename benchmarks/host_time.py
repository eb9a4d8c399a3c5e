"""Python's share of one all_reduce over the kernels: microseconds from the call to its return, on one GPU.

Two virtual ranks share the GPU. Rank 0's calls are timed on the host's clock, in batches that fit the launch queue; its
kernels wait on the GPU, and rank 1's calls, which are not timed, end the wait. So this is the cost of the call alone.

Run: PYTHONPATH=src python benchmarks/host_time.py
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # loading code waits for running kernels, and these wait for each other
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import torch
from torch import Tensor

from crosscut import collectives as cc
from crosscut.collectives.fast import Fast
from crosscut.collectives.select import shipped
from crosscut.distributed.mesh import Group
from crosscut.kernels.exchange import Exchange
from crosscut.kernels.workspace import virtual_workspaces

BATCH, BATCHES = 100, 60


def group(rank: int, exchange: Exchange) -> Group:
    """A group of two whose kernels are ``exchange``."""
    made = Group("tp", rank, 2, (0, 1), "nccl", exchange.device)
    made.cache["fast"] = Fast(exchange, shipped(2))
    return made


def timed(call: Callable[[Group, Tensor], object], groups: list[Group], x: list[Tensor]) -> list[float]:
    """Microseconds a call of rank 0, one value a batch."""
    streams, samples = [torch.cuda.Stream() for _ in groups], []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            start = time.perf_counter()
            for _ in range(BATCH):
                call(groups[0], x[0])
            samples.append((time.perf_counter() - start) / BATCH * 1e6)
        with torch.cuda.stream(streams[1]):
            for _ in range(BATCH):
                call(groups[1], x[1])
        torch.cuda.synchronize()
    return samples


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("error: this needs an NVIDIA GPU")
    device = torch.device("cuda", 0)
    groups = [group(w.rank, Exchange(w, device)) for w in virtual_workspaces(2, device)]
    calls: dict[str, Callable[[Group, Tensor], object]] = {
        "out of place": lambda g, x: cc.all_reduce(x, g),
        "in place": lambda g, x: cc.all_reduce(x, g, out=x),
        "start and wait": lambda g, x: cc.all_reduce.start(x, g).wait(),
        "torch.empty_like alone": lambda g, x: torch.empty_like(x),
    }
    for nbytes in (8 << 10, 64 << 10):
        x = [torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in groups]
        for name, call in calls.items():
            with torch.no_grad():
                samples = sorted(timed(call, groups, x))
            low, median = samples[len(samples) // 10], statistics.median(samples)
            print(f"{nbytes >> 10:4} KiB  {name:24} p10 {low:6.2f}  p50 {median:6.2f} us")


if __name__ == "__main__":
    main()
