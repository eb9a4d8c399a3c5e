"""The raw tier: collectives over any group, along any dim, uneven where the mathematics allows. No autograd here: what a
group of several ranks gives carries no gradient, whatever ``x`` does.

``all_reduce(x, group)`` returns the result; ``all_reduce.start(x, group)`` returns a Pending to ``wait()`` for (so for
every collective). A group of one never communicates. All ranks of the group make the same call with the same shapes
(uneven ones as ``sizes`` says). NCCL, gloo and rank threads run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from crosscut.collectives import compiled, fast
from crosscut.collectives.call import Plan, collective, plain_collective
from crosscut.collectives.checks import checked_dim, checked_exchange, checked_op, checked_out, checked_parts, checked_sizes
from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}

_CARRIED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
"""What both NCCL and gloo move as it is."""

# torch 2.13 renamed these two; 2.11 knows the old names alone
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@collective(fast.all_reduce, compiled.all_reduce)
def all_reduce(x: Tensor, group: Group, op: str = "sum", out: Tensor | None = None) -> Plan:
    """Every rank gets the element-wise reduction (sum, avg, max, min, prod) of all ranks' ``x``, any shape.

    ``out``: where the result goes; ``out=x`` reduces in place.
    Raises UsageError: ``bad-option`` on an unknown op, ``bad-dtype`` on an average of whole numbers, ``bad-shape`` or
    ``bad-dtype`` when ``out`` is not like ``x``.
    """
    checked_op(op, x)
    checked_out(x, out)
    if group.size == 1:
        return Plan(group, x, lambda: _into(x, out))
    buffer, in_place = _buffer(x, out)
    averaged = op == "avg" and group.backend != "nccl"

    def issue(send: Tensor, _: Tensor, async_op: bool) -> dist.Work | None:
        return dist.all_reduce(send, _OPS["sum" if averaged else op], group=group.process_group, async_op=async_op)

    def finish() -> Tensor:
        result = buffer.div_(group.size) if averaged else buffer
        return x if in_place else _landed(result, out)

    return Plan(group, buffer, finish, issue, detail=op, kernels=partial(fast.all_reduce, op=op))


@collective(fast.all_gather, compiled.all_gather)
def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Plan:
    """Every rank gets all ranks' ``x`` joined along ``dim``, in the order of the ranks.

    ``sizes``: each rank's size along ``dim`` when they differ (the other dims must not).
    Raises UsageError (``bad-size``) on a dim that is not there or sizes that do not fit.
    """
    dim = checked_dim(x, dim)
    sizes = checked_sizes(x.shape[dim], group, sizes)
    if group.size == 1:
        return Plan(group, x, lambda: x)
    padded = _pad(x, dim, max(sizes))
    whole = torch.empty((group.size * padded.shape[0], *padded.shape[1:]), dtype=x.dtype, device=x.device)

    def issue(send: Tensor, receive: Tensor, async_op: bool) -> dist.Work | None:
        return all_gather_single(_carried(receive), _carried(send), group=group.process_group, async_op=async_op)

    def finish() -> Tensor:
        stacked = whole.view(group.size, *padded.shape)
        if len(set(sizes)) > 1:
            return torch.cat([part.narrow(dim, 0, size) for part, size in zip(stacked, sizes, strict=True)], dim)
        return stacked.movedim(0, dim).flatten(dim, dim + 1)  # a view where nothing lies before dim, else one copy

    return Plan(group, padded, finish, issue, whole, f"dim {dim}", fast.all_gather_into)


@collective(fast.reduce_scatter, compiled.reduce_scatter)
def reduce_scatter(x: Tensor, group: Group, dim: int = 0, op: str = "sum", sizes: Sequence[int] | None = None) -> Plan:
    """Rank r gets the r-th part along ``dim`` of the element-wise reduction (sum, avg, max, min, prod) of all ranks' ``x``.

    ``sizes``: the parts when they are not equal; they must add up to ``x.shape[dim]``.
    Raises UsageError: ``bad-size`` when the dim is not there or cannot be dealt, ``bad-option`` on an unknown op,
    ``bad-dtype`` on an average of whole numbers.
    """
    checked_op(op, x)
    dim = checked_dim(x, dim)
    parts = checked_parts(x.shape[dim], group, sizes)
    if group.size == 1:
        return Plan(group, x, lambda: x)
    stacked = _stack(x, dim, parts)
    mine = torch.empty((len(stacked) // group.size, *stacked.shape[1:]), dtype=x.dtype, device=x.device)
    averaged = op == "avg" and group.backend != "nccl"

    def issue(send: Tensor, receive: Tensor, async_op: bool) -> dist.Work | None:
        reduce_op = _OPS["sum" if averaged else op]
        return reduce_scatter_single(receive, send, op=reduce_op, group=group.process_group, async_op=async_op)

    def finish() -> Tensor:
        part = mine.narrow(dim, 0, parts[group.rank])
        return part.div_(group.size) if averaged else part

    return Plan(group, stacked, finish, issue, mine, f"{op}, dim {dim}", partial(fast.reduce_scatter_into, op=op))


@collective(fast.broadcast, compiled.broadcast)
def broadcast(x: Tensor, group: Group, src: int = 0, out: Tensor | None = None) -> Plan:
    """Every rank gets the ``x`` of rank ``src`` of the group. ``out=x`` overwrites in place.

    Raises UsageError: ``bad-option`` when ``src`` is not a rank of the group, ``bad-shape`` or ``bad-dtype`` when ``out`` is
    not like ``x``.
    """
    _peer("src", src, group)
    checked_out(x, out)
    if group.size == 1:
        return Plan(group, x, lambda: _into(x, out))
    buffer, in_place = _buffer(x, out)

    def issue(send: Tensor, _: Tensor, async_op: bool) -> dist.Work | None:
        return dist.broadcast(_carried(send), src=group.ranks[src], group=group.process_group, async_op=async_op)

    def finish() -> Tensor:
        return x if in_place else _landed(buffer, out)

    return Plan(group, buffer, finish, issue, detail=f"src {src}", kernels=partial(fast.broadcast, src=src))


@collective(fast.all_to_all, compiled.all_to_all)
def all_to_all(
    x: Tensor,
    group: Group,
    split_dim: int = 0,
    concat_dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> Plan:
    """Rank r gets the r-th part along ``split_dim`` of each rank's ``x``, joined along ``concat_dim``.

    ``send_sizes``: the parts of ``x`` when they are not equal; ``recv_sizes``: what each rank sends here. Uneven sizes
    need both, and one dim for splitting and joining, since each rank must know what comes.
    Raises UsageError (``bad-size``) when a dim is not there or sizes do not fit.
    """
    split_dim, concat_dim, sent, got = checked_exchange(x, group, split_dim, concat_dim, send_sizes, recv_sizes)
    if group.size == 1:
        return Plan(group, x, lambda: x)
    source = _dense(x.movedim(split_dim, 0))
    target = torch.empty((sum(got), *source.shape[1:]), dtype=x.dtype, device=x.device)

    def issue(send: Tensor, receive: Tensor, async_op: bool) -> dist.Work | None:
        ranks = group.process_group
        return dist.all_to_all_single(_carried(receive), _carried(send), got, sent, group=ranks, async_op=async_op)

    def finish() -> Tensor:
        if split_dim == concat_dim:
            return target.movedim(0, split_dim)
        return torch.cat([part.movedim(0, split_dim) for part in target.split(got)], concat_dim)

    kernels = fast.all_to_all_into if send_sizes is None else None  # given, they may be even on this rank alone
    return Plan(group, source, finish, issue, target, f"dims {split_dim}, {concat_dim}", kernels)


@plain_collective
def send(x: Tensor, group: Group, dst: int, tag: int = 0) -> Plan:
    """Send ``x`` to rank ``dst`` of the group, which must ``recv`` the same shape and dtype. Returns ``x``.

    Raises UsageError (``bad-option``) when ``dst`` is this rank or not in the group.
    """
    _peer("dst", dst, group, not_me=True)

    def issue(buffer: Tensor, _: Tensor, async_op: bool) -> dist.Work | None:
        return dist.isend(_carried(buffer), dst=group.ranks[dst], group=group.process_group, tag=tag)

    return Plan(group, _dense(x), lambda: x, issue, target=x.new_empty(0), detail=f"dst {dst}")  # nothing comes back


@plain_collective
def recv(out: Tensor, group: Group, src: int, tag: int = 0) -> Plan:
    """Receive into ``out`` what rank ``src`` of the group sends, and return it.

    Raises UsageError (``bad-option``) when ``src`` is this rank or not in the group.
    """
    _peer("src", src, group, not_me=True)
    buffer = out if _as_it_lies(out) else torch.empty_like(out, memory_format=torch.contiguous_format)

    def issue(receive: Tensor, _: Tensor, async_op: bool) -> dist.Work | None:
        return dist.irecv(_carried(receive), src=group.ranks[src], group=group.process_group, tag=tag)

    return Plan(group, buffer, lambda: out if out is buffer else out.copy_(buffer), issue, detail=f"src {src}")


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    group: Group,
    eps: float = 1e-5,
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """What follows a row-parallel multiply: ``z = residual + sum over ranks of x + bias``, and its norm. Returns (norm, z).

    ``x, residual [..., H]``, ``weight, bias, norm_bias [H]``. RMSNorm (arXiv 1910.07467) or, with ``layer_norm``,
    LayerNorm (arXiv 1607.06450). One kernel where crosscut's serve, else an all-reduce and torch's own operations; each
    step is rounded to the dtype in both. Carries no gradient.
    Raises UsageError (``bad-shape``) when the shapes do not fit.
    """
    hidden = x.shape[-1:]
    if not hidden or residual.shape != x.shape or any(t is not None and t.shape != hidden for t in (weight, bias, norm_bias)):
        raise UsageError(
            f"x {list(x.shape)}, residual {list(residual.shape)} and weights {list(weight.shape)} do not fit",
            code="bad-shape",
            fix="x needs a dim, residual must have x's shape, and weight, bias and norm_bias the size of its last dim",
        )
    if torch.compiler.is_dynamo_compiling() and group.size > 1:
        return compiled.all_reduce_norm(x, residual, weight, group, eps, bias, norm_bias, layer_norm)
    fused = fast.all_reduce_norm(x, residual, weight, group, eps, bias, norm_bias, layer_norm)
    if fused is not None:
        return fused
    with torch.no_grad():
        y = all_reduce(x, group)
        z = residual + (y if bias is None else y + bias)
        if layer_norm:
            return F.layer_norm(z, hidden, weight, norm_bias, eps), z
        normed = F.rms_norm(z, hidden, weight, eps)
        return (normed if norm_bias is None else normed + norm_bias), z


def all_agree(group: Group, mine: bool) -> bool:
    """Whether ``mine`` holds on every rank. A collective call."""
    return bool(all_reduce(torch.tensor([int(mine)], device=group.device), group, "min").item())


def barrier(group: Group) -> None:
    """Return when every rank of the group has come here and, on GPUs, the work queued before it is done.

    Raises CollectiveTimeout (``rank-timeout``) when one does not come, and what the library raises then.
    """
    if group.size > 1:
        all_reduce(torch.zeros(1, device=group.device), group).item()
        fast.check(group)


def _as_it_lies(x: Tensor) -> bool:
    """Whether the memory of ``x`` holds its elements, dense and in order: torch conjugates and negates lazily."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _carried(x: Tensor) -> Tensor:
    """``x``, which is dense, as what NCCL and gloo can move: they refuse some dtypes, such as int16, but nobody's bytes."""
    return x if x.dtype in _CARRIED else x.unsqueeze(-1).view(torch.uint8)


def _dense(x: Tensor) -> Tensor:
    """``x`` as it can be sent, without its gradient; no copy where none is due."""
    bare = x.detach() if x.requires_grad else x
    return bare if _as_it_lies(x) else bare.resolve_conj().resolve_neg().contiguous()


def _buffer(x: Tensor, out: Tensor | None) -> tuple[Tensor, bool]:
    """What is sent and overwritten, and whether that is the memory of ``x`` itself: where that is asked for, and possible.

    Without its gradient: a copy of ``x`` that the ranks overwrite would hand on one that nobody has summed.
    """
    in_place = out is x and _as_it_lies(x)
    bare = x.detach() if x.requires_grad else x
    return (bare if in_place else bare.clone(memory_format=torch.contiguous_format)), in_place


def _landed(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _into(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return x.clone()
    return out if out is x else out.copy_(x)


def _stack(x: Tensor, dim: int, parts: list[int]) -> Tensor:
    """The parts of ``x`` along ``dim`` one after the other, each padded to the longest; no copy where none is due."""
    if len(set(parts)) == 1:
        stacked = _dense(x.unflatten(dim, (len(parts), parts[0])).movedim(dim, 0))
    else:
        stacked = torch.stack([_pad(part, dim, max(parts)) for part in x.split(parts, dim)])
    return stacked.flatten(0, 1)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with room after it along ``dim`` up to ``size``, contiguous. What stands there is nobody's and is cut off again."""
    if x.shape[dim] == size:
        return _dense(x)
    shape = list(x.shape)
    shape[dim] = size
    padded = x.new_empty(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x.detach())
    return padded


def _peer(what: str, rank: int, group: Group, not_me: bool = False) -> None:
    if not 0 <= rank < group.size or (not_me and rank == group.rank):
        others = [r for r in range(group.size) if not (not_me and r == group.rank)]
        raise UsageError(
            f"{what} {rank} in a group of {group.size}, seen from rank {group.rank}",
            code="bad-option",
            fix=f"use one of the group's ranks: {others}",
        )
