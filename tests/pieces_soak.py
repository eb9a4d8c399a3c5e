"""Random calls of all schedules with exact values: small integers, so that every sum is exact whatever its order."""

from __future__ import annotations

import random as dice
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.distributed.mesh import Group
from crosscut.layers import pieces
from crosscut.layers.carry import Carrier
from crosscut.sharding import shard_sizes

Results = list[tuple[Tensor, Tensor]]
"""What came out, and what should have."""
OPS = ("gather_multiply", "multiply_scatter", "multiply_gather", "multiply_reduce")


@dataclass
class Case:
    """One call on one rank: ``x``, ``weight``, ``bias`` are its own, ``everything`` and ``expected`` what a check needs.

    ``offset``: twice the bias of all output features, 0 without one.
    """

    op: str
    group: Group
    count: int
    sizes: list[int]
    x: Tensor
    weight: Tensor
    bias: Tensor
    everything: Tensor
    expected: Tensor
    offset: Tensor

    def flip(self) -> Case:
        """Turn the sign of every rank's ``x``, in place: each call has other inputs than the call before."""
        self.x.neg_()
        self.everything.neg_()
        self.expected.neg_().add_(self.offset)
        return self

    def run(self, by: Carrier) -> Results:
        """Make the call."""
        if self.op == "gather_multiply":
            y, whole = pieces.gather_multiply(self.x, self.weight, self.bias, self.group, self.sizes, self.count, by)
            return [(y, self.expected), *([] if whole is None else [(whole, self.everything)])]
        if self.op == "multiply_scatter":
            y = pieces.multiply_scatter(self.x, self.weight, self.group, self.sizes, self.count, by)
        elif self.op == "multiply_reduce":
            y = pieces.multiply_reduce(self.x, self.weight, self.group, self.count, by)
        else:
            y = pieces.multiply_gather(self.x, self.weight, self.bias, self.group, self.sizes, self.count, by)
        return [(y, self.expected)]


def draw(group: Group, seed: int, most: int = 9, dtype: torch.dtype = torch.float32, op: str | None = None) -> Case:
    """The call of ``seed``, the same on every rank. ``most``: features, and a third of the tokens; at most 28 in bf16."""
    roll, generator = dice.Random(seed), torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(group.device, dtype)

    op = roll.choice(OPS[: 4 if group.size == 2 else 3]) if op is None else op
    rows, k, n = roll.randint(1, 3 * most), roll.randint(1, most), roll.randint(1, most)
    outer = roll.randint(1, 3) if op in OPS[:2] else 1
    ranks = group.size if op in ("multiply_scatter", "multiply_reduce") else 1
    x, weight, bias = integers(ranks, outer, rows, k), integers(ranks, n, k), integers(n)
    exact = torch.einsum("rotk,rnk->otn", x.double(), weight.double()).to(dtype)
    sizes = shard_sizes(n if op == "multiply_gather" else rows, group.size)
    everything, mine = x[0].clone(), group.rank if ranks > 1 else 0
    x, weight, offset = x[mine], weight[mine], 2 * bias if ranks == 1 else torch.zeros_like(bias)
    if op == "gather_multiply":
        x, exact = x.split(sizes, 1)[group.rank], exact + bias
    elif op == "multiply_scatter":
        exact = exact.split(sizes, 1)[group.rank]
    elif op == "multiply_gather":
        weight, exact, bias = weight.split(sizes)[group.rank], exact + bias, bias.split(sizes)[group.rank]
    return Case(op, group, roll.randint(1, min(5, rows)), sizes, x, weight, bias, everything, exact, offset)


def wrong(results: Results) -> Tensor:
    """How many elements are wrong."""
    assert all(got.shape == expected.shape for got, expected in results)
    return torch.stack([(got != expected).sum() for got, expected in results]).sum()


def soak(group: Group, carrier: Callable[[], Carrier], calls: int, seed: int) -> int:
    """Make ``calls`` calls, the same on every rank; returns how many wrong elements came out."""
    return sum(int(wrong(draw(group, seed * calls + call).flip().run(carrier()))) for call in range(calls))
