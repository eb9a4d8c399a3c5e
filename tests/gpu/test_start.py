"""The asynchronous form over the kernels: on a side stream, in the group's order, in CUDA graphs, its memory kept."""

from __future__ import annotations

import random as dice
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut import collectives as cc
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.distributed.mesh import make_mesh
from crosscut.kernels.exchange import Exchange
from crosscut.kernels.order import Aside, capture_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
if torch.cuda.is_available():
    from virtual_ranks import VirtualRanks, random, reduced, same_bits

SLEEP = 400_000_000  # clock ticks: about 0.2 s


def begin(exchange: Exchange, x: Tensor, algorithm: str = "lanes", op: str = "sum") -> tuple[Tensor, Aside]:
    begun = exchange.aside(lambda: exchange.all_reduce(x, torch.empty_like(x), op, algorithm), x)
    assert begun is not None
    return begun


def warm(group: VirtualRanks, xs: list[Tensor], *kinds: tuple[str, str]) -> None:
    for algorithm, op in kinds:
        group.run(lambda exchange, rank, a=algorithm, o=op: exchange.all_reduce(xs[rank], torch.empty_like(xs[rank]), o, a))


def test_the_exchange_runs_while_the_callers_stream_is_busy() -> None:
    group, xs = VirtualRanks(2), random(2, (9000,), torch.bfloat16)
    warm(group, xs, ("lanes", "sum"))
    for stream in group.streams:
        stream.synchronize()
    begun, busy = [], []
    for rank in range(2):
        with torch.cuda.stream(group.streams[rank]):
            begun.append(begin(group.ranks[rank], xs[rank]))
            torch.cuda._sleep(SLEEP)
            busy.append(torch.cuda.Event())
            busy[rank].record()
    for exchange in group.ranks:
        exchange.order.side.synchronize()
    assert not any(event.query() for event in busy), "the exchange waited for the work behind it"
    for rank in range(2):
        with torch.cuda.stream(group.streams[rank]):
            begun[rank][1].wait()
    torch.cuda.synchronize()
    assert all(same_bits(out, reduced(xs, "sum")) for out, _ in begun)


@pytest.mark.parametrize(("elements", "compute"), [(9000, lambda a: a @ a), (1 << 19, lambda a: a * a)])
def test_the_caller_computes_on_while_the_exchange_waits_for_a_rank(elements: int, compute: Any) -> None:
    """9 blocks leave room for a multiply; 512, as many as ever wait, lie on every multiprocessor and leave room for less."""
    group, xs = VirtualRanks(2), random(2, (elements,), torch.bfloat16)
    warm(group, xs, ("lanes", "sum"))
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    expected = compute(a).float().sum()  # loads what is called below
    torch.cuda.synchronize()
    with torch.cuda.stream(group.streams[0]):
        out, work = begin(group.ranks[0], xs[0])
        found, done = compute(a).float().sum(), torch.cuda.Event()
        done.record()
    end = time.monotonic() + 3
    while not done.query() and time.monotonic() < end:
        time.sleep(0.01)
    computed = done.query()
    with torch.cuda.stream(group.streams[1]):  # rank 1 comes, whatever was seen
        other = group.ranks[1].all_reduce(xs[1], torch.empty_like(xs[1]))
    with torch.cuda.stream(group.streams[0]):
        work.wait()
    torch.cuda.synchronize()
    assert computed, "the caller's kernels stood behind the exchange"
    assert found == expected
    assert same_bits(out, reduced(xs, "sum"))
    assert same_bits(other, out)


def test_it_starts_after_what_makes_its_input_and_the_waiter_after_it() -> None:
    group, xs = VirtualRanks(2), random(2, (9000,), torch.bfloat16)
    warm(group, xs, ("lanes", "sum"))

    def body(exchange: Exchange, rank: int) -> Tensor:
        x = torch.zeros_like(xs[rank])
        torch.cuda._sleep(20_000_000)
        x.copy_(xs[rank])
        out, work = begin(exchange, x)
        work.wait()
        return out.clone()

    for out in group.run(body):
        assert same_bits(out, reduced(xs, "sum"))


@pytest.mark.parametrize("world", [2, 4])
def test_started_and_plain_calls_keep_one_order(world: int) -> None:
    """Plain calls from two streams and started ones, waited for late or at once: the lanes' counters allow no overlap."""
    group, roll = VirtualRanks(world), dice.Random(world)
    others = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(world - 1))]
    first = random(world, (6000,), torch.bfloat16)
    warm(group, first, ("lanes", "sum"), ("blocks", "sum"), ("lanes_two_shot", "sum"))
    for batch in range(30):
        xs = [random(world, (roll.choice([9, 3000, 6000]),), torch.bfloat16, seed=batch * 10 + i) for i in range(8)]
        ways = [(roll.choice(["start", "plain", "elsewhere"]), roll.choice(["lanes", "blocks", "lanes_two_shot"])) for _ in xs]
        results: list[list[Tensor]] = []
        torch.cuda.synchronize()
        for rank, exchange in enumerate(group.ranks):
            outs, pending = [], []
            for (way, algorithm), parts in zip(ways, xs, strict=True):
                stream = others[rank] if way == "elsewhere" else group.streams[rank]
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(roll.choice([0, 0, 30_000]))
                    if way == "start":
                        out, work = begin(exchange, parts[rank], algorithm)
                        pending.append(work)
                    else:
                        out = exchange.all_reduce(parts[rank], torch.empty_like(parts[rank]), "sum", algorithm)
                outs.append(out)
            for work in pending:
                work.wait()
            results.append(outs)
        torch.cuda.synchronize()
        for outs in results:
            for out, parts in zip(outs, xs, strict=True):
                assert same_bits(out, reduced(parts, "sum")), (batch, ways)


def test_graphs_hold_started_calls() -> None:
    """Fork and join inside a capture, several of them, with a plain call before the first is waited for."""
    world, group = 2, VirtualRanks(2)
    xs = random(world, (3000,), torch.bfloat16)
    warm(group, xs, ("lanes", "sum"), ("lanes", "max"), ("blocks", "sum"))
    outs: list[list[Tensor]] = []
    graphs = []

    def calls(exchange: Exchange, rank: int) -> list[Tensor]:
        one, first = begin(exchange, xs[rank])
        busy = xs[rank] + 1
        two, second = begin(exchange, xs[rank], "blocks")
        three = exchange.all_reduce(xs[rank], torch.empty_like(xs[rank]), "max")
        first.wait()
        four, third = begin(exchange, one, op="max")
        second.wait()
        third.wait()
        return [one, two, three, four, busy]

    group.run(lambda exchange, rank: begin(exchange, xs[rank])[1].wait())  # eager work on the side stream before the capture
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            assert capture_of(group.streams[rank].cuda_stream) > 0
            outs.append(calls(group.ranks[rank], rank))
        graphs.append(graph)
    assert capture_of(group.streams[0].cuda_stream) == 0
    for step in range(40):
        for x, fresh in zip(xs, random(world, (3000,), torch.bfloat16, seed=step), strict=True):
            x.copy_(fresh)
        eager = step % 4 == 0
        found = group.run(lambda exchange, rank, e=eager: calls(exchange, rank) if e else graphs[rank].replay())
        total, greatest = reduced(xs, "sum"), reduced(xs, "max")
        for one, two, three, four, _ in found if eager else outs:
            assert same_bits(one, total)
            assert same_bits(two, total)
            assert same_bits(three, greatest)
            assert same_bits(four, total)


@pytest.mark.parametrize("kept", [True, False])
def test_memory_of_a_call_that_nobody_waits_for_is_not_dealt_out(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of rank 0 lands late, after its tensor is gone: it must not land in somebody else's."""
    if not kept:
        monkeypatch.setattr(Aside, "__del__", lambda self: None)  # the fault that this is about
    group, xs = VirtualRanks(2), random(2, (30_000,), torch.bfloat16)
    warm(group, xs, ("lanes", "sum"))
    with torch.cuda.stream(group.streams[0]):
        begun = begin(group.ranks[0], xs[0])
        del begun
        later = [torch.full_like(xs[0], 7.0) for _ in range(3)]
    group.streams[0].synchronize()
    with torch.cuda.stream(group.streams[1]):
        out = group.ranks[1].all_reduce(xs[1], torch.empty_like(xs[1]))
    torch.cuda.synchronize()
    assert same_bits(out, reduced(xs, "sum"))
    assert all(bool((x == 7).all()) for x in later) == kept


def started(ctx: Any) -> str:
    """The public form, on its own and in a graph, against the plain form."""
    group = make_mesh(device=ctx.device).tp
    x = torch.randn(4, 512, device=ctx.device, generator=torch.Generator(ctx.device).manual_seed(ctx.rank))

    def calls() -> list[Tensor]:
        own = x.clone()
        pending = [
            cc.all_reduce.start(own, group, out=own), cc.all_gather.start(x, group, -1), cc.reduce_scatter.start(x, group),
            cc.broadcast.start(x, group, 1), cc.all_to_all.start(x, group),
        ]  # fmt: skip
        plain = cc.all_reduce(x, group, "max")
        return [*(p.wait() for p in pending), plain]

    plain = [
        cc.all_reduce(x, group), cc.all_gather(x, group, -1), cc.reduce_scatter(x, group), cc.broadcast(x, group, 1),
        cc.all_to_all(x, group), cc.all_reduce(x, group, "max"),
    ]  # fmt: skip
    assert all(map(torch.equal, calls(), plain))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, plain))
    last = cc.all_reduce.start(x, group)
    by = type(last._work).__name__
    assert torch.equal(last.wait(), plain[0])
    cc.barrier(group)
    return by


def test_start_goes_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "kernels")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert run(started, (), LaunchConfig(2, "gloo", "cuda", timeout=60)) == "Aside"
