"""The column-parallel multiply with its backward exchange hidden under the weight gradient's multiply.

Composed from autograd's own pieces, the backward of a column-parallel layer waits for the exchange of ``dx`` before (or
after) it multiplies for ``dw``. The two do not depend on each other, so here the exchange is started first and waited for
last (Megatron-LM's asynchronous tensor-parallel all-reduce; with sequence parallelism arXiv 2205.05198, section 4.2.2).
Shapes: ``x [T, H]``, ``w [F/tp, H]``, ``dy [T, F/tp]``; T stands for any leading dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from crosscut.collectives import all_gather, all_reduce, copy_to_tp, gather_sequence, reduce_scatter
from crosscut.distributed.mesh import Group
from crosscut.sharding import shard_sizes


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence_dim: int | None = None, total: int | None = None
) -> Tensor:
    """``y = x W^T + b`` for this rank's ``W``; ``x`` whole on every rank, or with ``sequence_dim`` this rank's tokens of it.

    ``total``: T when the tokens do not divide. The gradient of ``x`` is summed over the group (or summed and scattered).
    With sequence parallelism only the rank's own tokens are kept for the backward, which gathers them again.
    """
    sharded = sequence_dim is not None and group.size > 1
    if sharded and total is None:
        total = x.shape[sequence_dim] * group.size  # type: ignore[index]
    hidden = group.size > 1 and torch.is_grad_enabled() and x.requires_grad
    if hidden and not torch.is_autocast_enabled(x.device.type):  # autocast would need the casts of each operation by hand
        return _ColumnLinear.apply(x, weight, bias, group, sequence_dim if sharded else None, total)
    if sequence_dim is not None:
        return F.linear(gather_sequence(x, group, sequence_dim, total), weight, bias)
    return F.linear(copy_to_tp(x, group), weight, bias)


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, dim: int | None, total: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.group, ctx.dim, ctx.total = group, dim, total
        whole = x if dim is None else all_gather(x, group, dim, shard_sizes(total or 0, group.size))
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # someone wants gradients of this gradient: take the way that autograd can follow
            return _composed(x, weight, bias, dy, ctx)
        wants_weight = ctx.needs_input_grad[1]
        sizes = None if ctx.dim is None else shard_sizes(ctx.total, ctx.group.size)
        gathered = all_gather.start(x, ctx.group, ctx.dim, sizes) if sizes is not None and wants_weight else None
        dx = dy.matmul(weight)
        if sizes is None:
            exchange = all_reduce.start(dx, ctx.group, out=dx)
        else:
            exchange = reduce_scatter.start(dx, ctx.group, ctx.dim, sizes=sizes)
        dw = db = None
        if wants_weight:
            whole = x if gathered is None else gathered.wait()
            dw = dy.flatten(0, -2).t().mm(whole.flatten(0, -2)) if dy.dim() > 1 else dy.outer(whole)
        if bias is not None and ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0) if dy.dim() > 1 else dy
        return exchange.wait(), dw, db, None, None, None


def _composed(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    inputs = [x, weight] if bias is None else [x, weight, bias]
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    whole = copy_to_tp(x, ctx.group) if ctx.dim is None else gather_sequence(x, ctx.group, ctx.dim, ctx.total)
    found = iter(torch.autograd.grad(F.linear(whole, weight, bias), wanted, dy, create_graph=True))
    grads = [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]
    return (*grads, None, None, None)
