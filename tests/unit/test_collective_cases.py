"""The declarations of the collectives: exact in every dtype, sized as nccl-tests does, factors equal to counted bytes."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crosscut.bench.backends import IMPLS as BUILT
from crosscut.bench.clocks import sentences
from crosscut.bench.collective_cases import CASES, EXACT, FP8, REDOPS, Buffers, Numbers, Place, uneven
from crosscut.bench.collective_timing import Mistakes, compare, poison, put_together
from crosscut.bench.collectives import slow_ranks
from crosscut.bench.pairs import Pair, pairs
from crosscut.cli import bench_collectives as cli
from crosscut.errors import UsageError
from crosscut.records import Row

WORLDS = st.integers(2, 9)


def total(place: Place, name: str) -> int:
    return sum(piece.length for piece in CASES[name].receives(place))


class Wires:
    """Counts the elements that each rank sends and receives."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)

    def send(self, src: int, dst: int, elements: int) -> None:
        if src != dst:
            self.sent[src] += elements
            self.received[dst] += elements

    @property
    def busiest(self) -> int:
        return max(*self.sent.values(), *self.received.values())


def direct(name: str, world: int, count: int, root: int) -> int:
    """Elements through the busiest port when each piece travels straight from its source."""
    wires = Wires()
    for rank in range(world):
        for piece in CASES[name].receives(Place(rank, world, count, root)):
            assert piece.source is not None
            wires.send(piece.source, rank, piece.length)
    return wires.busiest


@given(st.integers(1, 4), st.integers(1, 50))
def test_a_hypercube_carries_what_an_all_gather_does(dims: int, count: int) -> None:
    wires, world = Wires(), 2**dims
    for dim in range(dims):
        for rank in range(world):
            wires.send(rank, rank ^ 2**dim, count * 2**dim)
    case = CASES["hypercube"]
    assert wires.busiest == case.busbw(world) * case.nbytes(count, world, 1)


def ring(name: str, world: int, part: int) -> int:
    """Elements through the busiest port of the ring algorithm, played step by step on chunks of ``part`` elements."""
    wires = Wires()
    rounds = {"all_reduce": 2 * (world - 1), "reduce_scatter": world - 1, "all_gather": world - 1}[name]
    for _ in range(rounds):
        for rank in range(world):
            wires.send(rank, (rank + 1) % world, part)
    return wires.busiest


@given(WORLDS, st.integers(1, 50), st.data())
def test_busbw_is_the_bytes_through_the_busiest_port(world: int, count: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world - 1))
    straight = ("all_gather", "gather", "scatter", "all_to_all", "all_to_all_uneven", "send_recv", "incast", "multicast")
    for name in straight:
        case = CASES[name]
        assert direct(name, world, count, root) == pytest.approx(case.busbw(world) * case.nbytes(count, world, 1)), name
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        case = CASES[name]
        size = case.nbytes(count * (1 if case.parts else world), world, 1)
        assert ring(name, world, count) == pytest.approx(case.busbw(world) * size), name


@given(WORLDS, st.integers(1, 50))
def test_chains_carry_the_size_once_and_one_shot_n_minus_one_times(world: int, count: int) -> None:
    chain = Wires()
    for rank in range(world - 1):  # broadcast and reduce pass the whole tensor from neighbour to neighbour
        chain.send(rank, rank + 1, count)
    for name in ("broadcast", "reduce"):
        assert chain.busiest == CASES[name].busbw(world) * CASES[name].nbytes(count, world, 1)
    star = Wires()
    for src in range(world):
        for dst in range(world):
            star.send(src, dst, count)
    assert star.busiest == CASES["all_reduce"].wire_factor(world, "one-shot") * count
    assert direct("broadcast", world, count, 0) == CASES["broadcast"].wire_factor(world, "one-shot") * count
    assert CASES["all_reduce"].wire_factor(2, "multicast") == 1.5
    assert CASES["all_reduce"].wire_factor(8) == CASES["all_reduce"].busbw(8) == 1.75


@given(WORLDS, st.integers(0, 40))
def test_uneven_parts_fit_and_differ(world: int, count: int) -> None:
    sent = [[uneven(r, q, world, count) for q in range(world)] for r in range(world)]
    most = max(*map(sum, sent), *map(sum, zip(*sent, strict=True)))
    assert most == CASES["all_to_all_uneven"].nbytes(count, world, 1)
    assert min(map(min, sent)) >= 0
    assert count < 2 or len({size for row in sent for size in row}) > 1
    for rank in range(world):
        assert CASES["all_to_all_uneven"].sends(Place(rank, world, count)) == sum(sent[rank])
        assert total(Place(rank, world, count), "all_to_all_uneven") == sum(row[rank] for row in sent)


@given(WORLDS, st.integers(1, 1 << 20), st.sampled_from([1, 2, 4, 8]))
def test_sizes_round_down_and_name_the_same_count_again(world: int, nbytes: int, itemsize: int) -> None:
    for case in CASES.values():
        count = case.count(nbytes, world, itemsize)
        size = case.nbytes(count, world, itemsize)
        assert case.count(size, world, itemsize) == count
        assert size <= max(nbytes, itemsize * world)
        assert nbytes - size < itemsize * world or not case.sized
    assert CASES["barrier"].nbytes(CASES["barrier"].count(nbytes, world, itemsize), world, itemsize) == 0


def reduce_in(dtype: torch.dtype, parts: list[torch.Tensor], redop: str) -> torch.Tensor:
    """The reduction as a rank would do it, rounding to ``dtype`` after each step."""
    out = parts[0]
    for part in parts[1:]:
        if redop in ("max", "min"):
            out = torch.maximum(out.float(), part.float()) if redop == "max" else torch.minimum(out.float(), part.float())
        else:
            wide = torch.float64 if dtype.is_floating_point else torch.int64
            out = out.to(wide) * part.to(wide) if redop == "prod" else out.to(wide) + part.to(wide)
        out = out.to(torch.float32).to(dtype) if dtype.itemsize < 4 else out.to(dtype)
    return (out.double() / len(parts)).to(dtype) if redop == "avg" else out


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("redop", REDOPS)
def test_reductions_are_exact_in_any_order(dtype: torch.dtype, redop: str) -> None:
    for world in (2, 3, 4, 8):
        if dtype in FP8 and redop == "avg" and world * world > EXACT[dtype]:
            continue  # refused, see below
        numbers = Numbers(world, dtype, redop)
        case = CASES["all_reduce"]
        parts = [case.inputs(rank, world, 500, dtype, redop) for rank in range(world)]
        wanted = case.expected(0, world, 500, dtype, redop)
        for order in (parts, parts[::-1]):
            assert torch.equal(reduce_in(dtype, order, redop).double(), wanted.double())
        assert torch.equal(numbers.reduced(100, 7).double(), wanted[100:107].double())
        assert len(set(wanted.tolist())) > 1


def test_no_misplaced_element_looks_right() -> None:
    """Neighbours, the same place of another rank, and a shift by any part differ almost everywhere."""
    numbers = Numbers(4, torch.int32)
    mine = numbers.of(1, 0, 4096)
    for other in (numbers.of(1, 1, 4096), numbers.of(2, 0, 4096), numbers.of(1, 251, 4096), numbers.of(1, 1024, 4096)):
        assert (mine == other).float().mean() < 0.03
    assert not torch.equal(mine, Numbers(4, torch.int32, seed=1).of(1, 0, 4096))


def test_what_cannot_be_exact_is_refused() -> None:
    with pytest.raises(UsageError, match="avg over 3 ranks"):
        Numbers(3, torch.float8_e5m2, "avg")
    with pytest.raises(UsageError, match="sum over 9 ranks has no inputs whose result is exact in float8_e5m2"):
        Numbers(9, torch.float8_e5m2, "sum")


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_poison_is_never_a_right_value(dtype: torch.dtype) -> None:
    case, place = CASES["all_gather"], Place(0, 2, 600)
    numbers = case.numbers(2, dtype)
    out = torch.empty(1200, dtype=dtype)
    poison(out)
    buffers = Buffers(torch.empty(0, dtype=dtype), out, 2)
    assert compare([buffers], numbers, case.receives(place))[0] == 1200
    numbers.write(out, case.receives(place))
    assert compare([buffers], numbers, case.receives(place))[:2] == [0, -1]


def test_a_wrong_element_is_counted_located_and_weighed() -> None:
    case = CASES["all_gather"]
    numbers, pieces = case.numbers(2, torch.float32), case.receives(Place(0, 2, 50))
    right = [Buffers(torch.empty(0), case.expected(0, 2, 50, torch.float32), 2) for _ in range(2)]
    exact = float(right[1].output[70])
    right[1].output[70] += 3
    right[1].output[71] = float("nan")
    wrong = compare(right, numbers, pieces)
    assert wrong[:4] == [2, 70, exact + 3, exact]
    found = put_together([[0.0, -1.0, 0.0, 0.0, 0.0, 9.0], wrong, wrong])
    assert (found.wrong, found.error) == (4, float("inf"))
    assert found.first == {"rank": 1, "index": 70, "got": exact + 3, "expected": exact}
    assert put_together([[1, 0, 5.0, 3.0, 4.0, 16.0]]).error == 0.5
    assert put_together([[0.0, -1.0, 0.0, 0.0, 0.0, 9.0]]) == Mistakes(0, None, 0.0)


def slow_row(subject: str, own: list[float], **extra: object) -> Row:
    return Row(subject, "gloo", "eager", 3, "float32", extra={"ranks_us": own, "ranks_least_us": own, **extra})


def test_a_slow_rank_is_named_with_what_it_is_slow_in() -> None:
    slow = [slow_row("all_reduce", [10, 31, 10]), slow_row("all_reduce", [20, 62, 20]), slow_row("barrier", [9, 9, 9])]
    assert slow_ranks(slow) == [
        "Rank 1 is 3.1x slower than the others in all_reduce (gloo), by its own time, without the waiting."
    ]
    assert slow_ranks([slow_row("all_reduce", [10, 19, 10])]) == []
    assert slow_ranks([slow_row("gather", [10, 90, 10], root=1)]) == []


def test_every_pair_is_measured_one_way_and_both_ways() -> None:
    assert list(pairs(2)) == [Pair(0, 1, False), Pair(1, 0, False), Pair(0, 1, True)]
    assert len(list(pairs(5))) == 20 + 10


def test_clocks_become_sentences() -> None:
    assert sentences([[-1] * 4] * 2) == []
    assert sentences([[1980, 1755, 61, 0x4 | 0x1], [1980, 1980, 50, 0x1]]) == [
        "SM clocks before and after: rank 0 1980 to 1755 MHz, 61 C; rank 1 1980 to 1980 MHz, 50 C.",
        "The GPU of rank 0 was throttled by the power limit: its numbers are lower than it can do.",
    ]


# ----------------------------------------------------------------------------------------------------- the command line


def test_the_command_line_knows_what_the_bench_knows() -> None:
    assert set(cli.OPS) == set(CASES)
    assert tuple(REDOPS) == cli.REDOPS
    assert (*BUILT, "mpi") == cli.IMPLS  # MPI has ranks of its own
    assert {str(dtype) for dtype in EXACT} == {f"torch.{name}" for name in cli.DTYPES}


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ((None, None, None, None), ()),
        (("1K", "8K", 2.0, None), (1024, 2048, 4096, 8192)),
        (("1K", "10K", None, None), (1024, 4096)),
        (("3", "5", 1.01, None), (3, 4, 5)),
        ((None, None, None, "64K, 1K,1K"), (1024, 65536)),
    ],
)
def test_sizes_are_read(asked: tuple[str | None, str | None, float | None, str | None], sizes: tuple[int, ...]) -> None:
    assert cli.read_sizes(*asked) == sizes


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("2K", "1K", None, None), "the sizes go from 2 KiB to 1 KiB"),
        ((None, None, 1.0, None), "never reaches"),
        (("1K", None, None, "1K"), "were both given"),
        ((None, None, None, ","), "names no size"),
        ((None, None, None, "0"), "is not a size to measure"),
        (("x", None, None, None), "'x' is not a size"),
    ],
)
def test_sizes_that_cannot_be_are_refused(asked: tuple[str | None, str | None, float | None, str | None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cli.read_sizes(*asked)


@pytest.mark.parametrize(
    ("text", "name"), [("bf16", "bfloat16"), ("half", "float16"), ("f8e5m2", "float8_e5m2"), ("INT8", "int8")]
)
def test_dtypes_are_read_by_every_name(text: str, name: str) -> None:
    assert cli.read_dtype(text) == name
