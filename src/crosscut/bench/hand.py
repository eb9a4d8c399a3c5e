"""The exchanges of a split as an engineer writes them by hand: torch.distributed's own calls, each with its gradient.

The peers of crosscut's layers are made of these. Without a gradient to carry each costs only its raw call.
Shapes: ``x [T, H]`` whole on every rank, ``y [..., F/tp]`` or partial sums ``[..., H]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from crosscut.collectives.functional import all_gather_single
from crosscut.distributed.mesh import Group

Join = Callable[[Tensor, Group], Tensor]


def tracked(x: Tensor) -> bool:
    """Whether a gradient of ``x`` will be wanted."""
    return x.requires_grad and torch.is_grad_enabled()


def copied(x: Tensor, group: Group) -> Tensor:
    """``x`` before a column-parallel multiply: the same forward, an all-reduce of its gradient backward."""
    return _Copied.apply(x, group) if tracked(x) else x


def summed(y: Tensor, group: Group) -> Tensor:
    """Partial sums to their sum, in place: one all-reduce forward, nothing backward."""
    return _Summed.apply(y, group) if tracked(y) else _all_reduce(y, group)


def gathered(y: Tensor, group: Group) -> Tensor:
    """The parts of the last dim joined: one all-gather into one buffer and a reordering copy; backward the own part."""
    return _Joined.apply(y, group, _into_one) if tracked(y) else _into_one(y, group)


def textbook_gathered(y: Tensor, group: Group) -> Tensor:
    """As :func:`gathered`, as a tutorial does it: ``all_gather`` into a list, then ``cat``."""
    return _Joined.apply(y, group, _into_list) if tracked(y) else _into_list(y, group)


def _all_reduce(y: Tensor, group: Group) -> Tensor:
    dist.all_reduce(y, group=group.process_group)
    return y


def _into_list(y: Tensor, group: Group) -> Tensor:
    parts = [torch.empty_like(y) for _ in range(group.size)]
    dist.all_gather(parts, y, group=group.process_group)
    return torch.cat(parts, dim=-1)


def _into_one(y: Tensor, group: Group) -> Tensor:
    whole = torch.empty(group.size * y.shape[0], *y.shape[1:], dtype=y.dtype, device=y.device)
    all_gather_single(whole, y, group=group.process_group)
    return whole.view(group.size, *y.shape).movedim(0, -2).flatten(-2)


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grad.contiguous(), ctx.group), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(y)
        return _all_reduce(y, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group, join: Join) -> Tensor:
        ctx.group, ctx.width = group, y.shape[-1]
        return join(y, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.narrow(-1, ctx.group.rank * ctx.width, ctx.width).contiguous(), None, None
