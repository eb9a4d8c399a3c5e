"""Each collective against what it means, on rank threads: worlds 1 to 8, any dim, uneven sizes, both tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from crosscut import collectives as cc
from crosscut.collectives import fast
from crosscut.collectives.select import Table
from crosscut.distributed.mesh import Group, Mesh, make_mesh
from crosscut.errors import CollectiveTimeout, UsageError
from crosscut.sharding import shard_sizes

WORLDS = [1, 2, 3, 4, 8]
OnRanks = Callable[..., list[Any]]


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, different on each rank, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def everyone(world: int, *shape: int) -> Tensor:
    return torch.stack([data(rank, *shape) for rank in range(world)])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
def test_all_reduce(on_ranks: OnRanks, world: int, op: str) -> None:
    whole = everyone(world, 3, 5)
    expected = {
        "sum": whole.sum(0), "avg": whole.mean(0), "max": whole.amax(0), "min": whole.amin(0), "prod": whole.prod(0),
    }[op]  # fmt: skip

    def body(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor, bool]:
        x = data(mesh.rank, 3, 5)
        result = cc.all_reduce(x, mesh.tp, op)
        kept = torch.equal(x, data(mesh.rank, 3, 5))
        in_place = data(mesh.rank, 3, 5)
        returned = cc.all_reduce(in_place, mesh.tp, op, out=in_place)
        transposed = data(mesh.rank, 3, 5).t().contiguous().t()
        cc.all_reduce(transposed, mesh.tp, op, out=transposed)
        return result, in_place, transposed, kept and returned is in_place

    for result, in_place, transposed, as_promised in on_ranks(world, body):
        assert as_promised
        for got in (result, in_place, transposed):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_and_reduce_scatter_uneven(on_ranks: OnRanks, world: int, dim: int) -> None:
    sizes = shard_sizes(world * 2 + 1, world)
    shape = [4, 3, 5]
    shape[dim] = sum(sizes)
    whole = data(99, *shape)
    summed = everyone(world, *shape).sum(0)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        part = whole.split(sizes, dim)[mesh.rank]
        return (
            cc.all_gather(part, mesh.tp, dim, sizes),
            cc.reduce_scatter(data(mesh.rank, *shape), mesh.tp, dim, sizes=sizes),
        )

    for rank, (gathered, scattered) in enumerate(on_ranks(world, body)):
        assert torch.equal(gathered, whole)
        assert torch.equal(scattered, summed.split(sizes, dim)[rank])


@pytest.mark.parametrize("world", WORLDS)
def test_even_sizes_need_no_sizes(on_ranks: OnRanks, world: int) -> None:
    whole = data(5, 2, world * 3)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        part = whole.chunk(world, 1)[mesh.rank]
        return cc.all_gather(part, mesh.tp, 1), cc.reduce_scatter(whole, mesh.tp, 1, "avg")

    for rank, (gathered, averaged) in enumerate(on_ranks(world, body)):
        assert torch.equal(gathered, whole)
        assert torch.equal(averaged, whole.chunk(world, 1)[rank])


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_and_all_to_all(on_ranks: OnRanks, world: int) -> None:
    src = world - 1

    def body(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sent = [(mesh.rank + peer) % 3 for peer in range(world)]  # rank r sends (r + p) % 3 rows to rank p
        got = [(peer + mesh.rank) % 3 for peer in range(world)]
        x = data(mesh.rank, 2, 2 * world)
        rows = torch.full((sum(sent), 2), float(mesh.rank))
        return (
            cc.broadcast(data(mesh.rank, 4), mesh.tp, src),
            cc.all_to_all(x, mesh.tp, split_dim=1, concat_dim=1),
            cc.all_to_all(x, mesh.tp, split_dim=1, concat_dim=0),
            cc.all_to_all(rows, mesh.tp, send_sizes=sent, recv_sizes=got),
        )

    every = everyone(world, 2, 2 * world)
    for rank, (received, same_dim, other_dim, uneven) in enumerate(on_ranks(world, body)):
        assert torch.equal(received, data(src, 4))
        parts = [x.chunk(world, 1)[rank] for x in every]
        assert torch.equal(same_dim, torch.cat(parts, 1))
        assert torch.equal(other_dim, torch.cat(parts, 0))
        assert uneven[:, 0].tolist() == [peer for peer in range(world) for _ in range((peer + rank) % 3)]


@pytest.mark.parametrize("world", [2, 4])
def test_started_operations_finish_when_waited_for(on_ranks: OnRanks, world: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        pending = [cc.all_reduce.start(data(mesh.rank, 7) + i, mesh.tp) for i in range(3)]
        assert pending[0].wait() is pending[0].wait()
        return torch.stack([p.wait() for p in reversed(pending)])

    expected = torch.stack([everyone(world, 7).sum(0) + i * world for i in (2, 1, 0)])
    for got in on_ranks(world, body):
        assert torch.equal(got, expected)


def dual_loss(mesh: Mesh, x: Tensor, weights: Tensor, layout: str) -> Tensor:
    """A loss that is the same function of ``x [6, 5]`` whichever way it travels; ``weights [6, 5]``."""
    group, rank = mesh.tp, mesh.rank
    rows = [slice(sum(shard_sizes(6, group.size)[:r]), sum(shard_sizes(6, group.size)[: r + 1])) for r in range(group.size)]
    if layout == "copy, reduce":  # column then row: each rank multiplies with weights of its own
        return cc.reduce_from_tp((cc.copy_to_tp(x, group)[rows[rank]] * weights[rows[rank]]).sum(), group)
    if layout == "scatter, gather":
        return (cc.gather_from_tp(cc.scatter_to_tp(x, group, 0) ** 2, group, 0, 6) * weights).sum()
    assert layout == "sequence"
    mine = cc.scatter_to_tp(x, group, 0)  # the tokens of this rank
    whole = cc.gather_sequence(mine, group, 0, 6)
    partial = whole * (weights / group.size)
    back = cc.reduce_scatter_sequence(partial, group, 0)
    return (cc.gather_from_tp(back, group, 0, 6)).sum()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", ["copy, reduce", "scatter, gather", "sequence"])
def test_dual_pairs_give_the_unsplit_gradient(on_ranks: OnRanks, world: int, layout: str) -> None:
    weights, start = data(1, 6, 5).double(), data(2, 6, 5).double()
    alone = start.clone().requires_grad_()
    expected = (alone**2 * weights).sum() if layout == "scatter, gather" else (alone * weights).sum()
    expected.backward()

    def body(mesh: Mesh) -> tuple[Tensor, Tensor | None]:
        x = start.clone().requires_grad_()
        loss = dual_loss(mesh, x, weights, layout)
        loss.backward()
        return loss.detach(), x.grad

    for loss, grad in on_ranks(world, body):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(grad, alone.grad)


def test_gradients_of_gradients_pass(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> Tensor:
        x = torch.arange(6, dtype=torch.float64).requires_grad_()
        y = cc.gather_from_tp(cc.scatter_to_tp(x, mesh.tp, 0) ** 3, mesh.tp, 0, 6).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    for second in on_ranks(4, body):
        assert torch.equal(second, 6 * torch.arange(6, dtype=torch.float64))


RAW: list[Callable[..., Tensor]] = [cc.all_reduce, cc.all_gather, cc.reduce_scatter, cc.broadcast, cc.all_to_all]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("call", RAW, ids=lambda call: call.__name__)
def test_the_raw_tier_carries_no_gradient(on_ranks: OnRanks, world: int, call: Callable[..., Tensor]) -> None:
    """A copy of x, reduced in place, would pass on a gradient that nobody has summed."""

    def body(mesh: Mesh) -> list[Tensor]:
        x = data(mesh.rank, 6, 2).requires_grad_()
        with torch.no_grad():
            expected = call(x, mesh.tp)
        given = [call(x, mesh.tp), call(x * 1, mesh.tp), call.start(x, mesh.tp).wait()]  # type: ignore[attr-defined]
        assert all(torch.equal(got, expected) for got in given)
        return given

    for given in on_ranks(world, body):
        assert not any(got.requires_grad for got in given)


def test_uneven_parts_and_fused_norms_carry_no_gradient_either(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> list[Tensor]:
        sizes, weight = shard_sizes(7, 2), torch.ones(4, requires_grad=True)
        mine, whole = data(mesh.rank, sizes[mesh.rank], 4).requires_grad_(), data(mesh.rank, 7, 4).requires_grad_()
        return [
            cc.all_gather(mine, mesh.tp, 0, sizes),
            cc.reduce_scatter(whole, mesh.tp, 0, sizes=sizes),
            *cc.all_reduce_norm(whole, whole * 2, weight, mesh.tp),
        ]

    for given in on_ranks(2, body):
        assert not any(got.requires_grad for got in given)


def test_parameters_can_be_overwritten_in_place(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> Tensor:
        weight = torch.nn.Parameter(data(mesh.rank, 3, 2))
        assert cc.broadcast(weight, mesh.tp, 1, out=weight) is weight
        assert cc.all_reduce(weight, mesh.tp, "avg", out=weight) is weight
        return weight.detach()

    for got in on_ranks(2, body):
        assert torch.equal(got, data(1, 3, 2))


@pytest.mark.parametrize("call", RAW, ids=lambda call: call.__name__)
def test_lazily_conjugated_and_negated_tensors_travel_as_what_they_are(on_ranks: OnRanks, call: Callable[..., Tensor]) -> None:
    def body(mesh: Mesh) -> None:
        z = torch.complex(data(mesh.rank, 4), data(mesh.rank + 5, 4))
        for lazy in (z.conj(), torch._neg_view(z.real.clone())):  # type: ignore[attr-defined]
            plain = lazy.resolve_conj().resolve_neg()
            assert lazy.is_contiguous(), "what gave its memory away"
            assert torch.equal(call(lazy, mesh.tp), call(plain, mesh.tp))
            if call in (cc.all_reduce, cc.broadcast):
                assert torch.equal(call(lazy, mesh.tp, out=lazy), call(plain, mesh.tp))  # type: ignore[call-arg]
                assert torch.equal(lazy, call(plain, mesh.tp)), "in place"

    on_ranks(2, body)


def test_a_barrier_does_not_pass_when_a_wait_ran_out(on_ranks: OnRanks) -> None:
    """The kernel gives up and its stream goes on, so the host must look at the record of timeouts."""

    def check() -> None:
        raise CollectiveTimeout("nothing came from rank 1", code="rank-timeout")

    def body(mesh: Mesh) -> None:
        cc.barrier(mesh.tp)
        workspace = SimpleNamespace(workspace=SimpleNamespace(check=check), is_aside=False, device=torch.device("cuda", 0))
        mesh.tp.cache["fast"] = fast.Fast(workspace, Table({}, "a test"))
        with pytest.raises(CollectiveTimeout, match="nothing came from rank 1"):
            cc.barrier(mesh.tp)

    on_ranks(2, body)


class OneWay:
    """A stand-in for the kernels on CPU ranks: flat, even, contiguous, as theirs, and it counts what it carries."""

    def __init__(self, group: Group) -> None:
        self.group, self.carried, self.is_aside = replace(group, cache={"fast": None}), 0, False
        self.device = SimpleNamespace(index=-1)  # what get_device() says of a tensor in host memory

    def most(self, op: str, algorithm: str) -> int:
        return 1 << 20

    def aside(self, body: Callable[[], Tensor | None], x: Tensor) -> tuple[Tensor, Any] | None:
        result = body()
        return None if result is None else (result, SimpleNamespace(wait=lambda: None))

    def filled(self, out: Tensor, result: Tensor) -> Tensor:
        self.carried += 1
        assert out.is_contiguous()
        out.view(-1).copy_(result.reshape(-1))
        return out

    def reduction(self, dtype: torch.dtype, nbytes: int, op: str, algorithm: str) -> Any:
        return SimpleNamespace(op=op)

    def reduce(self, launch: Any, x: Tensor, out: Tensor) -> None:
        self.filled(out, cc.all_reduce(x, self.group, launch.op))

    def all_gather(self, x: Tensor, out: Tensor, algorithm: str, row: int | None = None) -> Tensor:
        rows = 1 if row is None else x.nbytes // row
        return self.filled(out, cc.all_gather(x.reshape(rows, -1), self.group, 1))

    def reduce_scatter(self, x: Tensor, out: Tensor, op: str, algorithm: str, row: int | None = None) -> Tensor:
        rows = 1 if row is None else out.nbytes // row
        return self.filled(out, cc.reduce_scatter(x.reshape(rows, -1), self.group, 1, op))

    def broadcast(self, x: Tensor, out: Tensor, src: int, algorithm: str) -> Tensor:
        return self.filled(out, cc.broadcast(x, self.group, src))

    def all_to_all(self, x: Tensor, out: Tensor, algorithm: str) -> Tensor:
        return self.filled(out, cc.all_to_all(x.flatten(), self.group))


OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SCATTERED: dict[str, Callable[[Group], tuple[str, Tensor, tuple[Any, ...]]]] = {
    "all_reduce of a transposed tensor": lambda g: ("all_reduce", data(g.rank, 5, 3).t(), ("max",)),
    "all_reduce of one that only one rank holds transposed": lambda g: (
        "all_reduce", data(g.rank, 3, 5).t().contiguous().t() if g.rank else data(g.rank, 3, 5), ("sum",)
    ),
    "all_reduce of negated numbers": lambda g: ("all_reduce", torch._neg_view(data(g.rank, 6)), ("sum",)),
    "all_gather of uneven vocabularies": lambda g: (
        "all_gather", data(g.rank, 2, shard_sizes(101, g.size)[g.rank]), (-1, shard_sizes(101, g.size))
    ),
    "all_gather of rows of odd bytes": lambda g: ("all_gather", data(g.rank, 2, 3), (1,)),
    "all_gather along the middle": lambda g: ("all_gather", data(g.rank, 2, 3, 5), (1,)),
    "reduce_scatter of uneven tokens": lambda g: ("reduce_scatter", data(g.rank, 7, 4), (0, "sum", shard_sizes(7, g.size))),
    "reduce_scatter along the last": lambda g: ("reduce_scatter", data(g.rank, 2, 3 * g.size), (1, "sum")),
    "broadcast of a transposed tensor": lambda g: ("broadcast", data(g.rank, 5, 3).t(), (1,)),
    "all_to_all between dims": lambda g: ("all_to_all", data(g.rank, 2, 3 * g.size), (1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", SCATTERED)
@pytest.mark.parametrize("started", [False, True])
def test_the_kernels_get_scattered_and_uneven_tensors_laid_out(
    on_ranks: OnRanks, case: str, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "_new", None)  # makes memory on a GPU
    table = Table(dict.fromkeys(OPS, ((1 << 20, "lanes"),)), "a test")

    def body(mesh: Mesh) -> tuple[int, Tensor, Tensor]:
        op, x, args = SCATTERED[case](mesh.tp)
        collective = getattr(cc, op)
        expected = collective(x, mesh.tp, *args)
        exchange = OneWay(mesh.tp)
        mesh.tp.cache["fast"] = fast.Fast(cast(Any, exchange), table)
        got = collective.start(x, mesh.tp, *args).wait() if started else collective(x, mesh.tp, *args)
        return exchange.carried, got, expected

    for carried, got, expected in on_ranks(3, body):
        assert carried == 1
        assert torch.equal(got, expected)


@pytest.mark.parametrize("damaged", [False, True])
def test_all_ranks_take_the_first_ones_table(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, damaged: bool) -> None:
    """A file that changes while ranks start, or folders of their own, must not send two ranks two ways."""

    def table_for(machine: list[str], world: int) -> Table:
        if threading.current_thread().name != "rank 0":
            return Table({}, "another")
        if damaged:
            raise UsageError("the table cannot be used", code="file-unreadable", fix="delete it")
        return Table({"all_reduce": ((4096, "lanes"),)}, "the first")

    monkeypatch.setattr(fast, "table_for", table_for)
    monkeypatch.setattr(fast, "machine", lambda device: ["a test"])

    def body(mesh: Mesh) -> Table | UsageError:
        try:
            return fast._table(mesh.tp, mesh.device)
        except UsageError as error:
            return error

    for found in on_ranks(3, body):
        if damaged:
            assert isinstance(found, UsageError)
            assert (found.message, found.code) == ("the table cannot be used", "file-unreadable")
        else:
            assert found == Table({"all_reduce": ((4096, "lanes"),)}, "the first")


def test_groups_of_a_two_axis_mesh_do_not_mix(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> tuple[float, float]:
        x = torch.tensor([float(10**mesh.rank)])
        return float(cc.all_reduce(x, mesh.tp)), float(cc.all_reduce(x, mesh.dp))

    assert on_ranks(4, body, tp=2) == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


class Counter:
    """An observer that writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
        self.seen.append((op, group, str(shape), dtype, detail))
        return len(self.seen)

    def end(self, token: int) -> None:
        self.seen.append(("end", str(token)))


@pytest.mark.parametrize("way", ["eager", "started", "compiled"])
def test_parts_that_are_even_on_one_rank_alone_go_the_way_of_the_others(
    on_ranks: OnRanks, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that rank would wait in a kernel and the others in NCCL."""
    monkeypatch.setattr(fast, "_new", None)
    table = Table(dict.fromkeys(OPS, ((1 << 20, "lanes"),)), "a test")
    sizes = [[1, 1], [1, 3]]

    def exchange(x: Tensor, group: Group) -> Tensor:
        mine = sizes[group.rank]
        call = cc.all_to_all if way != "started" else lambda *args: cc.all_to_all.start(*args).wait()
        return call(x, group, 0, 0, mine, mine)

    def body(mesh: Mesh) -> tuple[list[float], int]:
        kernels = OneWay(mesh.tp)
        mesh.tp.cache["fast"] = fast.Fast(cast(Any, kernels), table)
        x = torch.full((sum(sizes[mesh.rank]),), float(mesh.rank))
        call = torch.compile(exchange, fullgraph=True, backend="aot_eager") if way == "compiled" else exchange
        return call(x, mesh.tp).tolist(), kernels.carried

    assert on_ranks(2, body) == [([0, 1], 0), ([0, 1, 1, 1], 0)]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_scattered_part_may_be_changed_in_place(on_ranks: OnRanks, dim: int) -> None:
    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        x = torch.ones(4, 4, requires_grad=True)
        whole = x * 3
        cc.scatter_to_tp(whole, mesh.tp, dim).mul_(2).sum().backward()
        assert x.grad is not None
        return whole.detach(), x.grad

    for whole, grad in on_ranks(2, body):
        assert torch.equal(whole, torch.full((4, 4), 3.0))
        assert torch.equal(grad, torch.full((4, 4), 6.0))


def test_an_observer_sees_each_operation(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> list[tuple[str, ...]]:
        counter = Counter()
        group = mesh.tp.observed_by(counter)
        cc.all_reduce(torch.ones(3), group, "max")
        cc.broadcast(torch.ones(2, 2), group, 1)
        return counter.seen

    expected = [
        ("all_reduce", "tp", "(3,)", "torch.float32", "max"), ("end", "1"),
        ("broadcast", "tp", "(2, 2)", "torch.float32", "src 1"), ("end", "3"),
    ]  # fmt: skip
    assert on_ranks(2, body) == [expected, expected]


BAD_CALLS: dict[str, Callable[[Mesh], object]] = {
    "reduce op 'sun' is not known; did you mean 'sum'": lambda m: cc.all_reduce(torch.ones(2), m.tp, "sun"),
    r"dim 2 of a tensor of shape \[2, 2\]": lambda m: cc.all_gather(torch.ones(2, 2), m.tp, 2),
    "3 elements cannot be dealt evenly to 2 ranks": lambda m: cc.reduce_scatter(torch.ones(3), m.tp),
    r"sizes \[1, 1\] for 2 ranks and 3 elements": lambda m: cc.reduce_scatter(torch.ones(3), m.tp, sizes=[1, 1]),
    r"sizes \[2\] for 2 ranks": lambda m: cc.all_gather(torch.ones(2), m.tp, sizes=[2]),
    r"sizes \[-1, 3\] for 2 ranks and 2 elements": lambda m: cc.reduce_scatter(torch.ones(2), m.tp, sizes=[-1, 3]),
    r"sizes \[(2, -2|-2, 2)\] for 2 ranks, and": lambda m: cc.all_gather(
        torch.ones(2), m.tp, sizes=[2, -2] if m.rank == 0 else [-2, 2]
    ),
    "src 2 in a group of 2": lambda m: cc.broadcast(torch.ones(2), m.tp, 2),
    "send_sizes .* and recv_sizes None": lambda m: cc.all_to_all(torch.ones(2), m.tp, send_sizes=[1, 1]),
    "dim 0 of a tensor of shape": lambda m: cc.all_gather(torch.tensor(1.0), m.tp),
    "an average of torch.int64": lambda m: cc.all_reduce(torch.tensor([3]), m.tp, "avg"),
    "an average of torch.int32": lambda m: cc.reduce_scatter(torch.ones(2, dtype=torch.int32), m.tp, op="avg"),
    "reduce op 'RedOpType.SUM' is not known": lambda m: cc.all_reduce(
        torch.ones(2), m.tp, cast(Any, torch.distributed.ReduceOp.SUM)
    ),
    "collective 'allreduce' is not known; did you mean 'all_reduce'": lambda m: cc.choice("allreduce", 8, m.tp),
    r"dim 2 of a tensor of shape \[1, 1\]": lambda m: cc.gather_from_tp(torch.ones(1, 1), m.tp, 2),
    r"dim 3 of a tensor of shape \[1, 1\]": lambda m: cc.scatter_to_tp(torch.ones(1, 1), m.tp, 3),
    r"dim 4 of a tensor of shape \[1, 1\]": lambda m: cc.gather_sequence(torch.ones(1, 1), m.tp, 4),
    r"dim 5 of a tensor of shape \[1, 1\]": lambda m: cc.reduce_scatter_sequence(torch.ones(1, 1), m.tp, 5),
    r"x \[\], residual \[\]": lambda m: cc.all_reduce_norm(*[torch.tensor(1.0)] * 3, m.tp),
    r"out of shape \[2, 3\] for a result of shape \[3\]": lambda m: cc.all_reduce(torch.ones(3), m.tp, out=torch.ones(2, 3)),
    r"out of shape \[2\] for a result of shape \[1\]": lambda m: cc.broadcast(torch.ones(1), m.tp, out=torch.ones(2)),
    "out of torch.int64 for a result of torch.float32": lambda m: cc.all_reduce(
        torch.ones(2), m.tp, out=torch.ones(2, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("words", BAD_CALLS)
def test_bad_calls_are_refused_before_anything_travels(on_ranks: OnRanks, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        on_ranks(2, BAD_CALLS[words])


@pytest.mark.parametrize("size", ["2", 1.0, 0])
def test_a_group_size_is_a_whole_number(size: Any) -> None:
    for sizes in ({"tp": size}, {"dp": size}):
        with pytest.raises(UsageError, match=f"=.?{size}.? is not a group size"):
            make_mesh(**sizes, device="cpu")


def test_tp_times_dp_must_be_the_world(on_ranks: OnRanks) -> None:
    with pytest.raises(UsageError, match="tp=3 does not divide the 4 ranks"):
        on_ranks(4, lambda mesh: None, tp=3)
