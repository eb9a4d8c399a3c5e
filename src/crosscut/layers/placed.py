"""Where each parameter of a model is: how tp cuts it, which part FSDP2 leaves here, and whose gradient is partial. As data.

A module of this room says in ``cuts`` how each of its parameters is cut, in ``shapes`` what the whole looks like, and in
``partial_gradients`` which gradients are sums over the tp group. A parameter of any other module is held whole by every
rank. On top of that FSDP2 (``fully_shard`` over dp) may leave each rank a part of its tp shard, as a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from typing_extensions import Self

from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers.shards import gather
from crosscut.sharding import Cut, Piece, Replicated


@dataclass(frozen=True)
class Box:
    """A block of a parameter that this rank holds: where it is in the whole, and where in the rank's own tensor.

    ``first``: no lower rank of the tp group holds it. The first blocks of all ranks are disjoint and together the whole.
    """

    whole: tuple[slice, ...]
    own: tuple[slice, ...]
    first: bool = True


@dataclass(frozen=True)
class Placed:
    """One tensor of a model: a parameter, or what has its shape (gradient, optimizer state); see :meth:`like`.

    ``local``: this rank's tp shard, or a DTensor that spreads the shard over dp. ``cut``, ``shape``: how the whole is cut and
    its shape. ``summed_by``: who sums a gradient of which each rank sees a part: the ``layer``, in its backward, the
    ``caller``, or nobody ('') because no gradient is partial.
    """

    name: str
    local: Tensor
    cut: Cut
    shape: tuple[int, ...]
    summed_by: str = ""

    @property
    def kind(self) -> str:
        """``sharded``; ``replicated``; or ``partial``: replicated, and each rank's backward sees a part of the gradient."""
        if self.cut.dim is not None:
            return "sharded"
        return "partial" if self.summed_by else "replicated"

    @property
    def replicated(self) -> bool:
        """Every rank of the tp group holds all of it."""
        return self.cut.dim is None

    @property
    def spread(self) -> bool:
        """Each rank of the dp group holds a part of the tp shard (FSDP2)."""
        return _is_dtensor(self.local) and any(placement.is_shard() for placement in self.local.placements)

    @property
    def own(self) -> Tensor:
        """The plain tensor in this rank's memory; writing to it writes to the parameter."""
        local = self.local.detach()
        own: Tensor = local.to_local() if _is_dtensor(local) else local
        return own

    def like(self, value: Tensor, name: str | None = None) -> Self:
        """The same place of another tensor, such as the gradient."""
        return replace(self, local=value, name=self.name if name is None else name)

    def shard(self) -> Tensor:
        """This rank's tp shard, whole. A collective call over dp where it is spread."""
        local = self.local.detach()
        shard: Tensor = local.full_tensor() if _is_dtensor(local) else local
        return shard

    def fill(self, shard: Tensor) -> None:
        """Copy this rank's own part of ``shard``, a whole tp shard, into the tensor."""
        starts, sizes = self._chunk()
        with torch.no_grad():
            self.own.copy_(shard[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))])

    def whole(self, group: Group) -> Tensor:
        """All of it, on every rank. A collective call over tp and, where it is spread, over dp."""
        return gather(self.shard(), self.cut, self.shape, group)

    def boxes(self, group: Group) -> list[Box]:
        """The blocks of the whole that this rank's own tensor consists of, in its order, none empty.

        What is not cut is one block, the first on every rank of tp: they hold the same.
        """
        starts, sizes = self._chunk()
        if not self.shape:
            return [Box((), ())]
        dim = self.cut.dim or 0
        boxes = []
        for piece, first in self._pieces(group):
            begin = max(piece.local.start, starts[dim])
            count = min(piece.local.stop, starts[dim] + sizes[dim]) - begin
            row = piece.full.start + begin - piece.local.start
            whole = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
            own = [slice(0, size) for size in sizes]
            whole[dim], own[dim] = slice(row, row + count), slice(begin - starts[dim], begin - starts[dim] + count)
            if all(part.stop > part.start for part in own):
                boxes.append(Box(tuple(whole), tuple(own), first))
        return boxes

    def counts(self, group: Group) -> tuple[int, ...]:
        """How many ranks of tp hold each row of the whole along the cut dim."""
        return tuple(len(ranks) for ranks in _holders(self.cut, self.shape, group.size))

    def own_rows(self, group: Group) -> list[int]:
        """Which rows of the whole the rows of this rank's own tensor along the cut dim are."""
        assert self.cut.dim is not None
        runs = [box.whole[self.cut.dim] for box in self.boxes(group)]
        return [row for run in runs for row in range(run.start, run.stop)]

    def shares_rows(self, group: Group) -> bool:
        """Several ranks of tp hold the same rows, and no rank all: KV heads fewer than ranks."""
        return _shared(self.cut, self.shape, group.size)

    def _chunk(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where this rank's own tensor begins in the tp shard, and its size, along each dim."""
        if _is_dtensor(self.local):
            (chunk,) = self.local.__create_chunk_list__()
            return tuple(chunk.offsets), tuple(chunk.sizes)
        return (0,) * self.local.dim(), tuple(self.local.shape)

    def _pieces(self, group: Group) -> Iterator[tuple[Piece, bool]]:
        """The runs of the tp shard, divided where the lowest rank that holds them changes from another to this one."""
        if self.cut.dim is None:
            yield Piece(slice(0, self.shape[0]), slice(0, self.shape[0])), True
            return
        holders = _holders(self.cut, self.shape, group.size) if self.shares_rows(group) else None
        for piece in self.cut.pieces(self.shape, group.size, group.rank):
            if holders is None:
                yield piece, True
                continue
            shift = piece.local.start - piece.full.start
            for first, run in groupby(range(piece.full.start, piece.full.stop), lambda row: holders[row][0] == group.rank):
                rows = list(run)
                yield Piece(slice(rows[0], rows[-1] + 1), slice(rows[0] + shift, rows[-1] + 1 + shift)), first


def _is_dtensor(x: Tensor) -> TypeGuard[Any]:
    """Without the import of torch.distributed.tensor, which takes most of a second and which only FSDP2 needs."""
    return hasattr(x, "full_tensor")


@cache
def _holders(cut: Cut, shape: tuple[int, ...], tp: int) -> tuple[tuple[int, ...], ...]:
    """For each row of the whole along the cut dim the ranks that hold it."""
    assert cut.dim is not None
    holders: list[list[int]] = [[] for _ in range(shape[cut.dim])]
    for rank in range(tp):
        for piece in cut.pieces(shape, tp, rank):
            for row in range(piece.full.start, piece.full.stop):
                holders[row].append(rank)
    return tuple(map(tuple, holders))


@cache
def _shared(cut: Cut, shape: tuple[int, ...], tp: int) -> bool:
    return cut.dim is not None and sum(cut.shard_shape(shape, tp, rank)[cut.dim] for rank in range(tp)) > shape[cut.dim]


def placed_parameters(model: nn.Module, mesh: Mesh | None = None) -> Iterator[Placed]:
    """Every parameter of ``model`` once (a tied one under its first name), with its place.

    Raises UsageError (``bad-option``) for a cut parameter that torch computes from others (parametrizations), and with ``mesh``
    for one that torch has spread over other ranks than those of dp.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        cuts, shapes, partial = (getattr(module, table, {}) for table in ("cuts", "shapes", "partial_gradients"))
        _check_there(prefix, module, cuts)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{prefix}.{name}" if prefix else name
            shape = tuple(shapes.get(name, parameter.shape))
            placed = Placed(full, parameter, cuts.get(name, Replicated()), shape, partial.get(name, ""))
            if mesh is not None:
                _check_spread(placed, mesh)
            yield placed


def _check_there(prefix: str, module: nn.Module, cuts: Mapping[str, Cut]) -> None:
    for name, cut in cuts.items():
        if cut.dim is not None and name not in module._parameters:
            full = f"{prefix}.{name}" if prefix else name
            raise UsageError(
                f"{full!r} is cut and no parameter: torch computes it from others (a parametrization, weight_norm, pruning), "
                "and how these are cut is not known",
                code="bad-option",
                fix="take the parametrization off (parametrize.remove_parametrizations, prune.remove), or put it on layers "
                "that are whole",
            )


def gradients(model: nn.Module, mesh: Mesh) -> Iterator[Placed]:
    """The gradients that there are, each in its parameter's place."""
    for placed in placed_parameters(model, mesh):
        if placed.local.grad is not None:
            yield placed.like(placed.local.grad)


def _check_spread(placed: Placed, mesh: Mesh) -> None:
    if not _is_dtensor(placed.local):
        return
    ranks = tuple(placed.local.device_mesh.mesh.flatten().tolist())
    if ranks != mesh.dp.ranks:
        raise UsageError(
            f"{placed.name!r} is a DTensor over the ranks {list(ranks)}, and dp is {list(mesh.dp.ranks)}",
            code="bad-option",
            fix='spread parameters over dp alone: fully_shard(module, mesh=mesh.device_mesh["dp"])',
        )
