"""Column- and row-parallel multiplies whose exchanges hide under multiplies, forward and backward, for autograd.

Composed from autograd's own pieces, the backward of a column-parallel layer waits for the exchange of ``dx`` before (or
after) it multiplies for ``dw``. The two do not depend on each other, so here the exchange is started first and waited for
last (Megatron-LM's asynchronous tensor-parallel all-reduce; with sequence parallelism arXiv 2205.05198, section 4.2.2).
Where a schedule says so (``schedule.py``), the forward and the backward of sequence-parallel rows go in pieces (``pieces.py``).
Shapes: ``x [T, H]``, ``w [F/tp, H]`` (column) or ``[H, F/tp]`` (row), ``dy`` as the output; T stands for any leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from crosscut.collectives import (
    all_gather,
    all_reduce,
    copy_to_tp,
    gather_from_tp,
    gather_sequence,
    reduce_scatter,
)
from crosscut.collectives.autograd import fresh
from crosscut.distributed.mesh import Group
from crosscut.layers.checks import check_sequence_dim
from crosscut.layers.matmul import linear
from crosscut.layers.pieces import gather_multiply, multiply_gather, multiply_reduce, multiply_scatter
from crosscut.layers.planning import carrier, scheduled, too_few
from crosscut.layers.schedule import PLAIN, Schedule
from crosscut.sharding import shard_sizes


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence_dim: int | None = None,
    total: int | None = None,
    out_features: int | None = None,
    gather_output: bool = False,
) -> Tensor:
    """``y = x W^T + b`` for this rank's ``W``; ``x`` whole on every rank, or with ``sequence_dim`` this rank's tokens of it.

    ``total``: T when the tokens do not divide. The gradient of ``x`` is summed over the group (or summed and scattered).
    With sequence parallelism only the rank's own tokens are kept for the backward, which gathers them again.
    ``out_features``: those of all ranks together, which a schedule in pieces needs; ``gather_output``: all of them in y.
    """
    if sequence_dim is not None:
        check_sequence_dim(sequence_dim, x.dim())
    if torch.compiler.is_dynamo_compiling():  # composed from operators that the compiler knows; it orders them itself
        whole = copy_to_tp(x, group) if sequence_dim is None else gather_sequence(x, group, sequence_dim, total)
        y = F.linear(whole, weight, bias)
        return gather_from_tp(y, group, -1, out_features) if gather_output else y
    sharded = sequence_dim is not None
    if group.size == 1 or not (sharded or gather_output or (x.requires_grad and torch.is_grad_enabled())):
        return linear(x, weight, bias)
    if sharded and total is None:
        total = x.shape[sequence_dim] * group.size  # type: ignore[index]
    how = _Column(group, sequence_dim % x.dim() if sharded else None, total or 0, out_features)  # type: ignore[operator]
    how.schedule = how.plan(x, gather_output) if sharded or gather_output else PLAIN
    joined = gather_output and not sharded and how.schedule.pieces > 0
    how.widths = shard_sizes(out_features or 0, group.size) if joined else None
    y = _column(x, weight, bias, how, sequence_dim)
    return gather_from_tp(y, group, -1, out_features) if gather_output and not joined else y


def _column(x: Tensor, weight: Tensor, bias: Tensor | None, how: _Column, sequence_dim: int | None) -> Tensor:
    if how.schedule.pieces and not _tracked(x, weight, bias):
        with torch.no_grad():  # the pieces are written into the result
            return how.forward(x, weight, bias)
    hidden = how.group.size > 1 and torch.is_grad_enabled() and x.requires_grad
    if how.schedule.pieces or (hidden and not torch.is_autocast_enabled(x.device.type)):  # autocast: casts would be by hand
        return _ColumnLinear.apply(x, weight, bias, how)
    if sequence_dim is not None:
        return linear(gather_sequence(x, how.group, sequence_dim, how.total or None), weight, bias)
    return linear(copy_to_tp(x, how.group), weight, bias, ("all_gather", how.group))


@dataclass
class _Column:
    """One call: ``dim`` where tokens are cut (None: they are whole), ``widths`` of the ranks' outputs where they are joined."""

    group: Group
    dim: int | None
    total: int
    out_features: int | None
    widths: list[int] | None = None
    schedule: Schedule = PLAIN

    def plan(self, x: Tensor, gather_output: bool) -> Schedule:
        """The forward's schedule."""
        if self.out_features is None:
            return PLAIN
        op = "gather_multiply" if self.dim is not None else "multiply_gather"
        return scheduled(self.group, op, x, self.tokens(x), x.shape[-1], -(-self.out_features // self.group.size))

    def tokens(self, x: Tensor) -> int:
        """All tokens, those of the other ranks too."""
        return _tokens(x.shape, self.dim, self.total)

    def sizes(self) -> list[int] | None:
        """Each rank's tokens along ``dim``."""
        return None if self.dim is None else shard_sizes(self.total, self.group.size)

    def whole(self, x: Tensor) -> Tensor:
        """All tokens, with the dual exchange in its backward."""
        return copy_to_tp(x, self.group) if self.dim is None else gather_sequence(x, self.group, self.dim, self.total)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Without autograd."""
        if not self.schedule.pieces:
            shards = self.sizes()
            return F.linear(x if shards is None else all_gather(x, self.group, self.dim or 0, shards), weight, bias)
        by = carrier(self.group, self.schedule)
        if self.dim is None:
            assert self.widths is not None, "whole tokens go in pieces only where the output is joined"
            y = multiply_gather(_rows(x, 0), weight, bias, self.group, self.widths, self.schedule.pieces, by)
            return y.view(*x.shape[:-1], -1)
        sizes = _row_sizes(x, self.dim, self.total, self.group)
        y, _ = gather_multiply(_rows(x, self.dim), weight, bias, self.group, sizes, self.schedule.pieces, by)
        return _like(y, x, self.dim)


class _ColumnLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _Column) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how = how
        return fresh(how.forward(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        how: _Column = ctx.how
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        if how.widths is not None:  # of a gradient that is the same on every rank, this rank's features
            dy = dy.split(how.widths, -1)[how.group.rank]
        if torch.is_grad_enabled():  # someone wants gradients of this gradient: take the way that autograd can follow
            return _composed((x, weight, bias), dy, ctx.needs_input_grad, lambda: F.linear(how.whole(x), weight, bias))
        sizes = how.sizes()
        gathered = all_gather.start(x, how.group, how.dim or 0, sizes) if sizes is not None and wants_weight else None
        exchange = _input_gradient(dy, weight, how, wants_weight) if wants_input else None
        dw = db = None
        if wants_weight:
            dw = _weight_gradient(dy, x if gathered is None else gathered.wait())
        if bias is not None and wants_bias:
            db = dy.flatten(0, -2).sum(0) if dy.dim() > 1 else dy
        return exchange() if exchange is not None else None, dw, db, None


def _input_gradient(dy: Tensor, weight: Tensor, how: _Column, covered: bool) -> Callable[[], Tensor]:
    """``dx`` under way. ``covered``: the multiply for ``dw`` hides its exchange; with a frozen weight, pieces may."""
    group, dim = how.group, how.dim
    if not covered and how.out_features is not None:
        op = "multiply_reduce" if dim is None else "multiply_scatter"
        outer = -(-how.out_features // group.size)
        schedule = scheduled(group, op, dy, math.prod(dy.shape[:-1]), outer, weight.shape[1])
        if schedule.pieces:
            dx = _partial_sums(dy, weight.t(), group, dim, schedule)
            return lambda: dx
    dx = dy.matmul(weight)
    if dim is None:
        return all_reduce.start(dx, group, out=dx).wait
    return reduce_scatter.start(dx, group, dim, sizes=how.sizes()).wait


# ------------------------------------------------------------------------------------------------------------------- row


def row_in_pieces(x: Tensor, weight: Tensor, group: Group, dim: int | None, in_features: int) -> Tensor | None:
    """The sum over ranks of ``x W^T``, to all ranks or, with ``dim``, each rank's tokens of it. None: the plain way serves.

    ``in_features``: those of all ranks together. With ``dim``, the gradient of y is gathered while it is multiplied.
    """
    if group.size == 1 or too_few(group, x) or torch.compiler.is_dynamo_compiling():
        return None
    dim = None if dim is None else dim % x.dim()
    tokens, inner = math.prod(x.shape[:-1]), -(-in_features // group.size)
    op = "multiply_reduce" if dim is None else "multiply_scatter"
    schedule = scheduled(group, op, x, tokens, inner, weight.shape[0])
    tracked = _tracked(x, weight, None)
    back = scheduled(group, "gather_multiply", x, tokens, weight.shape[0], inner) if dim is not None and tracked else PLAIN
    if not (schedule.pieces or back.pieces):
        return None
    how = _Row(group, dim, 0 if dim is None else x.shape[dim], schedule, back)
    if tracked:
        return _RowLinear.apply(x, weight, how)
    with torch.no_grad():
        return how.forward(x, weight)


@dataclass
class _Row:
    """One call: ``dim`` where the output's tokens are cut (None: whole), and the schedules of forward and backward."""

    group: Group
    dim: int | None
    total: int
    schedule: Schedule
    back: Schedule = PLAIN

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Without autograd."""
        if self.schedule.pieces:
            return _partial_sums(x, weight, self.group, self.dim, self.schedule)
        y = F.linear(x, weight)
        if self.dim is None:
            return all_reduce(y, self.group, out=y)
        return reduce_scatter(y, self.group, self.dim, sizes=shard_sizes(self.total, self.group.size))


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: _Row) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return fresh(how.forward(x, weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        how: _Row = ctx.how
        wants_input, wants_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            whole = copy_to_tp(dy, how.group) if how.dim is None else gather_sequence(dy, how.group, how.dim, how.total)
            return _composed((x, weight), whole, ctx.needs_input_grad, lambda: F.linear(x, weight))
        dx = None
        if how.dim is not None:
            dx, dy = _gathered_gradient(dy, weight, how, wants_input, wants_weight)
        elif wants_input:
            dx = dy.matmul(weight)
        return dx, _weight_gradient(dy, x) if wants_weight else None, None


def _gathered_gradient(
    dy: Tensor, weight: Tensor, how: _Row, wants_input: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor]:
    """``dx`` and ``dy`` of all tokens: the own tokens' ``dx`` is multiplied while the others' ``dy`` comes."""
    assert how.dim is not None
    if not (how.back.pieces and wants_input):
        gathered = all_gather(dy, how.group, how.dim, shard_sizes(how.total, how.group.size))
        return (gathered.matmul(weight) if wants_input else None), gathered
    sizes = _row_sizes(dy, how.dim, how.total, how.group)
    pieces = 1 if wants_weight else how.back.pieces  # all of dy is wanted in one tensor
    rows, by = _rows(dy, how.dim), carrier(how.group, how.back)
    dx, whole = gather_multiply(rows, weight.t(), None, how.group, sizes, pieces, by)
    return _like(dx, dy, how.dim), dy if whole is None else _like(whole, dy, how.dim)


# ---------------------------------------------------------------------------------------------------------------- common


def _composed(
    inputs: tuple[Tensor | None, ...], dy: Tensor, needed: tuple[bool, ...], forward: Callable[[], Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of ``forward()`` that autograd can follow, one for each input and None for what is not a tensor."""
    wanted = [t for t, need in zip(inputs, needed, strict=False) if need and t is not None]
    found = iter(torch.autograd.grad(forward(), wanted, dy, create_graph=True))
    grads = [next(found) if need and t is not None else None for t, need in zip(inputs, needed, strict=False)]
    return (*grads, *[None] * (len(needed) - len(inputs)))


def _partial_sums(x: Tensor, weight: Tensor, group: Group, dim: int | None, schedule: Schedule) -> Tensor:
    """``x W^T`` summed over the ranks in pieces; with ``dim``, this rank's tokens of the sum."""
    by = carrier(group, schedule)
    if dim is None:
        return multiply_reduce(_rows(x, 0), weight, group, schedule.pieces, by).view(*x.shape[:-1], -1)
    sizes = _row_sizes(x, dim, x.shape[dim], group)
    return _like(multiply_scatter(_rows(x, dim), weight, group, sizes, schedule.pieces, by), x, dim)


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).t().mm(x.flatten(0, -2)) if dy.dim() > 1 else dy.outer(x)


def _tracked(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))


def _tokens(shape: torch.Size, dim: int | None, total: int) -> int:
    tokens = math.prod(shape[:-1])
    return tokens if dim is None else math.prod(shape[:dim]) * total * math.prod(shape[dim + 1 : -1])


def _rows(x: Tensor, dim: int) -> Tensor:
    """``[..., K] -> [O, T, K]``: what lies before ``dim``, the tokens from ``dim`` on, the features."""
    return x.reshape(math.prod(x.shape[:dim]), math.prod(x.shape[dim:-1]), x.shape[-1])


def _row_sizes(x: Tensor, dim: int, total: int, group: Group) -> list[int]:
    """Each rank's share of T of :func:`_rows`, of ``total`` along ``dim``."""
    return [size * math.prod(x.shape[dim + 1 : -1]) for size in shard_sizes(total, group.size)]


def _like(rows: Tensor, x: Tensor, dim: int) -> Tensor:
    """``[O, T, N]`` back to the leading dims of ``x``, whatever its length along ``dim`` has become."""
    after = x.shape[dim + 1 : -1]
    return rows.view(*x.shape[:dim], rows.shape[1] // max(1, math.prod(after)), *after, rows.shape[2])
