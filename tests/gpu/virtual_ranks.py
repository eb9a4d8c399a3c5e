"""Several ranks on one GPU: one workspace and one stream for each, so that kernels meet in the GPU's own memory.

What it shows: every protocol, size and race between ranks that share no clock. What it cannot show: NVLink's timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crosscut.kernels.exchange import Exchange
from crosscut.kernels.workspace import Layout, virtual_workspaces


class VirtualRanks:
    """``size`` ranks of one group. ``run(fn)`` calls ``fn(exchange, rank)`` on each rank's stream and returns the results.

    One thread issues for all, so ``fn`` may wait for nothing: of several kernels it queues, none may be new (loading code
    waits for the running kernels, and those wait for ranks whose turn has not come).
    """

    def __init__(
        self,
        size: int,
        deadline: float = 20.0,
        grid: int | None = None,
        layout: Layout | None = None,
        first: float | None = None,
    ) -> None:
        self.size = size
        self.device = torch.device("cuda", 0)
        self.streams = [torch.cuda.Stream(self.device) for _ in range(size)]
        workspaces = virtual_workspaces(size, self.device, deadline, layout, first)
        self.ranks = [Exchange(workspace, self.device, grid or 64 // size) for workspace in workspaces]

    def run(self, fn: Callable[[Exchange, int], Any], only: list[int] | None = None) -> list[Any]:
        torch.cuda.synchronize()
        results = []
        for rank in only if only is not None else range(self.size):
            with torch.cuda.stream(self.streams[rank]):
                results.append(fn(self.ranks[rank], rank))
        torch.cuda.synchronize()
        return results


def random(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Each rank's tensor: floats of mixed sign and size, or integers that use every bit."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(size)]
    info = torch.iinfo(dtype)
    return [torch.randint(info.min, info.max, shape, device="cuda", dtype=dtype, generator=generator) for _ in range(size)]


def reduced(xs: list[Tensor], op: str) -> Tensor:
    """The reduction in float32 in the order of the ranks, rounded once: what every kernel must give, bit for bit."""
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float() if op == "sum" else torch.maximum(total, x.float())
    return total.to(xs[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but for which NaN a NaN is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.int8}[a.element_size()]
    equal = (a.contiguous().view(whole) == b.contiguous().view(whole)) | (a.isnan() & b.isnan())
    return bool(equal.all())
