"""The kernels on virtual ranks of one GPU: exact values at every size, odd inputs, races, deadlines."""

from __future__ import annotations

import random as dice
import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.errors import CollectiveTimeout
from crosscut.kernels.exchange import Exchange

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
if torch.cuda.is_available():
    from virtual_ranks import VirtualRanks, random, reduced, same_bits

WORLDS = [2, 4, 8]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [1, 7, 8, 9, 1000, 4096, 12345, 65536]


@cache
def ranks(world: int) -> VirtualRanks:
    return VirtualRanks(world)


def poisoned(like: Tensor, *shape: int) -> Tensor:
    out = torch.empty(shape or like.shape, dtype=like.dtype, device=like.device)
    out.view(torch.uint8).fill_(0xA5)
    return out


@pytest.mark.parametrize("algorithm", ["lanes", "lanes_two_shot", "blocks", "blocks_two_shot"])
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce(world: int, dtype: torch.dtype, op: str, algorithm: str) -> None:
    big = [300_001, 2_000_000] if algorithm.startswith("blocks") else []
    for size in SIZES + big:
        xs = random(world, (size,), dtype, seed=size)
        expected = reduced(xs, op)
        outs = ranks(world).run(lambda exchange, rank, xs=xs: exchange.all_reduce(xs[rank], poisoned(xs[rank]), op, algorithm))
        for rank, out in enumerate(outs):
            assert same_bits(out, expected), f"size {size}, rank {rank}"
        kept = random(world, (size,), dtype, seed=size)
        assert all(same_bits(x, k) for x, k in zip(xs, kept, strict=True)), "an input was written"
        ranks(world).run(lambda exchange, rank, xs=xs: exchange.all_reduce(xs[rank], xs[rank], op, algorithm))
        for x in xs:
            assert same_bits(x, expected), f"in place, size {size}"


@pytest.mark.parametrize("algorithm", ["lanes", "lanes_two_shot", "blocks", "blocks_two_shot"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_unaligned_tensors(dtype: torch.dtype, algorithm: str) -> None:
    for offset in (1, 3):
        xs = [x[offset:] for x in random(2, (5003,), dtype)]
        outs = ranks(2).run(
            lambda exchange, rank, xs=xs, o=offset: exchange.all_reduce(
                xs[rank], poisoned(xs[rank], 5003)[o:], "sum", algorithm
            )
        )
        for out in outs:
            assert same_bits(out, reduced(xs, "sum"))


@pytest.mark.parametrize("algorithm", ["lanes", "lanes_two_shot", "blocks", "blocks_two_shot"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world", [2, 8])
def test_zeros_infinities_and_nans_are_carried_right(world: int, dtype: torch.dtype, algorithm: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[-0.0, -0.0], [0.0, -0.0], [inf, 1.0], [inf, -inf], [nan, 1.0], [-inf, -inf], [1.0, -1.0], [3e38, 3e38]]
    )
    xs = [rows[:, min(rank, 1)].to("cuda", dtype).repeat(50) for rank in range(world)]
    whole = torch.int16 if xs[0].element_size() == 2 else torch.int32
    xs[0].view(whole)[9::16] = -1  # all ones: the NaN that means "not here yet"
    for op in ("sum", "max"):
        outs = ranks(world).run(lambda exchange, rank, op=op: exchange.all_reduce(xs[rank], poisoned(xs[rank]), op, algorithm))
        for out in outs:
            assert same_bits(out, reduced(xs, op)), op
            assert same_bits(out, outs[0])


@pytest.mark.parametrize("algorithm", ["lanes", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64])
@pytest.mark.parametrize("world", WORLDS)
def test_moves_are_exact_to_the_bit(world: int, dtype: torch.dtype, algorithm: str) -> None:
    sizes = [1, 3, 8, 999, 4096, 10_000] + ([400_003] if algorithm == "blocks" else [])  # lanes of all ranks on one GPU
    for size in sizes:
        xs = random(world, (size,), dtype, seed=size)
        if not dtype.is_floating_point:
            xs[0].fill_(-1)
        parts = random(world, (world, size), dtype, seed=size + 1)
        root = size % world
        for out in ranks(world).run(
            lambda exchange, rank, xs=xs, n=size: exchange.all_gather(xs[rank], poisoned(xs[rank], world, n), algorithm)
        ):
            assert same_bits(out, torch.stack(xs)), f"all_gather {size}"
        outs = ranks(world).run(
            lambda exchange, rank, parts=parts: exchange.all_to_all(parts[rank], poisoned(parts[rank]), algorithm)
        )
        for rank, out in enumerate(outs):
            assert same_bits(out, torch.stack([part[rank] for part in parts])), f"all_to_all {size}"
        for out in ranks(world).run(
            lambda exchange, rank, xs=xs, root=root: exchange.broadcast(xs[rank], poisoned(xs[rank]), root, algorithm)
        ):
            assert same_bits(out, xs[root]), f"broadcast {size}"


@pytest.mark.parametrize("algorithm", ["lanes", "blocks"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world: int, dtype: torch.dtype, algorithm: str) -> None:
    for op in ("sum", "max"):
        for size in (1, 5, 8, 1024, 20_001, *([200_003] if algorithm == "blocks" else [])):
            xs = random(world, (world, size), dtype, seed=size)
            outs = ranks(world).run(
                lambda exchange, rank, xs=xs, n=size, op=op: exchange.reduce_scatter(
                    xs[rank], poisoned(xs[rank], n), op, algorithm
                )
            )
            for rank, out in enumerate(outs):
                assert same_bits(out, reduced([x[rank] for x in xs], op)), f"{op} {size}"


@pytest.mark.parametrize("algorithm", ["lanes", "blocks"])
@pytest.mark.parametrize("world", WORLDS)
def test_parts_side_by_side(world: int, algorithm: str) -> None:
    """Gathering and scattering along the last dim needs no copy before or after."""
    for tokens, width in ((1, 8), (3, 16), (32, 512), (5, 1000)):
        xs = random(world, (tokens, width), torch.bfloat16, seed=width)
        row = width * 2
        for out in ranks(world).run(
            lambda exchange, rank, xs=xs, row=row, t=tokens, w=width: exchange.all_gather(
                xs[rank], poisoned(xs[rank], t, world * w), algorithm, row
            )
        ):
            assert same_bits(out, torch.cat(xs, 1))
        wide = random(world, (tokens, world * width), torch.bfloat16, seed=tokens)
        outs = ranks(world).run(
            lambda exchange, rank, wide=wide, row=row, t=tokens, w=width: exchange.reduce_scatter(
                wide[rank], poisoned(wide[rank], t, w), "sum", algorithm, row
            )
        )
        for rank, out in enumerate(outs):
            assert same_bits(out, reduced([x.chunk(world, 1)[rank].contiguous() for x in wide], "sum"))


@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_residual_norm(world: int, dtype: torch.dtype, layer_norm: bool) -> None:
    for tokens, hidden in ((1, 4096), (8, 4096), (3, 576), (2, 8192), (1, 16384), (7, 8)):
        for with_bias in (False, True):
            check_norm(world, dtype, layer_norm, tokens, hidden, with_bias)


def check_norm(world: int, dtype: torch.dtype, layer_norm: bool, tokens: int, hidden: int, with_bias: bool) -> None:
    xs = random(world, (tokens, hidden), dtype, seed=tokens)
    residual = random(1, (tokens, hidden), dtype, seed=1)[0]
    gamma, shift, bias = random(3, (hidden,), dtype, seed=2)
    extra, beta = bias if with_bias else None, shift if layer_norm else None

    def body(exchange: Exchange, rank: int) -> tuple[Tensor, Tensor]:
        out, z = poisoned(residual), poisoned(residual)
        exchange.all_reduce_norm(xs[rank], residual, gamma, 1e-5, out, z, extra, beta, layer_norm)
        return out, z

    whole = reduced(xs, "sum")
    expected = residual + (whole + bias if with_bias else whole)
    exact = (
        F.layer_norm(expected.double(), (hidden,), gamma.double(), shift.double(), 1e-5)
        if layer_norm
        else F.rms_norm(expected.double(), (hidden,), gamma.double(), 1e-5)
    )
    results = ranks(world).run(body)
    for out, z in results:
        assert same_bits(z, expected)
        assert same_bits(out, results[0][0])
        error = float((out.double() - exact).norm() / exact.norm())
        assert error < 2 * torch.finfo(dtype).eps, (tokens, hidden, error)


def test_graph_replays_and_eager_calls_interleave() -> None:
    """Inputs change before every replay, so a replay that reads an earlier call's data shows."""
    world, size = 4, 3000
    group = VirtualRanks(world)
    xs = random(world, (size,), torch.bfloat16)
    outs = [[torch.empty_like(x) for _ in range(3)] for x in xs]

    def calls(exchange: Exchange, rank: int) -> None:
        exchange.all_reduce(xs[rank], outs[rank][0], "sum", "lanes")
        exchange.all_reduce(outs[rank][0], outs[rank][1], "max", "lanes_two_shot")
        exchange.all_reduce(xs[rank], outs[rank][2], "sum", "blocks")

    for algorithm, op in (("lanes", "sum"), ("lanes_two_shot", "max"), ("blocks", "sum")):  # compile one by one
        group.run(lambda exchange, rank, a=algorithm, op=op: exchange.all_reduce(xs[rank], outs[rank][0], op, a))
    graphs = []
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            calls(group.ranks[rank], rank)
        graphs.append(graph)
    for step in range(50):
        fresh = random(world, (size,), torch.bfloat16, seed=step)
        for x, f in zip(xs, fresh, strict=True):
            x.copy_(f)
        replay = step % 3 != 0
        group.run(lambda exchange, rank, replay=replay: graphs[rank].replay() if replay else calls(exchange, rank))
        expected = reduced(xs, "sum")
        for out in outs:
            assert same_bits(out[0], expected)
            assert same_bits(out[1], expected)
            assert same_bits(out[2], expected)


def mixed_call(group: VirtualRanks, roll: dice.Random, step: int) -> Callable[[], None]:
    """One random call on all ranks, with random delays; the returned function checks its result."""
    world, size = group.size, roll.choice([1, 5, 64, 1000, 4096, 9999, 20_000])
    dtype, kind = roll.choice(FLOATS), roll.randrange(6)
    delays = [roll.choice([0, 0, 2000, 40_000]) for _ in range(world)]
    algorithm = roll.choice(["lanes", "blocks"])
    places = torch.arange(size * (world if kind in (2, 3) else 1), device="cuda")
    xs = [((places * (rank + 3) + step) % 17 - 8).to(dtype) for rank in range(world)]
    results: list[Tensor] = []

    def body(exchange: Exchange, rank: int) -> Tensor:
        if delays[rank]:
            torch.cuda._sleep(delays[rank])
        x = xs[rank]
        if kind == 0:
            return exchange.all_reduce(x, poisoned(x), "sum", algorithm)
        if kind == 1:
            return exchange.all_reduce(x, poisoned(x), "max", f"{algorithm}_two_shot")
        if kind == 2:
            return exchange.reduce_scatter(x, poisoned(x, size), "sum", algorithm)
        if kind == 3:
            return exchange.all_to_all(x, poisoned(x), algorithm)
        if kind == 4:
            return exchange.broadcast(x, poisoned(x), step % world, algorithm)
        return exchange.all_gather(x, poisoned(x, world, size), algorithm)

    for rank in range(world):
        group.streams[rank].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(group.streams[rank]):
            results.append(body(group.ranks[rank], rank))

    def check() -> None:
        for rank, out in enumerate(results):
            parts = [x.view(world, -1)[rank] for x in xs] if kind in (2, 3) else []
            expected = (
                reduced(xs, "sum") if kind == 0 else reduced(xs, "max") if kind == 1 else reduced(parts, "sum") if kind == 2
                else torch.cat(parts) if kind == 3 else xs[step % world] if kind == 4 else torch.stack(xs)
            )  # fmt: skip
            assert same_bits(out, expected), f"step {step}, kind {kind}, {algorithm}, size {size}, {dtype}, rank {rank}"

    return check


@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_mixed_calls_with_random_delays(world: int) -> None:
    group, roll = VirtualRanks(world), dice.Random(world)
    for batch in range(100):
        checks = [mixed_call(group, roll, 10 * batch + i) for i in range(10)]
        torch.cuda.synchronize()
        for check in checks:
            check()
        for exchange in group.ranks:
            exchange.workspace.check()


def test_two_groups_and_changing_streams_do_not_mix() -> None:
    first, second = VirtualRanks(2), VirtualRanks(2)
    other = [torch.cuda.Stream() for _ in range(2)]
    xs, ys = random(2, (5000,), torch.bfloat16, 1), random(2, (5000,), torch.bfloat16, 2)
    first.run(lambda exchange, rank: exchange.all_reduce(xs[rank], torch.empty_like(xs[rank]), "sum", "lanes"))
    second.run(lambda exchange, rank: exchange.all_reduce(ys[rank], torch.empty_like(ys[rank]), "sum", "blocks"))
    outs: list[tuple[Tensor, Tensor]] = []
    for step in range(60):
        for rank in range(2):
            with torch.cuda.stream(first.streams[rank] if step % 2 else other[rank]):
                a = first.ranks[rank].all_reduce(xs[rank], torch.empty_like(xs[rank]), "sum", "lanes")
                b = second.ranks[rank].all_reduce(ys[rank], torch.empty_like(ys[rank]), "sum", "blocks")
                outs.append((a, b))
    torch.cuda.synchronize()
    for a, b in outs:
        assert same_bits(a, reduced(xs, "sum"))
        assert same_bits(b, reduced(ys, "sum"))


@pytest.mark.parametrize("algorithm", ["lanes", "lanes_two_shot", "blocks", "blocks_two_shot"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_never_calls_is_named_before_the_deadline_twice_over(world: int, algorithm: str) -> None:
    group = VirtualRanks(world, deadline=0.4)
    xs = random(world, (9000,), torch.bfloat16)
    group.run(lambda exchange, rank: exchange.all_reduce(xs[rank], poisoned(xs[rank]), "sum", algorithm))
    start = time.monotonic()
    group.run(
        lambda exchange, rank: exchange.all_reduce(xs[rank], poisoned(xs[rank]), "sum", algorithm), only=list(range(world - 1))
    )
    assert 0.3 < time.monotonic() - start < 1.5
    for rank in range(world - 1):
        with pytest.raises(CollectiveTimeout, match=rf"rank {rank} of group 'virtual' .*all_reduce.* rank {world - 1} of the"):
            group.ranks[rank].all_reduce(xs[rank], xs[rank])
    group.ranks[world - 1].workspace.check()


def test_the_first_launch_of_a_kernel_waits_longer() -> None:
    """A peer may still compile it. The error names the deadline that held."""
    xs = random(2, (9000,), torch.bfloat16)
    for warm, seconds in ((False, 1.5), (True, 0.4)):
        group = VirtualRanks(2, deadline=0.4, first=1.5)
        for algorithm in ("lanes", "blocks") if warm else ("blocks",):
            group.run(lambda exchange, rank, a=algorithm: exchange.all_reduce(xs[rank], poisoned(xs[rank]), "sum", a))
        start = time.monotonic()
        group.run(lambda exchange, rank: exchange.all_reduce(xs[rank], poisoned(xs[rank])), only=[0])
        assert seconds - 0.1 < time.monotonic() - start < seconds + 0.5
        with pytest.raises(CollectiveTimeout, match=f"waited more than {seconds:g} s in all_reduce"):
            group.ranks[0].workspace.check()


def test_a_late_rank_is_waited_for() -> None:
    group = VirtualRanks(2, deadline=5)
    xs = random(2, (9000,), torch.bfloat16)

    def late(exchange: Exchange, rank: int) -> Tensor:
        if rank == 1:
            torch.cuda._sleep(600_000_000)  # about 0.3 s
        return exchange.all_reduce(xs[rank], poisoned(xs[rank]))

    for out in group.run(late):
        assert same_bits(out, reduced(xs, "sum"))


def test_a_rank_that_calls_with_another_size_is_named() -> None:
    group = VirtualRanks(2, deadline=0.4)
    xs = [random(1, (9000,), torch.bfloat16)[0], random(1, (3000,), torch.bfloat16)[0]]
    group.run(lambda exchange, rank: exchange.all_reduce(xs[rank], poisoned(xs[rank])))
    with pytest.raises(CollectiveTimeout, match="nothing came from rank 1"):
        group.ranks[0].workspace.check()


def test_a_broken_group_ends_its_kernels_at_once() -> None:
    group = VirtualRanks(2, deadline=0.4)
    xs = random(2, (9000,), torch.bfloat16)
    group.run(lambda exchange, rank: exchange.all_reduce(xs[rank], poisoned(xs[rank])))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.streams[0]):
        for _ in range(20):
            group.ranks[0].all_reduce(xs[0], xs[0])
    start = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 1.2, "twenty kernels waited one after the other"
    with pytest.raises(CollectiveTimeout):
        group.ranks[0].workspace.check()
