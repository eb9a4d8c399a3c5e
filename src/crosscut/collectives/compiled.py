"""Collectives inside ``torch.compile``: opaque operators of ``torch.library``, one for each collective.

Dynamo cannot look into a kernel launch or a process group, so under compilation a call becomes one node,
``crosscut::all_reduce(x, op, group)``. The operators are functional: nothing is written in place, no result is a view of
an input. They take no Python objects: ``group`` is a handle (see :func:`crosscut.distributed.mesh.live_group`). All that
the shape of a result depends on is an argument too, so tracing asks no group. When the compiled code runs, the operator
makes the same eager call as everybody else, kernels and observer included.

All ranks must exchange in one order, and a compiler may reorder what does not depend on each other, on each rank as its own
shapes suggest. So the operators are registered as having an ordered effect: they stay in the order of the program, and one
whose result nobody uses stays too.

Gradients: the dual pairs of ``autograd.py`` are autograd functions, which Dynamo traces; their collectives become these
operators in forward and backward alike. The raw tier carries no gradient here either: the operators get detached tensors,
because an operator without a rule for autograd would lose a gradient and only warn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op  # torch has no public name for it

from crosscut.collectives.checks import checked_dim, checked_exchange, checked_op, checked_out, checked_parts, checked_sizes
from crosscut.distributed.mesh import Group, live_group


def _eager() -> Any:
    """The collectives themselves, whose module imports this one."""
    from crosscut.collectives import functional

    return functional


def _operator(schema: str, real: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    """``crosscut::NAME`` with its body on CPU and CUDA, and ``shape``, which only makes empty results."""
    name = f"crosscut::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, ("cpu", "cuda"), real)
    torch.library.register_fake(name, shape)
    operator = getattr(torch.ops.crosscut, name.partition("::")[2]).default
    _register_effectful_op(operator, _EffectType.ORDERED)
    return operator


def _with(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


_all_reduce = _operator(
    "all_reduce(Tensor x, str op, str group) -> Tensor",
    lambda x, op, group: _eager().all_reduce(x, live_group(group), op),
    lambda x, op, group: x.new_empty(x.shape),
)
_all_gather = _operator(
    "all_gather(Tensor x, int dim, SymInt[] sizes, str group) -> Tensor",
    lambda x, dim, sizes, group: _eager().all_gather(x, live_group(group), dim, sizes).contiguous(),
    lambda x, dim, sizes, group: _with(x, dim, sum(sizes)),
)
_reduce_scatter = _operator(
    "reduce_scatter(Tensor x, int dim, str op, SymInt[] sizes, int rank, str group) -> Tensor",
    lambda x, dim, op, sizes, rank, group: _eager().reduce_scatter(x, live_group(group), dim, op, sizes).contiguous(),
    lambda x, dim, op, sizes, rank, group: _with(x, dim, sizes[rank]),
)
_broadcast = _operator(
    "broadcast(Tensor x, int src, str group) -> Tensor",
    lambda x, src, group: _eager().broadcast(x, live_group(group), src),
    lambda x, src, group: x.new_empty(x.shape),
)
_all_to_all = _operator(
    "all_to_all(Tensor x, int split, int join, SymInt[] sent, SymInt[] got, str group) -> Tensor",
    lambda x, split, join, sent, got, group: _exchanged(x, split, join, sent, got, live_group(group)),
    lambda x, split, join, sent, got, group: _exchanged_shape(x, split, join, sent, got),
)
_all_reduce_norm = _operator(
    "all_reduce_norm(Tensor x, Tensor residual, Tensor weight, float eps, Tensor? bias, Tensor? norm_bias, bool layer_norm, "
    "str group) -> (Tensor, Tensor)",
    lambda x, residual, weight, eps, bias, norm_bias, layer_norm, group: _eager().all_reduce_norm(
        x, residual, weight, live_group(group), eps, bias, norm_bias, layer_norm
    ),
    lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape)),
)


def _exchanged(x: Tensor, split: int, join: int, sent: list[int], got: list[int], group: Group) -> Tensor:
    sizes = (sent, got) if got else (None, None)
    return _eager().all_to_all(x, group, split, join, *sizes).contiguous()


def _exchanged_shape(x: Tensor, split: int, join: int, sent: list[int], got: list[int]) -> Tensor:
    if split == join:
        return _with(x, split, sum(got or sent))
    shape = list(x.shape)
    shape[split], shape[join] = sent[0], shape[join] * len(sent)
    return x.new_empty(shape)


# ---------------------------------------------------------------------------- what a call becomes while Dynamo traces it


def all_reduce(x: Tensor, group: Group, op: str = "sum", out: Tensor | None = None) -> Tensor:
    """As functional.all_reduce."""
    checked_op(op, x)
    return _landed(x if group.size == 1 else _all_reduce(x.detach(), op, group.handle), x, out)


def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """As functional.all_gather."""
    dim = checked_dim(x, dim)
    sizes = checked_sizes(x.shape[dim], group, sizes)
    return x if group.size == 1 else _all_gather(x.detach(), dim, sizes, group.handle)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, op: str = "sum", sizes: Sequence[int] | None = None) -> Tensor:
    """As functional.reduce_scatter."""
    checked_op(op, x)
    dim = checked_dim(x, dim)
    sizes = checked_parts(x.shape[dim], group, sizes)
    return x if group.size == 1 else _reduce_scatter(x.detach(), dim, op, sizes, group.rank, group.handle)


def broadcast(x: Tensor, group: Group, src: int = 0, out: Tensor | None = None) -> Tensor:
    """As functional.broadcast."""
    return _landed(x if group.size == 1 else _broadcast(x.detach(), src, group.handle), x, out)


def all_to_all(
    x: Tensor,
    group: Group,
    split_dim: int = 0,
    concat_dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> Tensor:
    """As functional.all_to_all."""
    split_dim, concat_dim, sent, got = checked_exchange(x, group, split_dim, concat_dim, send_sizes, recv_sizes)
    got = [] if recv_sizes is None else got  # all ranks must know that none are given: even ones can be so on one alone
    return x if group.size == 1 else _all_to_all(x.detach(), split_dim, concat_dim, sent, got, group.handle)


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    group: Group,
    eps: float,
    bias: Tensor | None,
    norm_bias: Tensor | None,
    layer_norm: bool,
) -> tuple[Tensor, Tensor]:
    """As functional.all_reduce_norm."""
    x, residual, weight = x.detach(), residual.detach(), weight.detach()
    bias, norm_bias = (None if t is None else t.detach() for t in (bias, norm_bias))
    normed, z = _all_reduce_norm(x, residual, weight, eps, bias, norm_bias, layer_norm, group.handle)
    return normed, z


def _landed(result: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """The result where the eager call would leave it: new memory, or ``out``."""
    if out is not None:
        checked_out(x, out)
        return out.copy_(result)
    return result.clone() if result is x else result
