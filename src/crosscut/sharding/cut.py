"""A cut says which part of a parameter each rank holds. Shards of any tp join to the exact original.

Sizes need not divide: ``shard_sizes`` deals the remainder to the first ranks, one each, as ``torch.tensor_split`` does,
and a rank may hold nothing when there are more ranks than rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosscut.errors import UsageError


def shard_sizes(total: int, tp: int) -> list[int]:
    """How ``total`` elements are dealt to ``tp`` ranks: ``shard_sizes(7, 3) == [3, 2, 2]``."""
    if total < 0 or tp < 1:
        raise UsageError(
            f"cannot cut {total} elements for {tp} ranks",
            code="bad-size",
            fix="give a size of at least 0 and a tp of at least 1",
        )
    each, rest = divmod(total, tp)
    return [each + 1] * rest + [each] * (tp - rest)


def shard_range(total: int, tp: int, rank: int) -> slice:
    """The elements of rank ``rank`` among ``total``: ``shard_range(7, 3, 1) == slice(3, 5)``."""
    if not 0 <= rank < tp:
        raise UsageError(f"rank {rank} is not one of {tp} ranks", code="bad-size", fix=f"give a rank from 0 to {tp - 1}")
    sizes = shard_sizes(total, tp)
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


@dataclass(frozen=True)
class Piece:
    """One contiguous run along the cut dim: where it is in the whole parameter, and where in the shard."""

    full: slice
    local: slice


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut along ``dim`` (None: every rank holds it whole)."""

    dim: int | None

    def parts(self, length: int) -> Sequence[int]:
        """The parts of the cut dim that are dealt to the ranks one by one; one part unless packed."""
        return (length,)

    def runs(self, length: int, tp: int, rank: int) -> list[slice]:
        """Which elements of the cut dim, ``length`` long, rank ``rank`` of ``tp`` holds: contiguous runs, in stored order."""
        runs: list[slice] = []
        start = 0
        for part in self.parts(length):
            mine = shard_range(part, tp, rank)
            runs.append(slice(start + mine.start, start + mine.stop))
            start += part
        return runs

    def pieces(self, shape: Sequence[int], tp: int, rank: int) -> list[Piece]:
        """The runs that rank ``rank`` of ``tp`` holds of a parameter of ``shape``, in the order in which it stores them.

        Raises UsageError (``bad-size``) when the parameter does not have the cut dim or the parts do not add up.
        """
        pieces: list[Piece] = []
        start = 0
        for run in self.runs(self._length(shape), tp, rank):
            count = run.stop - run.start
            pieces.append(Piece(run, slice(start, start + count)))
            start += count
        return pieces

    def shard_shape(self, shape: Sequence[int], tp: int, rank: int) -> tuple[int, ...]:
        """The shape that rank ``rank`` of ``tp`` holds."""
        if self.dim is None:
            return tuple(shape)
        size = sum(piece.local.stop - piece.local.start for piece in self.pieces(shape, tp, rank))
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def _length(self, shape: Sequence[int]) -> int:
        assert self.dim is not None, "a replicated parameter has no pieces"
        if self.dim >= len(shape):
            raise UsageError(
                f"a parameter of shape {list(shape)} has no dim {self.dim} to cut",
                code="bad-size",
                fix=f"use a cut along dim 0 to {len(shape) - 1}, or Replicated",
            )
        return shape[self.dim]


@dataclass(frozen=True)
class Column(Cut):
    """Output features cut: ``w [F/tp, H]``, ``b [F/tp]``. Column parallel (Megatron-LM, arXiv 1909.08053)."""

    dim: int | None = 0


@dataclass(frozen=True)
class Row(Cut):
    """Input features cut: ``w [H, F/tp]``. Row parallel (Megatron-LM, arXiv 1909.08053)."""

    dim: int | None = 1


@dataclass(frozen=True)
class Replicated(Cut):
    """Every rank holds the whole parameter."""

    dim: int | None = None


@dataclass(frozen=True)
class Packed(Cut):
    """Several column-parallel weights stored as one (gate and up; q, k and v): each is cut on its own.

    Cutting the packed rows contiguously would give the right shape and the wrong rows.
    """

    dim: int | None = 0
    sizes: tuple[int, ...] = ()

    def parts(self, length: int) -> Sequence[int]:
        if sum(self.sizes) != length:
            raise UsageError(
                f"packed parts {list(self.sizes)} add up to {sum(self.sizes)}, the parameter has {length} rows",
                code="bad-size",
                fix="give the sizes of the parts in the order in which they are stored",
            )
        return self.sizes
