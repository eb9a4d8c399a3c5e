"""Schedules in pieces equal the unsplit layer: output, every gradient, one step, by both carriers. Each check can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crosscut as cc
from crosscut import collectives
from crosscut.distributed.mesh import Group, Mesh
from crosscut.kernels.copies import Piece
from crosscut.layers import overlap, pieces, planning
from crosscut.layers.carry import Carrier, Library
from crosscut.layers.engines import Engines
from crosscut.layers.explain import explain
from crosscut.layers.schedule import LEAST_PIECE, Case, Machine, Schedule, room_bytes
from crosscut.sharding import shard_sizes
from layer_cases import call_mlp, inputs, mlp_step, split_step, unsplit_linear, unsplit_mlp
from parity import expected, step
from pieces_soak import soak
from thread_copies import Shared, ThreadCopies

OnRanks = Callable[..., list[Any]]
KINDS = ["column gathered", "column sequence", "row sharded", "row sequence"]
CASES = [(2, (16, 24), 2), (3, (17, 21), 4), (4, (17, 21), 3), (8, (5, 3), 2)]  # ranks, features in and out, pieces
CARRIERS = ["library", "copies"]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int], list[str]]:
    """``force(carrier, pieces, world)``; returns a list in which each call of a carrier leaves its name."""

    def forced(name: str, count: int, world: int) -> list[str]:
        monkeypatch.setenv("CROSSCUT_SCHEDULE", f"pieces:{count}")
        shared, made, used = Shared(world), {}, []

        def carrier(group: Group, schedule: Schedule) -> Carrier:
            used.append(name)
            if name == "library":
                return Library(group)
            key = threading.current_thread().name
            made.setdefault(key, ThreadCopies(shared, group.rank))
            return Engines(made[key], group)  # type: ignore[arg-type]

        monkeypatch.setattr(overlap, "carrier", carrier)
        return used

    return forced


def check_linear(on_ranks: OnRanks, world: int, kind: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    linear = unsplit_linear(*size, True, dtype)
    x, upstream = inputs(*size, dtype)
    reference = expected(linear, x, upstream, world)
    for rank, got in enumerate(on_ranks(world, split_step, kind, linear, x, upstream)):
        reference.check(got, f"{kind}, tp {world}, rank {rank}")


@pytest.mark.parametrize(
    ("carrier", "dtype"),
    [("library", torch.float32), ("library", torch.bfloat16), ("copies", torch.bfloat16)],
    ids=["library fp32", "library bf16", "copies bf16"],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=["2 even", "3 uneven", "4 uneven", "8 tiny"])
def test_linear_in_pieces_equals_unsplit(
    on_ranks: OnRanks, force: Any, case: tuple[int, tuple[int, int], int], kind: str, carrier: str, dtype: torch.dtype
) -> None:
    world, size, count = case
    used = force(carrier, count, world)
    check_linear(on_ranks, world, kind, size, dtype)
    assert len(used) >= world, "the layer did not go in pieces"


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "gated silu"])
def test_mlp_in_pieces_equals_unsplit(on_ranks: OnRanks, force: Any, gated: bool, sequence: bool, carrier: str) -> None:
    used = force(carrier, 2, 2)
    mlp = unsplit_mlp(gated, torch.bfloat16)
    x, upstream = inputs(10, 10, torch.bfloat16)

    reference = expected(mlp, x, upstream, 2, lambda module, x, upstream: step(module, x, upstream, call_mlp(module, gated)))
    for rank, got in enumerate(on_ranks(2, mlp_step, mlp, gated, sequence, x, upstream)):
        reference.check(got, f"rank {rank}")
    assert used


# ------------------------------------------------------------------------------------------- the checks above can fail


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_left_out_turns_the_check_red(
    on_ranks: OnRanks, force: Any, monkeypatch: pytest.MonkeyPatch, kind: str, carrier: str
) -> None:
    force(carrier, 2, 2)
    monkeypatch.setattr(pieces, "cut", lambda sizes, count, cut=pieces.cut: cut(sizes, count)[: max(1, count - 1)])
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # what is not written is wrong, and finite
    with pytest.raises(AssertionError, match="relative error"):
        check_linear(on_ranks, 2, kind, (16, 24), torch.bfloat16)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_in_another_order_on_one_rank_turn_the_check_red(
    on_ranks: OnRanks, force: Any, monkeypatch: pytest.MonkeyPatch, kind: str, carrier: str
) -> None:
    force(carrier, 3, 2)

    def faulty(sizes: Any, count: int, cut: Any = pieces.cut) -> Any:
        found = cut(sizes, count)
        return found[::-1] if threading.current_thread().name == "rank 0" else found

    monkeypatch.setattr(pieces, "cut", faulty)
    with pytest.raises(AssertionError, match="relative error"):
        check_linear(on_ranks, 2, kind, (16, 24), torch.bfloat16)


class Replayed(ThreadCopies):
    """Every call in the same half, as when one CUDA graph is replayed again and again; one rank reads slowly."""

    def begin(self) -> None:
        self._half = 1
        super().begin()

    def publish(self) -> Piece:
        piece = super().publish()
        if self.rank == 1:
            threading.Event().wait(0.001)
        return piece


class Hasty(Replayed):
    """Says at once that it has read everything."""

    def publish(self) -> Piece:
        self.end()
        return super().publish()


@pytest.mark.parametrize("kind", [Replayed, Hasty])
def test_memory_that_is_written_before_it_is_read_is_seen(on_ranks: OnRanks, kind: type[ThreadCopies]) -> None:
    shared = Shared(2)

    def body(mesh: Mesh) -> int:
        copies = kind(shared, mesh.tp.rank)
        return soak(mesh.tp, lambda: Engines(copies, mesh.tp), 60, 3)  # type: ignore[arg-type]

    assert (max(on_ranks(2, body)) > 0) == (kind is Hasty)


# ------------------------------------------------------------------------------------------------- shapes, order and use


@pytest.mark.parametrize("setting", ["auto", "plain", "pieces"])
def test_few_tokens_are_told_before_the_rule_is_asked(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("CROSSCUT_SCHEDULE", setting)

    def body(mesh: Mesh) -> list[bool]:
        few, many = torch.empty(LEAST_PIECE - 1, 8), torch.empty(LEAST_PIECE, 8)
        told = [planning.too_few(mesh.tp, few)]  # nothing is known before the first schedule
        planning.scheduled(mesh.tp, "multiply_reduce", few, len(few), 8, 8)
        return [*told, planning.too_few(mesh.tp, few), planning.too_few(mesh.tp, many)]

    assert on_ranks(2, body) == [[False, setting == "auto", False]] * 2


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_tokens_in_any_dim_strided_inputs_and_gradients(on_ranks: OnRanks, force: Any, dim: int, carrier: str) -> None:
    force(carrier, 2, 3)
    torch.manual_seed(5)
    up, down = (nn.Linear(*size, dtype=torch.float64) for size in ((6, 8), (8, 6)))
    x = torch.randn(4, 7, 6, dtype=torch.float64)
    upstream = torch.randn(4, 7, 6, dtype=torch.float64)
    start = x.clone().requires_grad_()
    y = down(up(start))
    y.backward(upstream)

    def body(mesh: Mesh) -> None:
        layout: dict[str, Any] = {"sequence_parallel": True, "sequence_dim": dim}
        first = cc.ColumnParallelLinear.from_linear(up, mesh, **layout)
        second = cc.RowParallelLinear.from_linear(down, mesh, **layout)
        sizes = shard_sizes(x.shape[dim], mesh.tp.size)
        part = x.split(sizes, dim)[mesh.rank].transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        got = second(first(part, x.shape[dim]))
        grad = upstream.split(sizes, dim)[mesh.rank]
        got.backward(grad.transpose(0, 1).contiguous().transpose(0, 1))
        torch.testing.assert_close(got, y.detach().split(sizes, dim)[mesh.rank])
        torch.testing.assert_close(part.grad, start.grad.split(sizes, dim)[mesh.rank])
        for mine, whole in ((first, up), (second, down)):
            torch.testing.assert_close(mine.weight.grad, mine.from_linear(_of_grads(whole), mesh).weight.detach())

    on_ranks(3, body)


def _of_grads(linear: nn.Linear) -> nn.Linear:
    other = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
    assert linear.weight.grad is not None
    other.weight.data.copy_(linear.weight.grad)
    return other


@pytest.mark.parametrize("shape", [(0, 10), (10,), (2, 3, 10), (2, 1, 3, 10)])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_any_leading_dims_and_no_tokens(on_ranks: OnRanks, force: Any, shape: tuple[int, ...], carrier: str) -> None:
    used = force(carrier, 2, 2)
    mlp = unsplit_mlp(False, torch.float32)
    x = torch.randn(shape)

    def body(mesh: Mesh) -> Tensor:
        column = cc.ColumnParallelLinear.from_linear(mlp.up, mesh, gather_output=True)
        torch.testing.assert_close(column(x), mlp.up(x))
        with torch.no_grad():
            torch.testing.assert_close(column(x), mlp.up(x))
        return cc.ParallelMLP.from_linears(mlp.up, mlp.down, mesh)(x)

    for y in on_ranks(2, body):
        torch.testing.assert_close(y, call_mlp(mlp, False)(x))
    assert bool(used) == (x.numel() > 0)


def test_each_transfer_is_begun_before_the_next_multiply(on_ranks: OnRanks, force: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    force("library", 2, 2)

    def body(mesh: Mesh) -> dict[str, list[str]]:
        events: list[str] = []

        class Observer:
            def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
                events.append(op)
                return 0

            def end(self, token: int) -> None:
                pass

        class Multiplies(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
                    events.append("multiply")
                return func(*args, **(kwargs or {}))

        seen = {}
        for kind, x in (("column sequence", torch.randn(4, 8)), ("column", torch.randn(8, 8))):
            layer: nn.Module = cc.ColumnParallelLinear(
                8, 12, mesh=mesh, sequence_parallel="sequence" in kind, gather_output="sequence" not in kind, seed=1
            )
            seen[kind] = watch(layer, x, events, Observer(), Multiplies())
        for kind in ("row sequence", "row"):
            layer = cc.RowParallelLinear(16, 12, bias=False, mesh=mesh, sequence_parallel="sequence" in kind, seed=1)
            seen[kind] = watch(layer, torch.randn(8, 8, requires_grad=True), events, Observer(), Multiplies())
        return seen

    def watch(layer: Any, x: Tensor, events: list[str], observer: Any, multiplies: Any) -> list[str]:
        layer.group = layer.group.observed_by(observer)
        events.clear()
        with multiplies:
            y = layer(x)
            if x.requires_grad:
                events.append("backward")
                y.sum().backward()
        return list(events)

    for seen in on_ranks(2, body):
        assert seen["column sequence"] == ["all_gather"] * 2 + ["multiply"] * 3  # own tokens first
        assert seen["column"] == ["multiply", "join_into"] * 2
        scattered = ["multiply", "multiply", "scatter_into"] * 2
        assert seen["row sequence"] == [*scattered, "backward", "all_gather", *["multiply"] * 3]
        assert seen["row"] == [*["multiply", "all_reduce"] * 2, "backward", "multiply", "multiply"]


@pytest.mark.parametrize("kind", ["column gathered", "column sequence", "row", "row sequence"])
def test_gradients_of_gradients(on_ranks: OnRanks, force: Any, kind: str) -> None:
    used = force("library", 2, 2)
    torch.manual_seed(1)
    linear = nn.Linear(6, 6, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)

    def second(layer: Any, x: Tensor, outputs: Callable[[Tensor], Tensor], inputs: Callable[[Tensor], Tensor]) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(outputs((layer(x) ** 3).sum()), x, create_graph=True)
        return torch.autograd.grad(inputs((first**2).sum()), x)[0]

    same: Callable[[Tensor], Tensor] = lambda value: value  # noqa: E731
    exact = second(linear, x, same, same)

    def body(mesh: Mesh) -> None:
        group = mesh.tp
        total: Callable[[Tensor], Tensor] = lambda value: collectives.reduce_from_tp(value, group)  # noqa: E731
        sequence = kind.endswith("sequence")
        if kind.startswith("column"):
            layer: Any = cc.ColumnParallelLinear.from_linear(
                linear, mesh, gather_output=not sequence, sequence_parallel=sequence
            )
            mine = x.chunk(group.size)[group.rank] if sequence else x
            got = second(layer, mine, total if sequence else same, total if sequence else same)
            want = exact.chunk(group.size)[group.rank] if sequence else exact
        else:
            layer = cc.RowParallelLinear.from_linear(linear, mesh, sequence_parallel=sequence)
            got = second(layer, x.chunk(group.size, 1)[group.rank], total if sequence else same, total)
            want = exact.chunk(group.size, 1)[group.rank]
        torch.testing.assert_close(got, want)

    on_ranks(2, body)
    assert used


@pytest.mark.parametrize("how", ["frozen", "only the weight", "autocast", "checkpoint"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
def test_frozen_weights_autocast_and_checkpointing(on_ranks: OnRanks, force: Any, sequence: bool, how: str) -> None:
    used = force("library", 2, 2)
    mlp = unsplit_mlp(False, torch.float32)
    x, upstream = inputs(10, 10, torch.float32)

    def grads(layer: Any, x: Tensor, upstream: Tensor) -> Tensor | None:
        start = x.clone().requires_grad_(how != "only the weight")
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            y = checkpoint(layer, start, use_reentrant=False) if how == "checkpoint" else layer(start)
        y.float().backward(upstream)
        return start.grad

    whole = grads(call_mlp(mlp, False), x, upstream)

    def body(mesh: Mesh) -> None:
        split = cc.ParallelMLP.from_linears(mlp.up, mlp.down, mesh, sequence_parallel=sequence)
        split.requires_grad_(how != "frozen")
        parts = (t.chunk(2)[mesh.rank] for t in (x, upstream)) if sequence else (x, upstream)
        got = grads(split, *parts)
        if whole is not None:
            want = whole.chunk(2)[mesh.rank] if sequence else whole
            torch.testing.assert_close(got, want, atol=0.05 if how == "autocast" else 1e-5, rtol=1e-2)
        if how == "only the weight":
            expected = split.up.from_linear(_of_grads(mlp.up), mesh).weight.detach()
            torch.testing.assert_close(split.up.weight.grad, expected, atol=1e-4, rtol=1e-4)
        assert (split.up.weight.grad is None) == (how == "frozen")

    on_ranks(2, body)
    assert bool(used) == (how != "autocast")


def test_explain_names_each_schedule(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(mesh: Mesh) -> str:
        mlp = cc.ParallelMLP(8, 16, mesh=mesh, sequence_parallel=True, seed=1)
        attention = cc.ParallelAttention(8, 4, mesh=mesh, seed=1)
        head = cc.ColumnParallelLinear(8, 16, mesh=mesh, gather_output=True, seed=1)
        return "\n".join(explain(layer, 4096) for layer in (mlp, attention, head))

    cores = "plain: on a CPU the exchange needs the cores that multiply"
    nothing = "qkv: plain: nothing to communicate forward"
    assert on_ranks(2, body)[0].split("\n") == [f"up: {cores}", f"down: {cores}", nothing, f"o: {cores}", cores]
    assert on_ranks(1, body)[0].split("\n")[0] == "up: plain: nothing to overlap"
    monkeypatch.setenv("CROSSCUT_SCHEDULE", "pieces:4")
    assert on_ranks(2, body)[0].split("\n")[0] == "up: 4 pieces by library: CROSSCUT_SCHEDULE"

    def others(mesh: Mesh) -> list[str]:
        block = cc.ParallelBlock(8, 4, 16, mesh=mesh, parallel_residual=True, sequence_parallel=True, seed=1)
        head = cc.VocabParallelHead(8, 16, mesh=mesh, sequence_parallel=True, seed=1)
        return [*explain(block, 4096).split("\n"), explain(head, 4096)]

    for line, words in zip(
        on_ranks(2, others)[0], ("one exchange", "the caller", "one exchange", "the caller", "a head"), strict=True
    ):
        assert f"plain: {words}" in line


@given(
    some.lists(some.integers(0, 40), min_size=2, max_size=8), some.integers(1, 16), some.integers(1, 3), some.integers(1, 300)
)
def test_pieces_cover_each_token_once_and_have_room(sizes: list[int], count: int, outer: int, width: int) -> None:
    found = pieces.cut(sizes, count)
    for rank, size in enumerate(sizes):
        assert [token for spans in found for token in range(size)[spans[rank]]] == list(range(size))
    assert all(any(span.stop > span.start for span in spans) for spans in found)
    rooms = [-(-outer * max(span.stop - span.start for span in spans) * width * 2 // 256) * 256 for spans in found]
    assert sum(rooms) <= room_bytes(Case("gather_multiply", outer * sum(sizes), width, 1, len(sizes), 2))


@pytest.mark.parametrize("other", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_ranks_whose_gpus_differ_agree_to_stay_plain(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    def device(_: Any) -> SimpleNamespace:
        first = threading.current_thread().name == "rank 0"
        return SimpleNamespace(name="NVIDIA H200" if first else other, total_memory=(140 if first else 20) << 30)

    link = "NV18 450 GB/s"
    monkeypatch.setattr(torch.cuda, "get_device_properties", device)
    monkeypatch.setattr(planning, "topology", lambda: SimpleNamespace(matrix=lambda: [["-", link], [link, "-"]]))
    first, second = on_ranks(2, lambda mesh: planning._agreed(mesh.tp, None))
    assert first == second
    assert isinstance(first.machine, Machine) == (other == "NVIDIA H200")
    assert first.half == (160 << 20 if other == "NVIDIA H200" else 0)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_soak(on_ranks: OnRanks, world: int, carrier: str) -> None:
    shared = Shared(world)

    def body(mesh: Mesh) -> int:
        copies = ThreadCopies(shared, mesh.tp.rank)
        by: Callable[[], Carrier] = (
            (lambda: Library(mesh.tp)) if carrier == "library" else (lambda: Engines(copies, mesh.tp))  # type: ignore[arg-type]
        )
        return soak(mesh.tp, by, 400 // world, world)

    assert on_ranks(world, body) == [0] * world
