"""Who moves the pieces of a schedule (pieces.py): the collective library's asynchronous calls, on any backend.

A :class:`Carrier` gives the room that a piece is multiplied into, starts its transfer, and has the result where the caller
wants it when the transfer is waited for. :class:`Library` is this; ``engines.py`` has the one of the copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.collectives import all_gather, all_reduce
from crosscut.collectives.call import Plan, plain_collective
from crosscut.collectives.functional import all_gather_single, reduce_scatter_single
from crosscut.distributed.mesh import Group

Spans = Sequence[Sequence[slice]]
"""For each piece the tokens that it takes of each rank's (pieces.cut)."""


class Moving(Protocol):
    """A transfer under way. ``wait()``: the current stream goes on when it is done."""

    def wait(self) -> Any:
        """What has arrived, for a gather: pairs (first token, ``part [O, n, K]``); else the result is in its place."""
        ...


class Carrier(Protocol):
    """One call's transfers, in order: open (or gather), rooms and transfers by turns, close."""

    def open(self) -> None:
        """Before the first piece."""

    def close(self) -> None:
        """After the last piece has been waited for."""

    def gather(self, x: Tensor, sizes: Sequence[int], spans: Spans) -> tuple[Callable[[], Tensor] | None, Sequence[Moving]]:
        """Start all pieces of a gather of tokens; the peers' alone arrive. Also how to get all in one tensor, if there is."""
        ...

    def room_to_scatter(self, counts: Sequence[int], y: Tensor, outer: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Room for one piece, ``counts`` tokens for each rank: all of it, and each rank's ``[O, n, N]``. ``y``: the output."""
        ...

    def scatter(self, stack: Tensor, rooms: Sequence[Tensor], into: Tensor) -> Moving:
        """The sum over ranks of this rank's part, into ``[O, n, N]``."""
        ...

    def room_to_reduce(self, into: Tensor) -> Tensor:
        """Room for a piece whose sum goes ``into`` ``[1, n, N]``, shaped like it."""
        ...

    def reduce(self, room: Tensor, into: Tensor) -> Moving:
        """The sum over ranks."""
        ...

    def room_to_join(self, into: Tensor, widths: Sequence[int]) -> Tensor:
        """Room ``[n, at least this rank's width]`` for a piece of ``into [n, sum of widths]``."""
        ...

    def join(self, room: Tensor, into: Tensor, widths: Sequence[int]) -> Moving:
        """All ranks' features side by side."""
        ...


class Library:
    """NCCL, gloo or rank threads: one asynchronous collective for each piece."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def open(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to put away."""

    def gather(self, x: Tensor, sizes: Sequence[int], spans: Spans) -> tuple[Callable[[], Tensor] | None, Sequence[Moving]]:
        """All pieces are queued at once; the library carries them one after the other."""
        coming = [_Tokens(x, self.group, sizes, piece) for piece in spans]
        return (coming[0].whole if len(coming) == 1 else None), coming

    def room_to_scatter(self, counts: Sequence[int], y: Tensor, outer: int) -> tuple[Tensor, Sequence[Tensor]]:
        """One part after the other, each as long as the longest, as a reduce-scatter wants them."""
        stack = y.new_empty(self.group.size, outer, max(counts), y.shape[2])
        return stack, [part[:, :count] for part, count in zip(stack, counts, strict=True)]

    def scatter(self, stack: Tensor, rooms: Sequence[Tensor], into: Tensor) -> Moving:
        """Straight into its place where the parts are even and nothing lies before the tokens."""
        return scatter_into.start(stack, self.group, into)

    def room_to_reduce(self, into: Tensor) -> Tensor:
        """The place of the result itself: it is summed there."""
        return into

    def reduce(self, room: Tensor, into: Tensor) -> Moving:
        """In place."""
        return all_reduce.start(room, self.group, out=room)

    def room_to_join(self, into: Tensor, widths: Sequence[int]) -> Tensor:
        """As wide as the widest rank's."""
        return into.new_empty(len(into), max(widths))

    def join(self, room: Tensor, into: Tensor, widths: Sequence[int]) -> Moving:
        """Parts come one after the other and are laid side by side when they are here."""
        return join_into.start(room, self.group, into, widths)


class _Tokens:
    """One piece of a gather of tokens."""

    def __init__(self, x: Tensor, group: Group, sizes: Sequence[int], spans: Sequence[slice]) -> None:
        self._outer, self._rank, self._spans = x.shape[0], group.rank, spans
        self._starts = [0, *accumulate(sizes)]
        self._counts = [span.stop - span.start for span in spans]
        own = x[:, spans[group.rank]].reshape(-1, x.shape[2])
        self._pending = all_gather.start(own, group, 0, [x.shape[0] * count for count in self._counts])
        self._joined = self._outer == 1 and self._counts == list(sizes)  # what comes is all tokens, in order

    def whole(self) -> Tensor:
        """All tokens ``[O, T, K]``, when this piece is all; one copy where something lies before the tokens."""
        return self._pending.wait()[None] if self._joined else torch.cat(self._parts(), 1)

    def wait(self) -> list[tuple[int, Tensor]]:
        """The peers' parts; two runs, before and after the own tokens, when this piece is all."""
        if self._joined:
            start, stop = self._starts[self._rank : self._rank + 2]
            gathered = self._pending.wait()[None]
            return [(0, gathered[:, :start]), (stop, gathered[:, stop:])]
        return [
            (start + span.start, part)
            for rank, (start, span, part) in enumerate(zip(self._starts, self._spans, self._parts(), strict=False))
            if rank != self._rank and part.shape[1]
        ]

    def _parts(self) -> list[Tensor]:
        parts = self._pending.wait().split([self._outer * count for count in self._counts])
        return [part.view(self._outer, count, part.shape[1]) for part, count in zip(parts, self._counts, strict=True)]


@plain_collective
def scatter_into(stack: Tensor, group: Group, into: Tensor) -> Plan:
    """Reduce-scatter of ``stack [tp, O, n, N]`` into this rank's ``[O, up to n, N]``."""
    direct = into.is_contiguous() and into.shape == stack.shape[1:]
    target = into if direct else torch.empty_like(stack[0])

    def issue(send: Tensor, receive: Tensor, async_op: bool) -> dist.Work | None:
        return reduce_scatter_single(receive, send.flatten(0, 1), group=group.process_group, async_op=async_op)

    def finish() -> Tensor:
        return into if direct else into.copy_(target[:, : into.shape[1]])

    return Plan(group, stack, finish, issue, target=target, detail="sum, pieces")


@plain_collective
def join_into(room: Tensor, group: Group, into: Tensor, widths: Sequence[int]) -> Plan:
    """All-gather of ``room [n, widest]`` into ``into [n, sum of widths]``, each rank's features beside the next rank's."""
    target = room.new_empty(group.size, *room.shape)

    def issue(send: Tensor, receive: Tensor, async_op: bool) -> dist.Work | None:
        return all_gather_single(receive.flatten(0, 1), send, group=group.process_group, async_op=async_op)

    def finish() -> Tensor:
        for part, columns, width in zip(target, into.split(list(widths), 1), widths, strict=True):
            columns.copy_(part[:, :width])
        return into

    return Plan(group, room, finish, issue, target=target, detail="last dim, pieces")
