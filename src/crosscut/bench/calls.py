"""The calls that are timed, and what each must give: a layer's forward alone, or its forward and backward.

A :class:`Work` is a layer at one size: what it computes, its input and whole weights, and for a backward the gradient of its
output. From it come :class:`Way` s: :func:`by_hand`, from plain functions over shards, and :func:`by_module`, from the
layers of crosscut. Every output of a call (the result; with a backward also the gradients of the input and of each
parameter) has a counterpart in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from crosscut.bench.timing import Call, copies
from crosscut.distributed.mesh import Group, Mesh
from crosscut.layers.replicas import placed_parameters
from crosscut.layers.shards import take
from crosscut.sharding import Cut, Replicated, shard_range

Weights = Mapping[str, Tensor]
Compute = Callable[[Tensor, Weights], Tensor]
"""A layer as a function of its input and its weights by name."""
Place = Callable[[Tensor], Tensor]
"""From a whole tensor to what this rank holds of it."""


class Way(NamedTuple):
    """Calls over different copies of the weights, what each must give in float64 (nothing: not checked), and the
    parameters of the first copy.
    """

    calls: list[Call]
    expected: list[Tensor]
    parameters: Sequence[Tensor]


Ways = dict[str, Callable[[], Way]]
"""By the name of an implementation, what builds its calls."""


class Problem(Protocol):
    """A layer at one size, as the benches see it."""

    @property
    def subject(self) -> str:
        """What the record calls it: linear, mlp or block."""

    @property
    def kind(self) -> str:
        """How it is split: column, row, pair or block."""

    @property
    def shape(self) -> dict[str, int]:
        """The record's shape of it."""

    @property
    def x(self) -> Tensor:
        """The whole input."""

    def exchange(self) -> tuple[str, int, int]:
        """The collective that the split needs, with the rows and the width of the whole tensor."""

    def ways(self, mesh: Mesh, against: Sequence[str], backward: bool) -> Ways:
        """Every implementation that can do this size."""

    def build(self, mesh: Mesh, sequence_parallel: bool = False) -> nn.Module:
        """crosscut's layer for it, on the meta device."""


class Reference(NamedTuple):
    """What a layer gives in float64, from the same values; gradients only where there is a backward."""

    y: Tensor
    dx: Tensor | None
    grads: dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """``compute`` of ``x`` and ``weights``, all whole. ``dy``: the gradient of the output, None for the forward alone."""

    compute: Compute
    x: Tensor
    weights: Weights
    dy: Tensor | None = None

    @cached_property
    def reference(self) -> Reference:
        """Everything that the layer gives, in float64."""
        backward = self.dy is not None
        x, w = _leaf(self.x.double(), backward), {name: _leaf(t.double(), backward) for name, t in self.weights.items()}
        with torch.set_grad_enabled(backward):
            y, *grads = outputs(
                lambda x: self.compute(x, w), x, list(w.values()), None if self.dy is None else self.dy.double()
            )
        return Reference(y, grads[0] if grads else None, dict(zip(w, grads[1:], strict=False)))

    def expected(self, grads: Sequence[Tensor], own_y: Place, own_x: Place) -> list[Tensor]:
        """This rank's part of the reference, in the order of :func:`outputs`."""
        y, dx, _ = self.reference
        return [own_y(y)] if dx is None else [own_y(y), own_x(dx), *grads]


def outputs(fn: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> tuple[Tensor, ...]:
    """What one call gives: ``y``, and with ``dy`` the gradients of ``x`` and of each parameter."""
    y = fn(x)
    if dy is None:
        return (y,)
    return (y.detach(), *(_local(grad) for grad in torch.autograd.grad(y, (x, *parameters), dy)))


def whole(t: Tensor) -> Tensor:
    """The place of what every rank holds all of."""
    return t


def own(group: Group, dim: int) -> Place:
    """The place of what is dealt to the ranks along ``dim``."""

    def part(t: Tensor) -> Tensor:
        mine = shard_range(t.shape[dim], group.size, group.rank)
        return t.narrow(dim, mine.start, mine.stop - mine.start).clone(memory_format=torch.contiguous_format)

    return part


def by_hand(work: Work, group: Group, compute: Compute, cuts: Mapping[str, Cut] | None = None, own_x: Place = whole) -> Way:
    """``compute`` over this rank's shards as ``cuts`` says (None: over the whole weights, as one device would).

    A replicated bias is added once: it is the first rank's alone.
    """
    cuts = dict.fromkeys(work.weights, Replicated()) if cuts is None else cuts
    names = [n for n in work.weights if not (n.endswith(".bias") and cuts[n].dim is None and group.rank and group.size > 1)]

    def shards(tensors: Weights) -> dict[str, Tensor]:
        return {name: take(tensors[name], cuts[name], group.size, group.rank) for name in names}

    sets = [
        {name: _leaf(shard, work.dy is not None) for name, shard in shards(work.weights).items()}
        for _ in range(copies(sum(t.nbytes for t in shards(work.weights).values()), work.x.device))
    ]
    grads = list(shards(work.reference.grads).values()) if work.dy is not None else []
    fns = [(lambda x, w=w: compute(x, w), list(w.values())) for w in sets]
    return way_of(work, fns, grads, whole, own_x)


def by_module(
    work: Work,
    mesh: Mesh,
    build: Callable[[], nn.Module],
    place: Place = whole,
    own_x: Place | None = None,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
    packed: Callable[[Weights], Weights] = lambda weights: weights,
    silent: bool = False,
) -> Way:
    """A layer of crosscut. ``build`` makes it on the meta device; ``packed`` gives the whole weights under its names.

    ``place``: of the output, and of the input too unless ``own_x`` says otherwise. ``silent``: the same local work on this
    rank's shards without any exchange, the floor of every split; what it gives is not the layer's, and not checked.
    """
    weights, group, device = packed(work.weights), mesh.tp, work.x.device
    built = [sharded(build(), weights, group, device)]
    nbytes = sum(parameter.nbytes for parameter in built[0].parameters())
    built += [sharded(build(), weights, group, device) for _ in range(copies(nbytes, device) - 1)]
    for module in built:
        module.requires_grad_(work.dy is not None)
        if silent:
            _silence(module, device)
    grads = []
    if work.dy is not None and not silent:
        of = packed(work.reference.grads)
        grads = [take(of[p.name], p.cut, group.size, group.rank) for p in placed_parameters(built[0])]
    fns = [(lambda x, m=m: call(m, x), list(m.parameters())) for m in built]
    way = way_of(work, fns, grads, place, place if own_x is None else own_x)
    return way._replace(expected=[]) if silent else way


def way_of(
    work: Work,
    fns: Sequence[tuple[Callable[[Tensor], Tensor], Sequence[Tensor]]],
    grads: Sequence[Tensor],
    own_y: Place,
    own_x: Place,
) -> Way:
    """Calls of ``fns``, each with its parameters; ``grads``: what the parameters' gradients must be."""
    x, dy = own_x(work.x), None if work.dy is None else own_y(work.dy)
    x = _leaf(x, dy is not None)
    calls: list[Call] = [lambda fn=fn, ps=ps: outputs(fn, x, ps, dy) for fn, ps in fns]  # type: ignore[misc]
    return Way(calls, work.expected(grads, own_y, own_x), fns[0][1])


def sharded(module: nn.Module, weights: Weights, group: Group, device: torch.device) -> nn.Module:
    """``module``, made on the meta device, with this rank's part of the whole ``weights``."""
    module.to_empty(device=device)
    with torch.no_grad():
        for placed in placed_parameters(module):
            placed.local.copy_(take(weights[placed.name], placed.cut, group.size, group.rank))
    return module


def alone(device: torch.device) -> Mesh:
    """A mesh of one, whatever ranks there are: crosscut's layers on it are unsplit."""
    tp, dp = (Group(axis, 0, 1, (0,), "none", device) for axis in ("tp", "dp"))
    return Mesh(tp=tp, dp=dp, device=device)


def _silence(module: nn.Module, device: torch.device) -> None:
    """Replace every group of ranks in ``module`` by a group of one, so that nothing is exchanged."""
    for part in module.modules():
        if hasattr(part, "group"):
            part.group = alone(device).tp  # type: ignore[assignment]


def _leaf(t: Tensor, tracked: bool) -> Tensor:
    return t.detach().requires_grad_(tracked)


def _local(t: Tensor) -> Tensor:
    """What a rank holds of a DTensor; any other tensor as it is."""
    return t.to_local() if hasattr(t, "to_local") else t
