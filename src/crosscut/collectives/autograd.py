"""The autograd tier: the dual pairs of tensor parallelism. Each one's backward is the other of its pair.

Pairs and names follow Megatron-LM (arXiv 1909.08053, f and g) and its sequence parallelism (arXiv 2205.05198, g and g-bar).
``x`` is the same on all ranks where it is called whole, and each rank's own part where it is called sharded.
Without a gradient to carry (inference, ``torch.no_grad``) each costs only its raw collective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from crosscut.collectives.checks import checked_dim
from crosscut.collectives.functional import all_gather, all_reduce, reduce_scatter
from crosscut.distributed.mesh import Group
from crosscut.sharding import shard_range, shard_sizes


def fresh(y: Tensor) -> Tensor:
    """What a Function computed, not as the view that it may be: of such a view autograd allows no change in place."""
    return y.data


def _tracked(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Whole to whole: identity forward, all-reduce backward (f of Megatron-LM). Dual of :func:`reduce_from_tp`.

    Stands before a column-parallel multiply, each rank of which sends back only its part of the gradient of ``x``.
    """
    return _Copy.apply(x, group) if group.size > 1 and _tracked(x) else x


def reduce_from_tp(x: Tensor, group: Group, overwrite: bool = False) -> Tensor:
    """Partial sums to their sum: all-reduce forward, identity backward (g of Megatron-LM). Dual of :func:`copy_to_tp`.

    Stands after a row-parallel multiply. ``overwrite``: the sum may be written over ``x``, which nobody else needs.
    """
    if group.size == 1:
        return x
    overwrite = overwrite and not torch.compiler.is_dynamo_compiling()  # the compiler plans memory itself
    return _Reduce.apply(x, group, overwrite) if _tracked(x) else all_reduce(x, group, out=x if overwrite else None)


def gather_from_tp(x: Tensor, group: Group, dim: int = -1, total: int | None = None) -> Tensor:
    """Sharded to whole: all-gather along ``dim`` forward, own part backward. Dual of :func:`scatter_to_tp`.

    ``total``: size of ``dim`` when whole, needed when it does not divide (Megatron-LM's gather of a column output).
    """
    if group.size == 1:
        return x
    dim = checked_dim(x, dim)
    total = x.shape[dim] * group.size if total is None else total
    if _tracked(x):
        return _Gather.apply(x, group, dim, total)
    return all_gather(x, group, dim, shard_sizes(total, group.size))


def scatter_to_tp(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Whole to sharded: own part along ``dim`` forward, all-gather backward. Dual of :func:`gather_from_tp`.

    Stands before a row-parallel multiply whose input is whole (Megatron-LM's scatter to the model-parallel region).
    """
    if group.size == 1:
        return x
    dim = checked_dim(x, dim)
    return _Scatter.apply(x, group, dim) if _tracked(x) else _own_part(x, group, dim).contiguous()


def gather_sequence(x: Tensor, group: Group, dim: int = 0, total: int | None = None) -> Tensor:
    """Sequence shard to whole: all-gather along ``dim`` forward, reduce-scatter backward (g of arXiv 2205.05198).

    Dual of :func:`reduce_scatter_sequence`. Differs from :func:`gather_from_tp` in what follows: each rank goes on with
    other weights, so the gradients that come back are partial and must be summed. ``total``: as there.
    """
    if group.size == 1:
        return x
    dim = checked_dim(x, dim)
    total = x.shape[dim] * group.size if total is None else total
    if _tracked(x):
        return _GatherSequence.apply(x, group, dim, total)
    return all_gather(x, group, dim, shard_sizes(total, group.size))


def reduce_scatter_sequence(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Partial sums to a sequence shard of their sum: reduce-scatter forward, all-gather backward (g-bar of arXiv 2205.05198).

    Dual of :func:`gather_sequence`. Uneven lengths are dealt as ``shard_sizes`` says.
    """
    if group.size == 1:
        return x
    dim = checked_dim(x, dim)
    if _tracked(x):
        return _ReduceScatterSequence.apply(x, group, dim)
    return reduce_scatter(x, group, dim, sizes=shard_sizes(x.shape[dim], group.size))


def _own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    mine = shard_range(x.shape[dim], group.size, group.rank)
    return x.narrow(dim, mine.start, mine.stop - mine.start)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_from_tp(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, overwrite: bool) -> Tensor:
        ctx.group = group
        if not overwrite:
            return all_reduce(x, group)
        ctx.mark_dirty(x)
        return all_reduce(x, group, out=x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return copy_to_tp(grad, ctx.group), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, total: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return fresh(all_gather(x, group, dim, shard_sizes(total, group.size)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_to_tp(grad, ctx.group, ctx.dim), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, x.shape[dim]
        return _own_part(x, group, dim).clone(memory_format=torch.contiguous_format)  # never a view, see fresh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from_tp(grad, ctx.group, ctx.dim, ctx.total), None, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, total: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return fresh(all_gather(x, group, dim, shard_sizes(total, group.size)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_sequence(grad, ctx.group, ctx.dim), None, None, None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, x.shape[dim]
        return fresh(reduce_scatter(x, group, dim, sizes=shard_sizes(ctx.total, group.size)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_sequence(grad, ctx.group, ctx.dim, ctx.total), None, None
