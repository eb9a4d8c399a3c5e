"""What each collective algorithm sends, step by step: the one plan that ranks run, tests count and pictures show.

The tensor is dealt into one chunk for each rank. A step is a set of messages that all carry what their sender held when
the step began; a receiver copies a message over its own chunks, or adds it to them. Pure: no torch, no ranks.

Algorithms and formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005) for ring and tree; one-shot and two-shot as in crosscut's kernels (kernels/exchange).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crosscut.errors import UsageError, choose, nearest
from crosscut.units import format_size

ELEMENT = 4
"""Bytes of one element: simulations use float32."""


@dataclass(frozen=True)
class Message:
    """``src`` sends its chunks from ``first`` to before ``end`` to ``dst``, which adds them (``reduce``) or copies them."""

    src: int
    dst: int
    first: int
    end: int
    nbytes: int
    reduce: bool = False


@dataclass(frozen=True)
class Formula:
    """What the textbook says: how many steps, and how much the busiest rank sends. ``text`` in terms of n and S."""

    steps: int
    bytes_per_rank: float
    text: str


Steps = list[list[Message]]
_Send = Callable[[int, int, int, int, bool], Message]
"""(src, dst, first chunk, end, reduce) -> the message with its bytes."""


def schedule(algorithm: str, op: str, world: int, nbytes: int) -> Steps:
    """The messages of ``op`` by ``algorithm`` over ``world`` ranks, one list for each step.

    ``nbytes``: of the whole tensor (the gathered one of all_gather, the input of reduce_scatter).
    At the end rank r holds: all chunks (all_reduce, all_gather, broadcast from rank 0), chunk r (reduce_scatter), or on
    rank 0 all chunks (reduce). A rank sends at most one message to another in a step.
    Raises UsageError (``bad-option``, ``bad-size``) on what :func:`check` refuses.
    """
    check(algorithm, op, world, nbytes)
    edges = chunk_edges(world, nbytes)

    def send(src: int, dst: int, first: int, end: int, reduce: bool) -> Message:
        return Message(src, dst, first, end, (edges[end] - edges[first]) * ELEMENT, reduce)

    return _SCHEDULES[algorithm, op][0](world, send)


def formula(algorithm: str, op: str, world: int, nbytes: int) -> Formula:
    """The textbook's count for the same plan, exact when the chunks are equal. Raises UsageError as :func:`schedule`."""
    check(algorithm, op, world, nbytes)
    steps, share, text = _SCHEDULES[algorithm, op][1](world)
    return Formula(steps, share * nbytes, text)


def check(algorithm: str, op: str, world: int, nbytes: int) -> None:
    """Refuse what has no plan: an unknown algorithm or op (``bad-option``), a world or size that cannot work (``bad-size``)."""
    choose("algorithm", algorithm, ALGORITHMS)
    if (algorithm, op) not in _SCHEDULES:
        raise UsageError(
            f"there is no {algorithm} for {op!r}{nearest(op, ops(algorithm))}",
            code="bad-option",
            fix=f"use one of: {', '.join(ops(algorithm))}",
        )
    if world < 2:
        raise UsageError(
            f"a simulation over {world} rank{'s' * (world != 1)}", code="bad-size", fix="give at least 2 ranks: --world 4"
        )
    if nbytes < world * ELEMENT or nbytes % ELEMENT:
        raise UsageError(
            f"{nbytes} bytes cannot be dealt to {world} ranks as float32 numbers",
            code="bad-size",
            fix=f"give a multiple of {ELEMENT} bytes, at least {format_size(world * ELEMENT)} for {world} ranks",
        )


def ops(algorithm: str) -> tuple[str, ...]:
    """The collectives that ``algorithm`` can do, all_reduce first."""
    return tuple(op for name, op in _SCHEDULES if name == algorithm)


def chunk_edges(world: int, nbytes: int) -> list[int]:
    """Where each chunk begins, in elements, and the end: ``world + 1`` numbers; sizes differ by one element at most."""
    total = nbytes // ELEMENT
    return [total * chunk // world for chunk in range(world + 1)]


def holdings(steps: Steps, op: str, world: int) -> list[list[list[int]]]:
    """How many ranks' values are in each chunk of each rank, ``[step][rank][chunk]``, before the first step and after each.

    0: the rank does not hold the chunk. At the end of an all_reduce every number is ``world``.
    """
    start = {
        "all_gather": lambda rank, chunk: int(rank == chunk),
        "broadcast": lambda rank, chunk: int(rank == 0),
    }.get(op, lambda rank, chunk: 1)
    states = [[[start(rank, chunk) for chunk in range(world)] for rank in range(world)]]
    for step in steps:
        before, after = states[-1], [list(row) for row in states[-1]]
        for message in step:
            for chunk in range(message.first, message.end):
                brought = before[message.src][chunk]
                after[message.dst][chunk] = after[message.dst][chunk] + brought if message.reduce else brought
        states.append(after)
    return states


# ------------------------------------------------------------------------------------------------------------ the plans


def _ring_reduce_scatter(world: int, send: _Send) -> Steps:
    """Each partial sum travels once round the ring, and ends on the rank that owns the chunk."""
    steps = []
    for step in range(world - 1):
        chunks = [(rank - 1 - step) % world for rank in range(world)]
        steps.append([send(rank, (rank + 1) % world, c, c + 1, True) for rank, c in enumerate(chunks)])
    return steps


def _ring_all_gather(world: int, send: _Send) -> Steps:
    """Each rank passes on the chunk that it got last."""
    steps = []
    for step in range(world - 1):
        chunks = [(rank - step) % world for rank in range(world)]
        steps.append([send(rank, (rank + 1) % world, c, c + 1, False) for rank, c in enumerate(chunks)])
    return steps


def _ring_all_reduce(world: int, send: _Send) -> Steps:
    return _ring_reduce_scatter(world, send) + _ring_all_gather(world, send)


def _ring_broadcast(world: int, send: _Send) -> Steps:
    """A chain 0 -> 1 -> ... -> n-1, its links all busy at once: chunk c crosses link r in step r + c."""
    links = range(world - 1)
    return [
        [send(rank, rank + 1, step - rank, step - rank + 1, False) for rank in links if 0 <= step - rank < world]
        for step in range(2 * world - 2)
    ]


def _tree_levels(world: int) -> list[list[tuple[int, int]]]:
    """(child, parent) of each level of the binary tree with rank 0 on top, the deepest level first."""
    levels: list[list[tuple[int, int]]] = []
    for child in range(1, world):
        depth = (child + 1).bit_length() - 1
        if depth > len(levels):
            levels.append([])
        levels[-1].append((child, (child - 1) // 2))
    return levels[::-1]


def _tree_reduce(world: int, send: _Send) -> Steps:
    return [[send(child, parent, 0, world, True) for child, parent in level] for level in _tree_levels(world)]


def _tree_broadcast(world: int, send: _Send) -> Steps:
    return [[send(parent, child, 0, world, False) for child, parent in level] for level in reversed(_tree_levels(world))]


def _tree_all_reduce(world: int, send: _Send) -> Steps:
    return _tree_reduce(world, send) + _tree_broadcast(world, send)


def _pairs(world: int) -> list[tuple[int, int]]:
    return [(src, dst) for src in range(world) for dst in range(world) if src != dst]


def _one_shot_all_reduce(world: int, send: _Send) -> Steps:
    return [[send(src, dst, 0, world, True) for src, dst in _pairs(world)]]


def _one_shot_all_gather(world: int, send: _Send) -> Steps:
    return [[send(src, dst, src, src + 1, False) for src, dst in _pairs(world)]]


def _one_shot_reduce_scatter(world: int, send: _Send) -> Steps:
    return [[send(src, dst, dst, dst + 1, True) for src, dst in _pairs(world)]]


def _two_shot_all_reduce(world: int, send: _Send) -> Steps:
    return _one_shot_reduce_scatter(world, send) + _one_shot_all_gather(world, send)


def _depth(world: int) -> int:
    return world.bit_length() - 1


def _tree_share(world: int, up: bool, down: bool) -> int:
    """Whole tensors that the busiest rank of the tree sends: one up to its parent, one down to each child."""
    children = [sum(0 < child < world for child in (2 * rank + 1, 2 * rank + 2)) for rank in range(world)]
    return max(up * (rank > 0) + down * count for rank, count in enumerate(children))


_SCHEDULES: dict[tuple[str, str], tuple[Callable[[int, _Send], Steps], Callable[[int], tuple[int, float, str]]]] = {
    ("ring", "all_reduce"): (_ring_all_reduce, lambda n: (2 * (n - 1), 2 * (n - 1) / n, "2(n-1)/n x S")),
    ("ring", "all_gather"): (_ring_all_gather, lambda n: (n - 1, (n - 1) / n, "(n-1)/n x S")),
    ("ring", "reduce_scatter"): (_ring_reduce_scatter, lambda n: (n - 1, (n - 1) / n, "(n-1)/n x S")),
    ("ring", "broadcast"): (_ring_broadcast, lambda n: (2 * (n - 1), 1.0, "S")),
    ("tree", "all_reduce"): (
        _tree_all_reduce,
        lambda n: (2 * _depth(n), _tree_share(n, True, True), "S to the parent and S to each of at most 2 children"),
    ),
    ("tree", "broadcast"): (
        _tree_broadcast,
        lambda n: (_depth(n), _tree_share(n, False, True), "S to each of at most 2 children"),
    ),
    ("tree", "reduce"): (_tree_reduce, lambda n: (_depth(n), _tree_share(n, True, False), "S to the parent")),
    ("one-shot", "all_reduce"): (_one_shot_all_reduce, lambda n: (1, n - 1, "(n-1) x S")),
    ("one-shot", "all_gather"): (_one_shot_all_gather, lambda n: (1, (n - 1) / n, "(n-1)/n x S")),
    ("one-shot", "reduce_scatter"): (_one_shot_reduce_scatter, lambda n: (1, (n - 1) / n, "(n-1)/n x S")),
    ("two-shot", "all_reduce"): (_two_shot_all_reduce, lambda n: (2, 2 * (n - 1) / n, "2(n-1)/n x S")),
}
ALGORITHMS = tuple(dict.fromkeys(name for name, _ in _SCHEDULES))
"""ring, tree, one-shot, two-shot."""
