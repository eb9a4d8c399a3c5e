"""What the modules of a Hugging Face model become when it is split: the same objects, with a part of their parameters.

A module keeps its identity, its name, its attributes and the names and layouts of its parameters, and changes its class: a
linear layer becomes a column or row layer of crosscut, a norm or a set of experts becomes its own class with what a split
adds in front. What was changed is noted in the module, and :func:`restore` undoes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from crosscut.collectives import copy_to_tp, reduce_from_tp
from crosscut.distributed.mesh import Group
from crosscut.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from crosscut.layers.matmul import linear
from crosscut.layers.shards import take
from crosscut.sharding import Cut
from crosscut.sharding.heads import HeadCut


class _Absent:
    """What an attribute was that was not there; a class, because that is itself in a deep copy."""


@dataclass
class Before:
    """What a module was: its class, and the values of the attributes that were changed since."""

    cls: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)


def change(module: nn.Module, cls: type[nn.Module] | None = None, /, **attributes: Any) -> None:
    """Give ``module`` another class (None: keep it) and ``attributes``, and note what was there before."""
    before: Before = module.__dict__.setdefault("_before", Before(type(module)))
    for name, value in attributes.items():
        before.attributes.setdefault(name, getattr(module, name, _Absent))
        setattr(module, name, value)
    if cls is not None:
        module.__class__ = cls


def restore(module: nn.Module) -> None:
    """Undo every :func:`change`."""
    before: Before | None = module.__dict__.pop("_before", None)
    if before is None:
        return
    module.__class__ = before.cls
    for name, value in before.attributes.items():
        delattr(module, name) if value is _Absent else setattr(module, name, value)


def cut_parameters(
    module: nn.Module, cuts: dict[str, Cut], group: Group, device: torch.device, done: dict[int, nn.Parameter]
) -> None:
    """Replace the parameters of ``module`` that are cut by this rank's shards, on ``device`` unless they are meta.

    ``done``: shards by the id of what they were cut from, so that tied parameters stay one.
    """
    shapes = {name: tuple(module.get_parameter(name).shape) for name in cuts}
    change(module, cuts=cuts, shapes=shapes, group=group)
    for name, cut in cuts.items():
        whole = module.get_parameter(name)
        if cut.dim is None:
            continue
        if id(whole) not in done:
            shard = take(whole.detach(), cut, group.size, group.rank)
            done[id(whole)] = nn.Parameter(shard if shard.is_meta else shard.to(device), whole.requires_grad)
        setattr(module, name, done[id(whole)])


@dataclass(frozen=True)
class SharedRows:
    """The rows of this rank's shard (KV heads) that other ranks hold too, and their places among all shared rows."""

    dim: int
    places: tuple[tuple[int, int], ...]
    """(start in the shard, start among the shared rows), by head."""
    head_dim: int
    total: int

    @classmethod
    def of(cls, cut: Cut, group: Group) -> SharedRows | None:
        """None where no rank shares a row with another."""
        if not isinstance(cut, HeadCut) or cut.dim is None or not cut.heads.kv_replicated(group.size):
            return None
        held = [[h for run in cut.head_runs(group.size, r) for h in range(run.start, run.stop)] for r in range(group.size)]
        counts = Counter(h for ranks in held for h in ranks)
        place = {h: i for i, h in enumerate(sorted(h for h, count in counts.items() if count > 1))}
        d = cut.heads.head_dim
        own = [(i * d, place[h] * d) for i, h in enumerate(held[group.rank]) if h in place]
        return cls(cut.dim, tuple(own), d, len(place) * d) if place else None


class _SumShared(Function):
    """Identity whose backward sums the gradient of shared rows over the ranks that hold them. All ranks take part."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: SharedRows, group: Group) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows: SharedRows = ctx.rows
        total = grad.new_zeros((*grad.shape[: rows.dim], rows.total, *grad.shape[rows.dim + 1 :]))
        for here, there in rows.places:
            total.narrow(rows.dim, there, rows.head_dim).copy_(grad.narrow(rows.dim, here, rows.head_dim))
        total = reduce_from_tp(total, ctx.group, True)
        grad = grad.clone()
        for here, there in rows.places:
            grad.narrow(rows.dim, here, rows.head_dim).copy_(total.narrow(rows.dim, there, rows.head_dim))
        return grad, None, None


def _summed(parameter: Tensor, rows: SharedRows | None, group: Group) -> Tensor:
    if rows is None or not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    shard: Tensor = _SumShared.apply(parameter, rows, group)
    return shard


class SharedInput:
    """What column layers side by side (q, k and v; gate and up) are given: one exchange of its gradient serves them all."""

    def __init__(self, layers: int) -> None:
        self.layers, self.left = layers, 0
        self.x: Tensor | None = None
        self.copy: Tensor | None = None

    def enter(self, x: Tensor, group: Group) -> Tensor:
        """``x`` behind the exchange; the last of the layers lets go of it."""
        if x is not self.x:
            self.x, self.copy, self.left = x, copy_to_tp(x, group), self.layers
        copy, self.left = self.copy, self.left - 1
        if not self.left:
            self.x = self.copy = None
        assert copy is not None
        return copy


class SplitColumn(ColumnParallelLinear):
    """A linear layer or Conv1D by output features: :class:`ColumnParallelLinear`, and gradients of shared rows summed."""

    transposed: bool
    shared: dict[str, SharedRows]
    shared_input: SharedInput | None

    def forward(self, x: Tensor, total_tokens: int | None = None) -> Tensor:
        """``x [T, H] -> y [T, F/tp]``, or ``[T, F]`` where the output is gathered."""
        if not (torch.is_grad_enabled() or self.gather_output):  # nothing but a multiply: a token's time is mostly Python
            return linear(x, *self._own())
        if self.shared_input is not None and x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return F.linear(self.shared_input.enter(x, self.group), *self._own())
        return super().forward(x, total_tokens)

    def _own(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super()._own()
        if self.shared and torch.is_grad_enabled():
            weight = _summed(weight, self.shared["weight"], self.group)
            bias = None if bias is None else _summed(bias, self.shared["bias"], self.group)
        return (weight.t(), bias) if self.transposed else (weight, bias)


class SplitRow(RowParallelLinear):
    """A linear layer or Conv1D by input features: :class:`RowParallelLinear`."""

    transposed: bool

    def _own(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super()._own()
        return (weight.t(), bias) if self.transposed else (weight, bias)


class SplitEmbedding(VocabParallelEmbedding, nn.Embedding):  # type: ignore[misc]
    """The base under an embedding of Hugging Face's own, whose forward scales what this one looks up."""


class LatentDown(nn.Module):
    """MLA's replicated projection to the latents, whose last ``tail`` outputs all ranks' heads use: gradient summed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    group: Group
    tail: int

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H] -> [T, R + tail]``."""
        y = F.linear(x, self.weight, self.bias)
        if not (y.requires_grad and torch.is_grad_enabled()):
            return y
        latent, tail = y.split([y.shape[-1] - self.tail, self.tail], -1)
        return torch.cat([latent, copy_to_tp(tail, self.group)], -1)


class PartialNorm:
    """In front of a norm's own class, on a rank that sees its own heads alone: gradients of the parameters are summed."""

    group: Group
    partial: bool
    """Whether the parameters are whole on every rank, rather than cut by heads."""
    shared: dict[str, SharedRows]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm's own forward, given parameters whose gradients are summed."""
        if not torch.is_grad_enabled() or not (self.partial or self.shared):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        own: dict[str, nn.Parameter | None] = self.__dict__["_parameters"]
        self.__dict__["_parameters"] = {name: None if p is None else self._whole(name, p) for name, p in own.items()}
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.__dict__["_parameters"] = own

    def _whole(self, name: str, parameter: Tensor) -> Tensor:
        if self.partial:
            return copy_to_tp(parameter, self.group)
        return _summed(parameter, self.shared.get(name), self.group)


class WideNorm(nn.Module):
    """RMS norm over all heads of all ranks together (OLMo 2): ``x [B, S, N*D/tp]``, weight ``[N*D/tp]``.

    The mean of squares is a sum over the ranks, in which a KV head that several ranks hold counts once.
    """

    weight: nn.Parameter
    group: Group
    variance_epsilon: float
    counted_from: int
    """Features from here on are counted by this rank; those before by another."""
    features: int
    """Of all ranks."""
    shared: dict[str, SharedRows]

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, N*D/tp]`` to the same, computed in float32 as transformers does."""
        wide = x.to(torch.float32)
        squares = reduce_from_tp(wide[..., self.counted_from :].pow(2).sum(-1, keepdim=True), self.group, True)
        mean = copy_to_tp(squares, self.group) / self.features
        weight = _summed(self.weight, self.shared.get("weight"), self.group)
        return (weight * (wide * torch.rsqrt(mean + self.variance_epsilon))).to(x.dtype)


class SplitExperts:
    """In front of the class of a layer's experts: each rank computes a part of every expert, and the sum is the output."""

    group: Group

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``x [T, H]``, who computes what ``[T, k]``, with which weight ``[T, k]`` -> ``[T, H]``."""
        x, weights = copy_to_tp(hidden_states, self.group), copy_to_tp(top_k_weights, self.group)
        return reduce_from_tp(super().forward(x, top_k_index, weights), self.group, True)  # type: ignore[misc]


class OnePerQuery:
    """In front of a projection's class: K and V come out once for each query head, where groups are not equally large.

    ``order``: which of the heads that the projection gives comes where; ``head_dim`` None: they have a dim of their own.
    """

    order: tuple[int, ...]
    head_dim: int | None
    orders: dict[torch.device, Tensor]

    def forward(self, *args: Any) -> Tensor:
        """The projection's output with its heads in ``order``."""
        y: Tensor = super().forward(*args)  # type: ignore[misc]
        order = self.orders.get(y.device)
        if order is None:
            with torch.inference_mode(False):  # it serves training too
                order = self.orders[y.device] = torch.tensor(self.order, device=y.device)
        if self.head_dim is None:
            return y.index_select(-2, order)
        return y.unflatten(-1, (-1, self.head_dim)).index_select(-2, order).flatten(-2)


class LocalConfig:
    """A model's config as one module of a rank sees it: some sizes are the rank's own, all else is the model's."""

    def __init__(self, whole: Any, **own: Any) -> None:
        self.__dict__.update(own, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_whole"], name)


class _Kept:
    """The class of a split module that pickle or copy takes apart: copied as itself, and refused as its group is."""

    def __init__(self, cls: type[Any], group: Group) -> None:
        self.cls, self.group = cls, group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self.group.__reduce__()


def _again(kept: _Kept) -> Any:
    return object.__new__(kept.cls)


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    group = module.__dict__.get("group") or module.mesh.tp
    return _again, (_Kept(type(module), group),), module.__dict__


def _mix(front: type, cls: Any) -> type[Any]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce_ex__": _reduce}
    return type(cls.__name__, (front, cls), names)


mixed: Callable[[type, Any], type[Any]] = cache(_mix)
"""``mixed(front, cls)``: ``cls`` with ``front`` before it, under the name and module of ``cls``; the same at every call."""
