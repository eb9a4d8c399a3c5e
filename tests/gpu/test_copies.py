"""Pieces moved by copy engines: values, reuse of memory, graphs and deadlines on virtual ranks of one GPU; then processes."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from virtual_copies import Virtual

import rank_checks
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.distributed.mesh import make_mesh
from crosscut.errors import CollectiveTimeout
from crosscut.kernels.copies import copy
from crosscut.layers.planning import carrier, scheduled
from crosscut.sharding import shard_sizes
from parity import assert_equal_to_rounding
from pieces_soak import OPS, Case, draw, wrong

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DTYPES = [torch.float32, torch.bfloat16]


@cache
def ranks(world: int) -> Virtual:
    return Virtual(world)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_exact_values_at_odd_sizes(world: int, op: str, dtype: torch.dtype) -> None:
    if op == "multiply_reduce" and world > 2:
        pytest.skip("sums to all ranks go by copies between two ranks only")
    virtual = ranks(world)
    for seed in range(12):
        cases = [draw(group, seed, 28, dtype, op) for group in virtual.groups]
        found = virtual.run(lambda rank, cases=cases: wrong(cases[rank].run(virtual.engines(rank))))
        assert [int(count) for count in found] == [0] * world, f"seed {seed}"


def test_without_a_piece_the_check_above_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    from crosscut.layers import pieces

    monkeypatch.setattr(pieces, "cut", lambda sizes, count, cut=pieces.cut: cut(sizes, count)[:-1])
    virtual = ranks(2)
    cases = [draw(group, 5, 28, op="multiply_gather") for group in virtual.groups]
    assert min(virtual.run(lambda rank: wrong(cases[rank].run(virtual.engines(rank))))) > 0


@pytest.mark.parametrize("tokens", [512, 1000])
@pytest.mark.parametrize("op", OPS)
def test_errors_are_those_of_the_unsplit_layer(op: str, tokens: int) -> None:
    virtual, generator = ranks(2), torch.Generator("cuda").manual_seed(tokens)
    inner, outer, sizes = 768, 520, shard_sizes(tokens, 2)
    x = torch.randn(1, tokens, inner, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(outer, inner, device="cuda", generator=generator) / inner**0.5).bfloat16()
    unsplit, exact = F.linear(x, weight), F.linear(x.double(), weight.double())
    zero = torch.zeros(outer, device="cuda", dtype=x.dtype)
    reduced = op in ("multiply_scatter", "multiply_reduce")
    xs = x.chunk(2, 2) if reduced else x.split(sizes, 1) if op == "gather_multiply" else (x, x)
    ws = weight.chunk(2, 1) if reduced else weight.chunk(2, 0) if op == "multiply_gather" else (weight, weight)
    shares = shard_sizes(outer, 2) if op == "multiply_gather" else sizes
    cases = [
        Case(op, virtual.groups[r], 4, shares, xs[r], ws[r], zero[: ws[r].shape[0]], x, unsplit, zero) for r in range(2)
    ]  # fmt: skip
    for rank, results in enumerate(virtual.run(lambda rank: cases[rank].run(virtual.engines(rank)))):
        parts = sizes if op == "multiply_scatter" else [tokens]
        mine = rank if op == "multiply_scatter" else 0
        whole = [t.split(parts, 1)[mine] for t in (unsplit, exact)]
        assert_equal_to_rounding(f"{op}, rank {rank}", results[0][0], *whole)


def test_copies_with_and_without_a_pitch() -> None:
    source = torch.randint(0, 255, (7, 33), dtype=torch.uint8, device="cuda")
    for into in (torch.zeros(7, 33, dtype=torch.uint8, device="cuda"), torch.zeros(7, 50, dtype=torch.uint8, device="cuda")):
        copy(source.data_ptr(), into[:, :33], torch.cuda.current_stream().cuda_stream)
        assert torch.equal(into[:, :33], source)
        assert int(into[:, 33:].sum()) == 0


@pytest.mark.parametrize("world", [2, 4])
def test_many_calls_with_delays(world: int) -> None:
    """Ranks run ahead of each other as far as the protocol lets them; each result is checked on the GPU."""
    virtual = ranks(world)
    cases = [[draw(group, 100 + seed, 28) for seed in range(24)] for group in virtual.groups]
    totals = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(world)]

    def call(rank: int, number: int) -> None:
        totals[rank] += wrong(cases[rank][number].flip().run(virtual.engines(rank)))

    for number in range(24):
        virtual.run(lambda rank, number=number: call(rank, number))
    for total in totals:
        total.zero_()  # the first runs, without waits, may have been wrong
    for start in range(0, 240, 8):
        torch.cuda.synchronize()  # a few calls in flight, not more than a stream's queue holds
        for number in range(start, start + 8):
            for rank in range(world):
                with torch.cuda.stream(virtual.streams[rank]):
                    if (number * 7 + rank * 3) % 5 == 0:
                        torch.cuda._sleep(100_000 * (1 + rank))
                    call(rank, number % 24)
    torch.cuda.synchronize()
    for copies in virtual.copies:
        copies.check()
    assert [int(total) for total in totals] == [0] * world


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_replayed_between_eager_calls(world: int) -> None:
    """The same half is used by replay after replay; inputs change with every call, so that old data shows."""
    virtual = ranks(world)
    ops = OPS if world == 2 else OPS[:3]
    cases = [[draw(group, 31, 28, op=op) for op in ops] for group in virtual.groups]
    totals = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(world)]

    def call(rank: int) -> None:
        for case in cases[rank]:
            totals[rank] += wrong(case.flip().run(virtual.engines(rank)))

    virtual.run(call)
    graphs = []
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=virtual.streams[rank]):
            call(rank)
        graphs.append(graph)
    torch.cuda.synchronize()
    for total in totals:
        total.zero_()
    torch.cuda.synchronize()
    for step in range(60):
        for rank in range(world):
            with torch.cuda.stream(virtual.streams[rank]):
                if (step + rank) % 4 == 0:
                    torch.cuda._sleep(100_000)
                if step % 7 == 3:
                    call(rank)
                else:
                    graphs[rank].replay()
        if step % 5 == 4:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for copies in virtual.copies:
        copies.check()
    assert [int(total) for total in totals] == [0] * world


def test_a_rank_that_does_not_come_is_named() -> None:
    virtual = Virtual(2, deadline=0.5)
    cases = [draw(group, 3, 28, op="multiply_reduce") for group in virtual.groups]
    virtual.run(lambda rank: cases[rank].run(virtual.engines(rank)))
    start = time.monotonic()
    virtual.each(lambda rank: cases[rank].run(virtual.engines(rank)), only=[0])
    assert time.monotonic() - start < 15
    with pytest.raises(
        CollectiveTimeout, match=r"rank 0 .* waited more than 0.5 s .*arrive.* nothing came from rank 1"
    ) as seen:
        virtual.each(lambda rank: cases[rank].run(virtual.engines(rank)), only=[0])
    assert seen.value.code == "rank-timeout"


# ---------------------------------------------------------------------------------- processes: torch's symmetric memory


def carried(ctx: Any) -> list[str]:
    """Who carries each operation on real ranks, once copies have been asked for."""
    group = make_mesh(device=ctx.device).tp
    x = torch.empty(1, device=ctx.device)
    found = []
    for op in OPS:
        schedule = scheduled(group, op, x, 64, 64, 64)
        found.append(f"{schedule.pieces} {type(carrier(group, schedule)).__name__}")
    return found


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    """Two processes on one GPU."""
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "kernels")
    monkeypatch.setenv("CROSSCUT_SCHEDULE", "pieces:2")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)  # each rank is a process: it may load as it goes
    return LaunchConfig(2, "gloo", "cuda", timeout=60)


def test_processes_take_the_copy_engines(shared_gpu: LaunchConfig) -> None:
    assert run(carried, (), shared_gpu) == ["2 Engines"] * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_layers_in_pieces_over_shared_memory(shared_gpu: LaunchConfig, dtype: torch.dtype) -> None:
    compared = run(rank_checks.check_layers, (dtype,), shared_gpu)
    assert compared is not None
    assert compared > 80


def test_layers_in_pieces_in_cuda_graphs(shared_gpu: LaunchConfig) -> None:
    assert run(rank_checks.check_graph, (), shared_gpu) == 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("collectives", ["auto", "nccl"])
def test_layers_in_pieces_on_two_gpus(monkeypatch: pytest.MonkeyPatch, collectives: str) -> None:
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", collectives)
    monkeypatch.setenv("CROSSCUT_SCHEDULE", "pieces:2")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    two = LaunchConfig(2, "nccl", "cuda", timeout=60)
    assert run(carried, (), two) == [f"2 {'Library' if collectives == 'nccl' else 'Engines'}"] * 4
    compared = run(rank_checks.check_layers, (torch.bfloat16,), two)
    assert compared is not None
    assert compared > 80
    assert run(rank_checks.check_graph, (), two) == 20
