"""Checks of dims and sizes that a collective makes before anything travels, whichever way it goes then."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError, choose

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


def checked_op(op: str, x: Tensor) -> None:
    """Raises UsageError: ``bad-option`` on an unknown reduce op, ``bad-dtype`` on an average of whole numbers."""
    choose("reduce op", str(op), REDUCE_OPS)
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):  # NCCL would cut it, gloo's way raise after the fact
        raise UsageError(f"an average of {x.dtype}", code="bad-dtype", fix="take the sum, or convert to a floating dtype")


def checked_dim(x: Tensor, dim: int) -> int:
    """``dim`` counted from the front. Raises UsageError (``bad-size``) when ``x`` has no such dim."""
    if not -x.dim() <= dim < x.dim():
        legal = f"use a dim from {-x.dim()} to {x.dim() - 1}" if x.dim() else "a scalar has no dims: unsqueeze it first"
        raise UsageError(f"dim {dim} of a tensor of shape {list(x.shape)}", code="bad-size", fix=legal)
    return dim % x.dim()


def checked_sizes(mine: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """Each rank's size along the joined dim; ``mine`` each where none are given. Raises UsageError (``bad-size``)."""
    if sizes is None:
        return [mine] * group.size
    if len(sizes) != group.size or sizes[group.rank] != mine or min(sizes) < 0:
        raise UsageError(
            f"sizes {list(sizes)} for {group.size} ranks, and this rank ({group.rank}) holds {mine}",
            code="bad-size",
            fix="give one size for each rank of the group, this rank's own included",
        )
    return list(sizes)


def checked_parts(total: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """How ``total`` elements are dealt to the ranks; evenly where no sizes are given. Raises UsageError (``bad-size``)."""
    if sizes is None:
        if total % group.size:
            raise UsageError(
                f"{total} elements cannot be dealt evenly to {group.size} ranks",
                code="bad-size",
                fix="give the sizes, for example crosscut.sharding.shard_sizes(total, tp)",
            )
        return [total // group.size] * group.size
    if len(sizes) != group.size or sum(sizes) != total or min(sizes) < 0:
        raise UsageError(
            f"sizes {list(sizes)} for {group.size} ranks and {total} elements",
            code="bad-size",
            fix="give one size for each rank; together they must make up the dim",
        )
    return list(sizes)


def checked_exchange(
    x: Tensor,
    group: Group,
    split_dim: int,
    concat_dim: int,
    send_sizes: Sequence[int] | None,
    recv_sizes: Sequence[int] | None,
) -> tuple[int, int, list[int], list[int]]:
    """The arguments of an all-to-all: both dims from the front, the parts of ``x`` and what comes. Raises UsageError
    (``bad-size``)."""
    split_dim, concat_dim = checked_dim(x, split_dim), checked_dim(x, concat_dim)
    if (send_sizes is None) != (recv_sizes is None) or (send_sizes is not None and split_dim != concat_dim):
        raise UsageError(
            f"send_sizes {send_sizes} and recv_sizes {recv_sizes} with split_dim {split_dim} and concat_dim {concat_dim}",
            code="bad-size",
            fix="give both sizes and one dim for splitting and joining, or neither for equal parts",
        )
    sent = checked_parts(x.shape[split_dim], group, send_sizes)
    return split_dim, concat_dim, sent, checked_sizes(sent[group.rank], group, recv_sizes)


def checked_place(x: Tensor, group: Group) -> None:
    """Refuse a tensor on another GPU than the group's: each rank has one. Raises UsageError (``bad-device``)."""
    if x.is_cuda and group.device.type == "cuda" and x.device != group.device:
        raise UsageError(
            f"a tensor on {x.device}, and rank {group.rank} of group {group.axis} works on {group.device}",
            code="bad-device",
            fix=f'move it with .to("{group.device}"), or make the mesh after torch.cuda.set_device({x.device.index})',
        )


def checked_out(x: Tensor, out: Tensor | None) -> None:
    """Refuse an ``out`` that is not like ``x``: a result would be broadcast into it, or cut to whole numbers, without a word.

    Raises UsageError: ``bad-shape``, ``bad-dtype``.
    """
    if out is None or out is x:
        return
    if out.shape != x.shape:
        raise UsageError(
            f"out of shape {list(out.shape)} for a result of shape {list(x.shape)}",
            code="bad-shape",
            fix="give out the shape of x",
        )
    if out.dtype != x.dtype:
        raise UsageError(f"out of {out.dtype} for a result of {x.dtype}", code="bad-dtype", fix="give out the dtype of x")
