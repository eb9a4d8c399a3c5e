"""The carrier of pieces that uses copy engines (kernels/copies.py): for ranks of one host whose GPUs share memory.

A piece is multiplied straight into the rank's shared memory, and each peer pulls it straight to its place: no buffer between
but for sums, which need the peers' terms beside each other. Sums are taken on the side stream, under the next multiply: in
the dtype for two ranks (one rounding), in float32 with one rounding for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from crosscut.distributed.mesh import Group
from crosscut.kernels.copies import Copies, Piece, bytes_of
from crosscut.layers.carry import Moving, Spans


class Engines:
    """One call's transfers by copy engines, for the rank ``rank`` of ``size``."""

    def __init__(self, copies: Copies, group: Group) -> None:
        self.copies, self.rank, self.size = copies, group.rank, group.size
        self._peers = [(group.rank + step) % group.size for step in range(1, group.size)]  # each rank begins with another

    def open(self) -> None:
        """Take a half of the memory."""
        self.copies.begin()

    def close(self) -> None:
        """Give it back."""
        self.copies.end()

    def gather(self, x: Tensor, sizes: Sequence[int], spans: Spans) -> tuple[Callable[[], Tensor] | None, Sequence[Moving]]:
        """Each peer's tokens land in their place of one tensor."""
        starts = [0, *accumulate(sizes)]
        whole = x.new_empty(x.shape[0], starts[-1], x.shape[2])
        coming: list[Moving] = []
        self.open()
        with self.copies.aside():  # the multiply of the own tokens need not wait for this
            published = [self._put(x[:, piece[self.rank]], max(span.stop - span.start for span in piece)) for piece in spans]
        for piece, spot in zip(spans, published, strict=True):
            parts = []
            for peer in self._peers:
                start, stop = starts[peer] + piece[peer].start, starts[peer] + piece[peer].stop
                self.copies.pull(spot, peer, 0, whole[:, start:stop])
                parts.append((start, whole[:, start:stop]))
            coming.append(_Pulled(self.copies, parts))

        def complete() -> Tensor:
            whole[:, starts[self.rank] : starts[self.rank + 1]].copy_(x)
            return whole

        return complete, coming

    def room_to_scatter(self, counts: Sequence[int], y: Tensor, outer: int) -> tuple[Tensor, Sequence[Tensor]]:
        """One part after the other, none padded."""
        shape = (sum(counts) * outer * y.shape[2],)
        stack = self._room(shape, y.dtype, shape)
        parts = stack.split([count * outer * y.shape[2] for count in counts])
        return stack, [part.view(outer, count, y.shape[2]) for part, count in zip(parts, counts, strict=True)]

    def scatter(self, stack: Tensor, rooms: Sequence[Tensor], into: Tensor) -> Moving:
        """Pull this rank's part from each peer and add them up."""
        before = sum(room.nbytes for room in rooms[: self.rank])
        return self._sum(rooms[self.rank], before, into)

    def room_to_reduce(self, into: Tensor) -> Tensor:
        """Dense."""
        return self._room(into.shape, into.dtype, into.shape)

    def reduce(self, room: Tensor, into: Tensor) -> Moving:
        """Pull the whole piece from each peer: as many bytes as two shots for two ranks, more for others."""
        return self._sum(room, 0, into)

    def room_to_join(self, into: Tensor, widths: Sequence[int]) -> Tensor:
        """Dense, of this rank's width."""
        return self._room((len(into), max(widths)), into.dtype, (len(into), widths[self.rank]))

    def join(self, room: Tensor, into: Tensor, widths: Sequence[int]) -> Moving:
        """Pull each peer's columns to their place, rows with a pitch."""
        columns = into.split(list(widths), 1)
        piece = self.copies.publish()
        for peer in self._peers:
            self.copies.pull(piece, peer, 0, columns[peer])
        self.copies.lay(room, columns[self.rank])
        return _Pulled(self.copies)

    def _room(self, largest: Sequence[int], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Room of ``shape`` in memory that is counted as ``largest``, the same on every rank."""
        memory = self.copies.room(bytes_of(largest, dtype))
        return memory[: bytes_of(shape, dtype)].view(dtype).view(*shape)

    def _put(self, own: Tensor, most: int) -> Piece:
        """Publish ``own [O, n, K]``, of which the rank with most tokens has ``most``."""
        self._room((own.shape[0], most, own.shape[2]), own.dtype, own.shape).copy_(own)
        return self.copies.publish()

    def _sum(self, own: Tensor, offset: int, into: Tensor) -> Moving:
        terms = into.new_empty(self.size if self.size > 2 else 1, *into.shape)
        piece = self.copies.publish()
        for term, peer in zip(terms, self._peers, strict=False):
            self.copies.pull(piece, peer, offset, term)
        with self.copies.aside():
            if self.size == 2:
                torch.add(own, terms[0], out=into)
            else:
                terms[-1].copy_(own)
                torch.sum(terms, 0, out=into)
        return _Pulled(self.copies, keep=terms)


class _Pulled:
    """What the side stream has been told to do up to now. ``keep``: memory that it uses until then."""

    def __init__(self, copies: Copies, parts: list[tuple[int, Tensor]] | None = None, keep: Tensor | None = None) -> None:
        self._mark, self._parts, self._keep = copies.mark(), parts or [], keep

    def wait(self) -> list[tuple[int, Tensor]]:
        """Make the current stream wait. What has arrived."""
        self._mark.wait()
        return self._parts
