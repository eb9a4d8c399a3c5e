"""torch.compile over split layers and collectives: one graph, the eager results, and each rank thread its own group."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crosscut
from crosscut import collectives as cc
from crosscut.distributed.mesh import Group, Mesh, live_group, make_mesh
from crosscut.errors import UsageError
from crosscut.sharding import shard_sizes

OnRanks = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def forget() -> None:
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], backend: str = "aot_eager", dynamic: bool = False) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)


def step(fn: Callable[[Tensor], Tensor], modules: list[nn.Module], x: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of each parameter."""
    x = x.clone().requires_grad_()
    parameters = [p for module in modules for p in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    y = fn(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in parameters if p.grad is not None)]


def layers(mesh: Mesh, sequence: bool) -> tuple[list[nn.Module], Callable[[Tensor], Tensor]]:
    """Column, row and MLP, with sizes that do not divide; with ``sequence`` the tokens are sharded between them."""
    options: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence}
    column = crosscut.ColumnParallelLinear(8, 11, seed=1, **options)
    row = crosscut.RowParallelLinear(11, 8, seed=2, **options)
    mlp = crosscut.ParallelMLP(8, 13, seed=3, **options)
    modules: list[nn.Module] = [column, row, mlp]
    if sequence:
        return modules, lambda x: mlp(row(torch.tanh(column(x, 6))), 6)
    return modules, lambda x: mlp(row(torch.tanh(column(x))))


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world", "sequence"), [(2, False), (3, True)], ids=["whole", "sequence"])
def test_layers_in_one_graph_train_as_eager_ones(on_ranks: OnRanks, world: int, sequence: bool) -> None:
    def body(mesh: Mesh) -> int:
        modules, fn = layers(mesh, sequence)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(4))
        if sequence:
            x = x.split(shard_sizes(6, world))[mesh.rank]
        eager = step(fn, modules, x)
        got = step(compiled(fn), modules, x)
        same(got, eager)
        with pytest.raises(AssertionError):  # the comparison sees a gradient to which a rank has not added
            same([got[0], got[1] - eager[1] / world * 1e-2, *got[2:]], eager)
        return len(got)

    assert on_ranks(world, body) == [2 + 2 + 2 + 4] * world


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel residual"])
def test_a_block_in_one_graph_trains_as_an_eager_one(on_ranks: OnRanks, parallel: bool) -> None:
    def body(mesh: Mesh) -> int:
        attention = {"kv_heads": 2, "rope_theta": 1e4, "qk_norm": True}
        block = crosscut.ParallelBlock(16, 4, 24, mesh=mesh, parallel_residual=parallel, attention=attention, seed=1)
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(4))
        eager = step(block, [block], x)
        same(step(compiled(block), [block], x), eager)
        with torch.no_grad():
            torch.testing.assert_close(compiled(block)(x), eager[0], rtol=1e-5, atol=1e-6)
        return len(eager)

    assert on_ranks(2, body) == [2 + 8] * 2


def test_inductor_compiles_split_layers(on_ranks: OnRanks) -> None:
    """Multiplies and exchanges alone, for which inductor generates no C++ that would take its compiler's time."""

    def body(mesh: Mesh) -> None:
        column = crosscut.ColumnParallelLinear(8, 12, bias=False, mesh=mesh, seed=1)
        row = crosscut.RowParallelLinear(12, 8, bias=False, mesh=mesh, seed=2)
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
        eager = step(lambda x: row(column(x)), [column, row], x)
        same(step(compiled(lambda x: row(column(x)), "inductor"), [column, row], x), eager)

    on_ranks(2, body)


def every_call(x: Tensor, rows: Tensor, group: Group) -> tuple[Tensor, ...]:
    """Each collective in each form that the tracing has a rule for. ``x [4, 2 n]``, ``rows [T/n, 2]``, uneven."""
    sizes = shard_sizes(2 * group.size + 1, group.size)
    own, weight = x.clone(), x[0]
    cc.all_reduce(own, group, out=own)
    landing = torch.empty_like(x)
    cc.broadcast(x, group, group.size - 1, out=landing)
    return (
        own,
        landing,
        cc.all_reduce(x, group, "max"),
        cc.all_reduce.start(x * 2, group).wait(),
        cc.all_gather(x, group, -1),
        cc.all_gather(rows, group, 0, sizes),
        cc.reduce_scatter(x, group, 1),
        cc.reduce_scatter(torch.cat([rows, rows])[: len(rows)].repeat(9, 1)[: sum(sizes)], group, 0, sizes=sizes),
        cc.all_to_all(x, group, 1, 0),
        cc.all_to_all(x, group, 1, 1),
        *cc.all_reduce_norm(x, x + 1, weight, group, bias=weight),
        cc.gather_from_tp(cc.scatter_to_tp(x, group), group),
    )


def test_the_raw_tier_carries_no_gradient_here_either(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> None:
        x, rows = torch.ones(4, 4), torch.ones(shard_sizes(5, 2)[mesh.rank], 2)
        _, *raw, of_the_other_tier = compiled(every_call)(x.requires_grad_(), rows.requires_grad_(), mesh.tp)
        assert [got.requires_grad for got in raw] == [False] * 11
        assert of_the_other_tier.requires_grad

    on_ranks(2, body)


@pytest.mark.parametrize("world", [1, 3])
def test_every_collective_gives_its_eager_result(on_ranks: OnRanks, world: int) -> None:
    def body(mesh: Mesh) -> int:
        generator = torch.Generator().manual_seed(mesh.rank)
        x = torch.randint(-8, 9, (4, 2 * world), generator=generator).float()
        rows = torch.randint(-8, 9, (shard_sizes(2 * world + 1, world)[mesh.rank], 2), generator=generator).float()
        kept = x.clone()
        expected = every_call(x, rows, mesh.tp)
        got = compiled(every_call)(x, rows, mesh.tp)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
        assert torch.equal(x, kept)
        return len(got)

    assert on_ranks(world, body) == [13] * world


def test_token_counts_change_without_a_new_graph(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> int:
        graphs: list[torch.fx.GraphModule] = []

        def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        def gathered(x: Tensor) -> Tensor:
            return cc.all_gather(cc.all_reduce(x, mesh.tp), mesh.tp)

        fn = torch.compile(gathered, fullgraph=True, backend=count, dynamic=True)
        for tokens in (3, 7, 12):
            x = torch.full((tokens, 2), float(mesh.rank))
            assert torch.equal(fn(x), gathered(x))
        return len(graphs)

    assert on_ranks(2, body) == [1, 1]


def test_operators_keep_their_order_and_stay_when_unused(on_ranks: OnRanks) -> None:
    """What the ranks' compilers may not do each for itself: swap two exchanges, or drop one."""
    from torch._dynamo.backends.common import aot_autograd

    def body(mesh: Mesh) -> list[str]:
        seen: list[str] = []

        def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            called = [node.args[1] for node in graph.graph.nodes if node.target is torch.ops.higher_order.with_effects]
            seen.extend(str(operator) for operator in called)
            return graph.forward

        def fn(x: Tensor) -> Tensor:
            cc.all_gather(x, mesh.tp)
            return cc.broadcast(x, mesh.tp) + cc.all_reduce(x, mesh.tp)

        torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=look))(torch.ones(2))
        return seen

    expected = ["crosscut.all_gather.default", "crosscut.broadcast.default", "crosscut.all_reduce.default"]
    assert on_ranks(2, body) == [expected, expected]


def test_an_observer_sees_what_compiled_code_does(on_ranks: OnRanks) -> None:
    class Seen:
        def __init__(self) -> None:
            self.ops: list[str] = []

        def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
            self.ops.append(op)
            return 0

        def end(self, token: int) -> None: ...

    def body(mesh: Mesh) -> list[str]:
        seen = Seen()
        group = mesh.tp.observed_by(seen)
        compiled(lambda x: cc.all_reduce(x, group) + cc.broadcast(x, group))(torch.ones(3))
        return seen.ops

    assert on_ranks(2, body) == [["all_reduce", "broadcast"]] * 2


def test_a_handle_means_one_group_and_dies_with_it() -> None:
    group = make_mesh(device="cpu").tp
    observed = group.observed_by(None)
    assert group.handle != observed.handle
    assert live_group(group.handle) is group
    assert live_group(observed.handle) is observed
    handle = observed.handle
    del observed
    gc.collect()
    with pytest.raises(UsageError, match=f"no group '{handle}' is alive"):
        live_group(handle)
    assert live_group(group.handle) is group
