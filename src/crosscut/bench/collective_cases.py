"""What each collective is, in one small declaration: sizes, bandwidth factors, exact inputs and results, and its call.

A declaration says which elements a rank hands in (``sends``), which it must end up with and where they come from
(``receives``), and how ``torch.distributed`` is asked for it. From that the harness (:mod:`crosscut.bench.collectives`)
makes buffers, times the call and checks every element, so adding a collective is one entry of :data:`CASES`.

Numbers are small whole ones, a hash of (rank, position): any order of summing them is exact in every dtype, so results
are compared to the bit, and a misplaced element differs. Bandwidths follow nccl-tests' PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.collectives.functional import all_gather_single, reduce_scatter_single
from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EXACT: dict[torch.dtype, int] = {
    torch.float64: 1 << 53, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8,
    torch.float8_e4m3fn: 1 << 4, torch.float8_e5m2: 1 << 3,
    torch.int64: (1 << 63) - 1, torch.int32: (1 << 31) - 1, torch.int8: 127, torch.uint8: 255,
}  # fmt: skip
"""Up to where a dtype holds every whole number: 2 to the significant bits of a float, the largest value of an integer."""

CHUNK = 1 << 22
"""Elements that are made or compared at a time, so that a check needs little memory whatever the size."""

_VALUES = 251
_FACTORS = 6  # ranks that may contribute a 2 to a product: 2**6 fits every dtype

Works = Sequence[Any]
"""What a call leaves to wait for: works of torch.distributed, or None for what is done."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a collective. ``count`` is NCCL's count argument, in elements."""

    rank: int
    world: int
    count: int
    root: int = 0


class Piece(NamedTuple):
    """Elements ``start`` to ``start + length`` of the input of rank ``source`` (None: of the reduction of all inputs)."""

    source: int | None
    start: int
    length: int


@dataclass(frozen=True)
class Numbers:
    """The inputs of all ranks, by position. ``redop`` None: nothing is reduced.

    Raises UsageError (``bad-dtype``) when so many ranks cannot be summed exactly in ``dtype``.
    """

    world: int
    dtype: torch.dtype
    redop: str | None = None
    seed: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self._span < 2:
            raise UsageError(
                f"{self.redop} over {self.world} ranks has no inputs whose result is exact in {_name(self.dtype)}",
                code="bad-dtype",
                fix="use a wider dtype, or fewer ranks",
            )

    @property
    def _span(self) -> int:
        """How many different values an element takes."""
        exact = EXACT[self.dtype]
        limit = {"sum": exact // self.world, "avg": exact // self.world**2, "prod": 1}.get(self.redop or "", exact)
        return min(_VALUES, limit + 1)

    def of(self, rank: int, start: int, length: int) -> Tensor:
        """int64 ``[length]``: rank ``rank``'s elements from ``start`` on."""
        z = (
            torch.arange(start, start + length, device=self.device) * 0x9E3779B1
            + (rank + 1) * 0x85EBCA6B
            + self.seed * 0xC2B2AE35
        )
        z = (z ^ (z >> 15)) & 0x7FFFFFFF
        z = (z * 0x2C1B3C6D) & 0x7FFFFFFF
        z = (z ^ (z >> 12)) % self._span
        if self.redop == "prod":
            return z + 1 if rank < _FACTORS else torch.ones_like(z)
        return z * self.world if self.redop == "avg" else z

    def reduced(self, start: int, length: int) -> Tensor:
        """int64 ``[length]``: the reduction over all ranks."""
        total = self.of(0, start, length)
        for rank in range(1, self.world):
            total = _COMBINE[self.redop or "sum"](total, self.of(rank, start, length))
        return total // self.world if self.redop == "avg" else total

    def chunks(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Tensor]]:
        """(position, values in ``dtype``) of the pieces laid one after the other, at most CHUNK elements at a time."""
        position = 0
        for source, start, length in pieces:
            for offset in range(0, length, CHUNK):
                size = min(CHUNK, length - offset)
                where = (start + offset, size)
                values = self.reduced(*where) if source is None else self.of(source, *where)
                yield position + offset, values.to(torch.float32).to(self.dtype) if self.dtype in FP8 else values.to(self.dtype)
            position += length

    def write(self, out: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Fill ``out [N]`` with the pieces and return it."""
        for position, values in self.chunks(pieces):
            out[position : position + len(values)].copy_(values)
        return out


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip
REDOPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
}


@dataclass
class Buffers:
    """What one call works on: ``input`` and ``output``, one-dimensional; in place they overlap. ``world``: to cut parts."""

    input: Tensor
    output: Tensor
    world: int

    @cached_property
    def input_parts(self) -> list[Tensor]:
        """The input cut evenly for the ranks; empty where there is none."""
        return list(self.input.chunk(self.world)) if self.input.numel() else []

    @cached_property
    def output_parts(self) -> list[Tensor]:
        """The output cut evenly for the ranks; empty where there is none."""
        return list(self.output.chunk(self.world)) if self.output.numel() else []

    def to_output(self) -> Tensor:
        """The output, holding the input: a copy when the call is out of place, as torch.distributed has it done."""
        if self.input.numel() and self.input.data_ptr() != self.output.data_ptr():
            self.output.copy_(self.input)
        return self.output


@dataclass(frozen=True)
class Ask:
    """Arguments of a call beside its buffers. ``root`` is a rank of the group, ``later``: issue, do not wait."""

    group: Group
    place: Place
    redop: str | None = None
    later: bool = False

    @property
    def reduce_op(self) -> Any:
        """torch.distributed's name of the reduction."""
        return REDOPS[self.redop or "sum"]

    @property
    def root(self) -> int:
        """The root's global rank."""
        return self.group.ranks[self.place.root]

    @property
    def how(self) -> dict[str, Any]:
        """The keywords that every collective of torch.distributed takes."""
        return {"group": self.group.process_group, "async_op": self.later}


@dataclass(frozen=True)
class Case:
    """One collective. Factors are functions of the number of ranks n; see docs/bench_collectives.md for how to add one."""

    name: str
    busbw: Callable[[int], float]
    """busbw / algbw."""
    sends: Callable[[Place], int]
    """Elements of this rank's input."""
    receives: Callable[[Place], list[Piece]]
    """This rank's output, piece by piece; empty where the rank gets nothing."""
    call: Callable[[Ask, Buffers], Works]
    """Ask torch.distributed for it."""
    parts: bool = False
    """Whether ``count`` is of one rank's part, so that the size is count x n."""
    reduces: bool = False
    rooted: bool = False
    in_place: str | None = None
    """How buffers overlap in place: ``same``, ``input in output`` or ``output in input`` (at rank x count); None: never."""
    capturable: bool = True
    """Whether a CUDA graph can hold it."""
    powers_of_two: bool = False
    """Whether the number of ranks must be a power of two."""
    wire: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    """Bytes of the busiest port / size, by kind of algorithm (``one-shot``, ``multicast``), where it is not ``busbw``."""

    @property
    def sized(self) -> bool:
        """Whether it moves data at all (barrier does not)."""
        return any(self.receives(Place(rank, 2, 1)) for rank in range(2))

    def count(self, nbytes: int, world: int, itemsize: int) -> int:
        """NCCL's count for ``nbytes`` of the whole tensor, rounded down, at least 1; 0 when nothing is moved."""
        return max(1, nbytes // itemsize // (world if self.parts else 1)) if self.sized else 0

    def nbytes(self, count: int, world: int, itemsize: int) -> int:
        """nccl-tests' size of ``count`` elements."""
        return count * itemsize * (world if self.parts else 1)

    def wire_factor(self, world: int, kind: str = "ring") -> float:
        """Bytes that the busiest port carries one way / size, for an algorithm of ``kind``."""
        return self.wire.get(kind, self.busbw)(world)

    def numbers(
        self, world: int, dtype: torch.dtype, redop: str = "sum", seed: int = 0, device: torch.device | str = "cpu"
    ) -> Numbers:
        """The inputs of all ranks. Raises UsageError (``bad-dtype``) as :class:`Numbers`."""
        return Numbers(world, dtype, redop if self.reduces else None, seed, device)

    def inputs(
        self, rank: int, world: int, count: int, dtype: torch.dtype, redop: str = "sum", seed: int = 0, root: int = 0
    ) -> Tensor:
        """This rank's input ``[sends]`` on the CPU; empty where the rank hands in nothing."""
        length = self.sends(Place(rank, world, count, root))
        return self.numbers(world, dtype, redop, seed).write(torch.empty(length, dtype=dtype), [Piece(rank, 0, length)])

    def expected(
        self, rank: int, world: int, count: int, dtype: torch.dtype, redop: str = "sum", seed: int = 0, root: int = 0
    ) -> Tensor:
        """What this rank's output must hold, on the CPU; empty where the rank gets nothing."""
        pieces = self.receives(Place(rank, world, count, root))
        out = torch.empty(sum(piece.length for piece in pieces), dtype=dtype)
        return self.numbers(world, dtype, redop, seed).write(out, pieces)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------- sizes and calls


def _ring(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


def _count(p: Place) -> int:
    return p.count


def _total(p: Place) -> int:
    return p.count * p.world


def _every(p: Place, start: int = 0) -> list[Piece]:
    """One part of each rank's input."""
    return [Piece(rank, start, p.count) for rank in range(p.world)]


def uneven(source: int, target: int, world: int, count: int) -> int:
    """Elements that ``source`` sends ``target`` in all_to_all_uneven: ``count`` on average, other amounts for each distance.

    The last rank sends the others half, so that even two ranks differ; no rank sends or receives more than count x n.
    """
    if source == target:
        return count
    amount = count + count // (2 * world) * (2 * ((target - source) % world) - world)
    return amount // 2 if source == world - 1 else amount


def _uneven_sent(p: Place) -> list[int]:
    return [uneven(p.rank, target, p.world, p.count) for target in range(p.world)]


def _uneven_pieces(p: Place) -> list[Piece]:
    return [
        Piece(source, sum(uneven(source, q, p.world, p.count) for q in range(p.rank)), uneven(source, p.rank, p.world, p.count))
        for source in range(p.world)
    ]


def _all_to_all_uneven(a: Ask, b: Buffers) -> Works:
    got = [piece.length for piece in _uneven_pieces(a.place)]
    return [dist.all_to_all_single(b.output, b.input, got, _uneven_sent(a.place), **a.how)]


def _reduce(a: Ask, b: Buffers) -> Works:
    tensor = b.to_output() if b.output.numel() else b.input
    return [dist.reduce(tensor, a.root, op=a.reduce_op, **a.how)]


def _messages(a: Ask, send: Sequence[tuple[int, Tensor]], receive: Sequence[tuple[int, Tensor]]) -> Works:
    """Messages between ranks of the group, all at once: (to, what) and (from, where)."""
    both = [(dist.isend, sent) for sent in send] + [(dist.irecv, got) for got in receive]
    group = a.group.process_group
    ops = [dist.P2POp(how, tensor, a.group.ranks[peer], group) for how, (peer, tensor) in both]
    return finished(dist.batch_isend_irecv(ops) if ops else (), a)


def _send_recv(a: Ask, b: Buffers) -> Works:
    """To the next rank of the ring, from the one before."""
    rank, n = a.place.rank, a.place.world
    return _messages(a, [((rank + 1) % n, b.input)], [((rank - 1) % n, b.output)])


def _others(p: Place) -> list[int]:
    """All ranks but the root."""
    return [rank for rank in range(p.world) if rank != p.root]


def _incast(a: Ask, b: Buffers) -> Works:
    """Every rank to the root at once, by messages."""
    if a.place.rank != a.place.root:
        return _messages(a, [(a.place.root, b.input)], [])
    return _messages(a, [], list(zip(_others(a.place), b.output.split(a.place.count), strict=True)))


def _multicast(a: Ask, b: Buffers) -> Works:
    """The root to every rank at once, by messages."""
    if a.place.rank != a.place.root:
        return _messages(a, [], [(a.place.root, b.output)])
    return _messages(a, [(rank, b.input) for rank in _others(a.place)], [])


def _hypercube(a: Ask, b: Buffers) -> Works:
    """An all-gather in log2(n) steps: the partner across one dimension of the cube gets all that is here by now."""
    rank, count = a.place.rank, a.place.count
    b.output[rank * count : (rank + 1) * count].copy_(b.input)
    width = 1
    while width < a.place.world:
        here = rank & ~(width - 1)
        there = here ^ width
        mine, theirs = (b.output[first * count : (first + width) * count] for first in (here, there))
        _messages(replace(a, later=False), [(rank ^ width, mine)], [(rank ^ width, theirs)])
        width *= 2
    return ()


def finished(works: Works, a: Ask) -> Works:
    """``works``, waited for unless ``a`` says later; for calls that torch.distributed always starts and never finishes."""
    for work in () if a.later else works:
        work.wait()
    return works if a.later else ()


_ALL = [
    Case(
        "all_reduce", lambda n: 2 * (n - 1) / n, _count, lambda p: [Piece(None, 0, p.count)],
        lambda a, b: [dist.all_reduce(b.to_output(), op=a.reduce_op, **a.how)],
        reduces=True, in_place="same", wire={"one-shot": lambda n: n - 1.0, "multicast": lambda n: 1 + 1 / n},
    ),
    Case(
        "all_gather", _ring, _count, _every, lambda a, b: [all_gather_single(b.output, b.input, **a.how)],
        parts=True, in_place="input in output",
    ),
    Case(
        "reduce_scatter", _ring, _total, lambda p: [Piece(None, p.rank * p.count, p.count)],
        lambda a, b: [reduce_scatter_single(b.output, b.input, op=a.reduce_op, **a.how)],
        parts=True, reduces=True, in_place="output in input",
    ),
    Case(
        "broadcast", _one, lambda p: p.count if p.rank == p.root else 0, lambda p: [Piece(p.root, 0, p.count)],
        lambda a, b: [dist.broadcast(b.to_output(), a.root, **a.how)],
        rooted=True, in_place="same", wire={"one-shot": lambda n: n - 1.0},
    ),
    Case(
        "reduce", _one, _count, lambda p: [Piece(None, 0, p.count)] if p.rank == p.root else [], _reduce,
        reduces=True, rooted=True, in_place="same",
    ),
    Case(
        "gather", _ring, _count, lambda p: _every(p) if p.rank == p.root else [],
        lambda a, b: [dist.gather(b.input, b.output_parts or None, a.root, **a.how)],
        parts=True, rooted=True, in_place="input in output",
    ),
    Case(
        "scatter", _ring, lambda p: _total(p) if p.rank == p.root else 0, lambda p: [Piece(p.root, p.rank * p.count, p.count)],
        lambda a, b: [dist.scatter(b.output, b.input_parts or None, a.root, **a.how)],
        parts=True, rooted=True, in_place="output in input",
    ),
    Case(
        "all_to_all", _ring, _total, lambda p: _every(p, p.rank * p.count),
        lambda a, b: [dist.all_to_all_single(b.output, b.input, **a.how)], parts=True,
    ),
    Case("all_to_all_uneven", _ring, lambda p: sum(_uneven_sent(p)), _uneven_pieces, _all_to_all_uneven, parts=True),
    Case("send_recv", _one, _count, lambda p: [Piece((p.rank - 1) % p.world, 0, p.count)], _send_recv),
    Case(
        "incast", _ring, lambda p: p.count if p.rank != p.root else 0,
        lambda p: [Piece(rank, 0, p.count) for rank in _others(p)] if p.rank == p.root else [], _incast,
        parts=True, rooted=True,
    ),
    Case(
        "multicast", lambda n: n - 1.0, lambda p: p.count if p.rank == p.root else 0,
        lambda p: [Piece(p.root, 0, p.count)] if p.rank != p.root else [], _multicast, rooted=True,
    ),
    Case("hypercube", _ring, _count, _every, _hypercube, parts=True, powers_of_two=True),
    Case("barrier", lambda n: 0.0, lambda p: 0, lambda p: [], lambda a, b: [dist.barrier(**a.how)], capturable=False),
]  # fmt: skip

CASES: dict[str, Case] = {case.name: case for case in _ALL}
"""Every collective that ``crosscut bench collectives`` knows, by name."""
