"""Two column-parallel branches of one input, each behind its own norm, with one exchange of the input's gradient.

Computed one after the other, each branch sums its gradient over the ranks before its norm's backward. A norm's backward is
linear in what comes in, so the sum may as well be taken behind it, where the branches have met: one all-reduce of ``dx`` where
there were two, and for the norms' weights, whose gradients are now partial, one of a few times H numbers. With sequence
parallelism the norms run on all tokens: one all-gather of x serves both branches, forward and backward, where there were four,
and one reduce-scatter serves where there were two; kept for the backward are the rank's own tokens of x, once.
Shapes: x ``[T, H]`` or a rank's tokens of it, weights ``[F/tp, H]``, results ``[T, F/tp]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from crosscut.collectives import all_gather, all_reduce, copy_to_tp, gather_sequence, reduce_scatter
from crosscut.distributed.mesh import Group
from crosscut.layers.norm import LayerNorm, RMSNorm
from crosscut.sharding import shard_sizes

_EACH = 4  # tensors of a branch: its weight and bias, its norm's weight and bias


@dataclass(frozen=True)
class Branch:
    """A norm and the column-parallel weight and bias behind it."""

    norm: RMSNorm | LayerNorm
    weight: Tensor
    bias: Tensor | None


def shared_columns(
    x: Tensor, branches: Sequence[Branch], group: Group, sequence_dim: int | None = None, total: int | None = None
) -> tuple[Tensor, ...]:
    """``norm(x) W^T + b`` of each branch, for this rank's ``W``. ``sequence_dim``, ``total``: as for ``column_linear``."""
    dim = sequence_dim if group.size > 1 else None
    if dim is not None and total is None:
        total = x.shape[dim] * group.size
    norms = [branch.norm for branch in branches]
    tensors = [t for b in branches for t in (b.weight, b.bias, b.norm.weight, b.norm.bias)]
    hidden = group.size > 1 and torch.is_grad_enabled() and x.requires_grad
    by_hand = not torch.compiler.is_dynamo_compiling() and not torch.is_autocast_enabled(x.device.type)  # as in column_linear
    if hidden and by_hand:
        return _SharedColumns.apply(x, group, dim, total, norms, *tensors)
    return _composed(x, group, dim, total, norms, tensors)


def _composed(
    x: Tensor, group: Group, dim: int | None, total: int | None, norms: Sequence[Any], tensors: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The same of autograd's own pieces."""
    whole = copy_to_tp(x, group) if dim is None else gather_sequence(x, group, dim, total)
    results = []
    for norm, (weight, bias, *own) in zip(norms, _by_branch(tensors), strict=True):
        scale, shift = (None if t is None else copy_to_tp(t, group) for t in own)
        results.append(F.linear(norm.normalise(whole, scale, shift), weight, bias))
    return tuple(results)


def _by_branch(tensors: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (tensors[i : i + _EACH] for i in range(0, len(tensors), _EACH))


class _SharedColumns(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, dim: int | None, total: int | None, norms: list[Any], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *tensors)
        ctx.group, ctx.dim, ctx.total, ctx.norms = group, dim, total, norms
        whole = x if dim is None else all_gather(x, group, dim, shard_sizes(total or 0, group.size))
        return tuple(
            F.linear(norm.normalise(whole, *own), weight, bias)
            for norm, (weight, bias, *own) in zip(norms, _by_branch(tensors), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # someone wants gradients of this gradient: take the way that autograd can follow
            return _differentiable(ctx, x, tensors, dys)
        group, dim, branches = ctx.group, ctx.dim, list(_by_branch(tensors))
        sizes = None if dim is None else shard_sizes(ctx.total, group.size)
        whole = (x if sizes is None else all_gather(x, group, dim, sizes)).detach().requires_grad_()
        own = [None if t is None else t.detach().requires_grad_(t.requires_grad) for branch in branches for t in branch[2:]]
        with torch.enable_grad():
            normed = [norm.normalise(whole, *own[2 * i : 2 * i + 2]) for i, norm in enumerate(ctx.norms)]
        trained = [t for t in own if t is not None and t.requires_grad]
        upstream = [dy.matmul(branch[0]) for dy, branch in zip(dys, branches, strict=True)]
        dx, *partial = torch.autograd.grad(normed, [whole, *trained], upstream)
        dx = dx.contiguous()
        if sizes is None:
            exchange = all_reduce.start(dx, group, out=dx)
        else:
            exchange = reduce_scatter.start(dx, group, dim, sizes=sizes)
        grads = [_weight_gradients(dy, h, *branch[:2]) for dy, h, branch in zip(dys, normed, branches, strict=True)]
        summed = iter(_summed(partial, group))
        for i, pair in enumerate(zip(own[::2], own[1::2], strict=True)):
            grads[i] += [None if t is None or not t.requires_grad else next(summed) for t in pair]
        return (exchange.wait(), None, None, None, None, *(g for branch in grads for g in branch))


def _weight_gradients(dy: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor | None]:
    flat = dy.flatten(0, -2)
    dw = flat.t().mm(h.detach().flatten(0, -2)) if weight.requires_grad else None
    return [dw, flat.sum(0) if bias is not None and bias.requires_grad else None]


def _summed(partial: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The tensors, each ``[H]`` and of one dtype, summed over the ranks in one exchange."""
    return list(all_reduce(torch.stack(list(partial)), group).unbind(0)) if partial else []


def _differentiable(ctx: Any, x: Tensor, tensors: list[Tensor | None], dys: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    results = _composed(x, ctx.group, ctx.dim, ctx.total, ctx.norms, tensors)
    inputs = [x, *tensors]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, dys, create_graph=True, allow_unused=True))
    grads = [next(found) if t is not None and t.requires_grad else None for t in inputs]
    return (grads[0], None, None, None, None, *grads[1:])
