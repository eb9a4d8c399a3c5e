"""A multiply in pieces, each piece's transfer under the multiply of another: four schedules, no autograd.

All tensors of activations are ``[O, T, K]`` here: T tokens, which are cut into pieces, and what lies before them (O, 1 for
``[T, K]`` and for ``[S, B, K]``). Weights are ``[N, K]`` as torch stores them, ``sizes`` each rank's tokens. Every result is
written where the caller wants it: pieces are views of the final tensor, never joined by a copy. Ranks must call alike.

``docs/overlap.md`` draws each schedule. Sources: Wang et al., Overlap communication with dependent computation via
decomposition, ASPLOS 2023; Flux, arXiv 2406.06858; torch's _symmetric_memory (own part first, then the peers').
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from crosscut.distributed.mesh import Group
from crosscut.layers.carry import Carrier, Moving
from crosscut.sharding import shard_sizes


def multiply_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = x W^T + b`` for ``x [O, T, K]``, ``w [N, K]``, ``out [O, T, N]``; both may be strided, their last dim dense."""
    if out.numel() == 0:
        return
    if x.shape[0] == 1:
        x, out = x[0], out[0]
        torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
        return
    columns = weight.t().expand(x.shape[0], -1, -1)
    torch.bmm(x, columns, out=out) if bias is None else torch.baddbmm(bias, x, columns, out=out)


def gather_multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sizes: Sequence[int], pieces: int, carrier: Carrier
) -> tuple[Tensor, Tensor | None]:
    """Sharded tokens times this rank's weight: ``x [O, T/tp, K] -> y [O, T, N]``. Own tokens first, the others' as they come.

    Also returns the gathered ``x [O, T, K]`` where the carrier has it in one tensor.
    """
    starts = [0, *accumulate(sizes)]
    own = slice(starts[group.rank], starts[group.rank + 1])
    y = x.new_empty(x.shape[0], starts[-1], weight.shape[0])
    whole, coming = carrier.gather(x, sizes, cut(sizes, pieces))
    multiply_into(x, weight, bias, y[:, own])
    for moving in coming:
        for start, part in moving.wait():
            multiply_into(part, weight, bias, y[:, start : start + part.shape[1]])
    carrier.close()
    return y, whole() if whole is not None else None


def multiply_scatter(x: Tensor, weight: Tensor, group: Group, sizes: Sequence[int], pieces: int, carrier: Carrier) -> Tensor:
    """Partial sums of all tokens to this rank's tokens of their sum: ``x [O, T, K] -> y [O, T/tp, N]``.

    A piece is a part of each rank's tokens.
    """
    starts = [0, *accumulate(sizes)]
    y = x.new_empty(x.shape[0], sizes[group.rank], weight.shape[0])
    lag = Lag()
    carrier.open()
    for spans in cut(sizes, pieces):
        parts = [x[:, start + span.start : start + span.stop] for start, span in zip(starts, spans, strict=False)]
        stack, rooms = carrier.room_to_scatter([part.shape[1] for part in parts], y, x.shape[0])
        for rank in (*range(group.rank + 1, group.size), *range(group.rank + 1)):  # own last: nobody waits for it
            multiply_into(parts[rank], weight, None, rooms[rank])
        lag.add(carrier.scatter(stack, rooms, y[:, spans[group.rank]]))
    lag.end()
    carrier.close()
    return y


def multiply_reduce(x: Tensor, weight: Tensor, group: Group, pieces: int, carrier: Carrier) -> Tensor:
    """Partial sums to their sum on every rank: ``x [1, T, K] -> y [1, T, N]``."""
    y = x.new_empty(*x.shape[:2], weight.shape[0])
    lag = Lag()
    carrier.open()
    for (span,) in cut([x.shape[1]], pieces):
        into = y[:, span]
        room = carrier.room_to_reduce(into)
        multiply_into(x[:, span], weight, None, room)
        lag.add(carrier.reduce(room, into))
    lag.end()
    carrier.close()
    return y


def multiply_gather(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, widths: Sequence[int], pieces: int, carrier: Carrier
) -> Tensor:
    """This rank's output features to all of them on every rank: ``x [1, T, K] -> y [1, T, sum of widths]``."""
    y = x.new_empty(*x.shape[:2], sum(widths))
    lag = Lag()
    carrier.open()
    for (span,) in cut([x.shape[1]], pieces):
        into = y[0, span]
        room = carrier.room_to_join(into, widths)
        multiply_into(x[:, span], weight, bias, room[None, :, : widths[group.rank]])
        lag.add(carrier.join(room, into, widths))
    lag.end()
    carrier.close()
    return y


def cut(sizes: Sequence[int], pieces: int) -> list[list[slice]]:
    """For each piece the tokens that it takes of each rank's; the same list on every rank. Pieces without tokens fall out.

    ``cut([5, 4], 2) == [[slice(0, 3), slice(0, 2)], [slice(3, 5), slice(2, 4)]]``
    """
    edges = [[0, *accumulate(shard_sizes(size, pieces))] for size in sizes]
    found = [[slice(a, b) for a, b in pairs] for pairs in zip(*(pairwise(e) for e in edges), strict=True)]
    return [spans for spans in found if any(span.stop > span.start for span in spans)]


class Lag:
    """Transfers under way: each is waited for when the next one has been started, the last one at the end."""

    def __init__(self) -> None:
        self._last: Moving | None = None

    def add(self, moving: Moving) -> None:
        """Take the newest and wait for the one before."""
        self.end()
        self._last = moving

    def end(self) -> None:
        """Wait for what is still under way."""
        if self._last is not None:
            self._last.wait()
