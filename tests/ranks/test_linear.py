"""Split linears and MLPs equal their unsplit selves: output, every gradient, one optimizer step. Each check can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosscut as cc
from crosscut import collectives
from crosscut.collectives import Pending
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers import LayerNorm, ParallelBlock, overlap
from crosscut.layers import linear as linear_module
from crosscut.sharding import Replicated, shard_sizes
from layer_cases import KINDS, call_mlp, inputs, mlp_step, split_step, unsplit_linear, unsplit_mlp
from parity import expected, step

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]
SIZES = [(16, 24), (17, 21), (5, 3)]  # divides; does not divide; fewer features than ranks


def check_linear(on_ranks: OnRanks, world: int, kind: str, size: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    linear = unsplit_linear(*size, bias, dtype)
    x, upstream = inputs(*size, dtype)
    right = expected(linear, x, upstream, world)
    for rank, got in enumerate(on_ranks(world, split_step, kind, linear, x, upstream)):
        right.check(got, f"{kind}, tp {world}, rank {rank}, {size[0]} -> {size[1]}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES, ids=["even", "uneven", "tiny"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_linear_equals_unsplit(on_ranks: OnRanks, world: int, kind: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    check_linear(on_ranks, world, kind, size, True, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_without_bias(on_ranks: OnRanks, kind: str) -> None:
    check_linear(on_ranks, 3, kind, (17, 21), False, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "gated silu"])
@pytest.mark.parametrize("world", WORLDS)
def test_mlp_equals_unsplit(on_ranks: OnRanks, world: int, gated: bool, sequence: bool, dtype: torch.dtype) -> None:
    check_mlp(on_ranks, world, gated, sequence, dtype)


def check_mlp(on_ranks: OnRanks, world: int, gated: bool, sequence: bool, dtype: torch.dtype, ffn: int = 21) -> None:
    mlp = unsplit_mlp(gated, dtype, ffn=ffn)
    x, upstream = inputs(10, 10, dtype)
    right = expected(mlp, x, upstream, world, lambda mlp, x, upstream: step(mlp, x, upstream, call_mlp(mlp, gated)))
    for rank, got in enumerate(on_ranks(world, mlp_step, mlp, gated, sequence, x, upstream)):
        right.check(got, f"tp {world}, rank {rank}")


# ------------------------------------------------------------------------------------------- the checks above can fail


def test_a_bias_added_on_each_rank_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: Any, x: Tensor) -> Tensor:
        return collectives.reduce_from_tp(F.linear(x, self.weight, self.bias), self.group)

    monkeypatch.setattr(cc.RowParallelLinear, "forward", faulty)
    with pytest.raises(AssertionError, match=r"row sharded.*: y: relative error"):
        check_linear(on_ranks, 2, "row sharded", (16, 24), True, torch.bfloat16)


def test_a_missing_all_reduce_in_backward_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap.all_reduce, "start", lambda x, group, out: Pending(None, lambda: x, ()))
    with pytest.raises(AssertionError, match=r"column sharded.*: dx: relative error"):
        check_linear(on_ranks, 2, "column sharded", (16, 24), True, torch.bfloat16)
    monkeypatch.setattr(linear_module, "copy_to_tp", lambda x, group: x)
    with pytest.raises(AssertionError, match=r"row sequence.*: grad of bias: relative error"):
        check_linear(on_ranks, 2, "row sequence", (16, 24), True, torch.bfloat16)


def test_a_missing_all_reduce_in_forward_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "reduce_from_tp", lambda x, group, overwrite: x)
    with pytest.raises(AssertionError, match=r"row sharded.*: y: relative error"):
        check_linear(on_ranks, 2, "row sharded", (16, 24), True, torch.float32)


def test_a_contiguous_cut_of_gate_and_up_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    from crosscut.sharding import Column

    monkeypatch.setattr(linear_module, "Packed", lambda sizes: Column())
    with pytest.raises(AssertionError, match=r"tp 2, rank 0: y: relative error"):
        check_mlp(on_ranks, 2, True, False, torch.float32, ffn=20)


# --------------------------------------------------------------------------------------------- round trips and starts


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_from_linear_to_linear_is_exact(on_ranks: OnRanks, world: int, dtype: torch.dtype) -> None:
    linear = unsplit_linear(17, 21, True, dtype)
    linear.bias.requires_grad_(False)
    mlp = unsplit_mlp(True, dtype)

    def body(mesh: Mesh) -> None:
        for kind in (cc.ColumnParallelLinear, cc.RowParallelLinear):
            layer = kind.from_linear(linear, mesh)
            assert layer.weight.requires_grad
            assert not layer.bias.requires_grad
            back = layer.to_linear()
            assert back.weight.dtype == dtype
            assert torch.equal(back.weight, linear.weight)
            assert torch.equal(back.bias, linear.bias)
        linears = cc.ParallelMLP.from_linears(mlp.up, mlp.down, mesh, gate=mlp.gate, activation="silu").to_linears()
        for name, back in linears.items():
            assert torch.equal(back.weight, mlp.get_submodule(name).weight)
            assert torch.equal(back.bias, mlp.get_submodule(name).bias)

    on_ranks(world, body)


def initial_weights(mesh: Mesh, seed: int | None) -> list[Tensor]:
    built = [
        cc.ColumnParallelLinear(70, 150, mesh=mesh, seed=seed),
        cc.RowParallelLinear(150, 70, mesh=mesh, seed=seed),
        cc.ParallelMLP(9, 140, mesh=mesh, gated=True, activation="silu", seed=seed),
    ]
    linears = [built[0].to_linear(), built[1].to_linear(), *built[2].to_linears().values()]
    return [p.detach() for linear in linears for p in (linear.weight, linear.bias)]


def test_initial_weights_do_not_depend_on_tp(on_ranks: OnRanks) -> None:
    (alone,) = on_ranks(1, initial_weights, 7)
    for world in (2, 3, 4):
        for split in on_ranks(world, initial_weights, 7):
            assert all(torch.equal(a, b) for a, b in zip(alone, split, strict=True))
    (other,) = on_ranks(1, initial_weights, 8)
    assert not any(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def test_initial_weights_follow_the_law_of_nn_linear(on_ranks: OnRanks) -> None:
    (weights,) = on_ranks(1, initial_weights, 7)
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        bound = weight.shape[1] ** -0.5
        for values in (weight, bias):
            assert float(values.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert len({round(float(w[0, 0]), 7) for w in weights[::2]}) == 5  # no two layers draw the same stream


def test_without_a_seed_ranks_agree_and_torchs_seed_decides(on_ranks: OnRanks) -> None:
    def bias(mesh: Mesh) -> Tensor:
        return cc.RowParallelLinear(4, 6, mesh=mesh).bias.detach()

    torch.manual_seed(3)
    biases = on_ranks(4, bias)
    assert all(torch.equal(biases[0], b) for b in biases)
    torch.manual_seed(4)
    assert not torch.equal(biases[0], on_ranks(1, bias)[0])


# ------------------------------------------------------------------------------------------------------ shapes and use


@pytest.mark.parametrize("shape", [(0, 10), (10,), (2, 3, 10), (2, 1, 3, 10)])
def test_any_leading_dims_and_no_tokens(on_ranks: OnRanks, shape: tuple[int, ...]) -> None:
    mlp = unsplit_mlp(False, torch.float32)
    x = torch.randn(shape)

    def body(mesh: Mesh) -> Tensor:
        column = cc.ColumnParallelLinear.from_linear(mlp.up, mesh, gather_output=True)
        assert column(x).shape == (*shape[:-1], 21)
        return cc.ParallelMLP.from_linears(mlp.up, mlp.down, mesh)(x)

    for y in on_ranks(3, body):
        torch.testing.assert_close(y, call_mlp(mlp, False)(x))


@pytest.mark.parametrize("transposed_grad", [False, True])
def test_inputs_and_gradients_need_not_be_contiguous(on_ranks: OnRanks, transposed_grad: bool) -> None:
    """DeepSpeed's row-parallel reduces a contiguous copy and returns the original; this is the regression test."""
    linear = unsplit_linear(16, 24, True, torch.float32)
    x = torch.randn(16, 5).t()
    upstream = torch.randn(24, 5).t() if transposed_grad else torch.randn(5, 24)
    copy = unsplit_linear(16, 24, True, torch.float32)
    expected = step(copy, x, upstream, copy)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        column = cc.ColumnParallelLinear.from_linear(linear, mesh, gather_output=True)
        out = step(column, x, upstream, column)
        return out["y"], out["dx"]

    for y, dx in on_ranks(2, body):
        torch.testing.assert_close(y, expected["y"])
        torch.testing.assert_close(dx, expected["dx"])


def test_row_bias_is_whole_on_every_rank() -> None:
    assert cc.RowParallelLinear(4, 6, mesh=alone()).cuts["bias"] == Replicated()


def alone() -> Mesh:
    from crosscut.distributed.mesh import make_mesh

    return make_mesh(device="cpu")


BAD: dict[str, Callable[[], object]] = {
    "in_features=0": lambda: cc.ColumnParallelLinear(0, 4, mesh=alone()),
    "out_features=-1": lambda: cc.RowParallelLinear(4, -1, mesh=alone()),
    r"got x \[2, 5\]; the input must have 4 features": lambda: cc.ColumnParallelLinear(4, 4, mesh=alone())(torch.ones(2, 5)),
    r"got x \[2, 5\]; this rank's shard must have 4": lambda: cc.RowParallelLinear(4, 4, mesh=alone())(torch.ones(2, 5)),
    "packed weights with gather_output": lambda: cc.ColumnParallelLinear(4, 4, mesh=alone(), packed=(2, 2), gather_output=True),
    "add up to 3, the parameter has 4": lambda: cc.ColumnParallelLinear(4, 4, mesh=alone(), packed=(1, 2)),
    "activation 'gleu' is not known; did you mean 'gelu'": lambda: cc.ParallelMLP(4, 8, mesh=alone(), activation="gleu"),
    "do not make an MLP": lambda: cc.ParallelMLP.from_linears(nn.Linear(4, 8), nn.Linear(7, 4), alone()),
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_work_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BAD[words]()


# ------------------------------------------------------------------------------------------ the exchange that is hidden


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
def test_the_exchange_of_dx_runs_under_the_multiply_for_dw(on_ranks: OnRanks, sequence: bool) -> None:
    """Order of events in backward: the exchange is begun before dw is multiplied, and waited for after."""
    from torch.utils._python_dispatch import TorchDispatchMode

    def body(mesh: Mesh) -> list[str]:
        events: list[str] = []

        class Observer:
            def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
                events.append(f"begin {op}")
                return 0

            def end(self, token: int) -> None:
                events.append("issued")

        class Multiplies(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.mm.default:
                    events.append("multiply")
                return func(*args, **(kwargs or {}))

        layer = cc.ColumnParallelLinear(8, 12, bias=False, mesh=mesh, sequence_parallel=sequence, seed=1)
        layer.group = layer.group.observed_by(Observer())
        y = layer(torch.randn(4, 8, requires_grad=True))
        events.clear()
        with Multiplies():
            y.sum().backward()
        return events

    expected = ["multiply", "begin all_reduce", "issued", "multiply"]
    if sequence:
        expected = ["begin all_gather", "issued", "multiply", "begin reduce_scatter", "issued", "multiply"]
    assert on_ranks(2, body) == [expected, expected]


@pytest.mark.parametrize("sequence", [False, True])
def test_column_gradients_of_gradients(on_ranks: OnRanks, sequence: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(5, 6, dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64)

    def second(layer: Any, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(total((layer(x) ** 3).sum()), x, create_graph=True)
        return torch.autograd.grad(total((first**2).sum()) if sequence else (first**2).sum(), x)[0]

    expected = second(linear, x, lambda value: value)

    def body(mesh: Mesh) -> Tensor:
        layer = cc.ColumnParallelLinear.from_linear(linear, mesh, sequence_parallel=sequence)
        mine = x.chunk(mesh.tp.size)[mesh.rank] if sequence else x
        got = second(layer, mine, lambda value: collectives.reduce_from_tp(value, mesh.tp))
        return collectives.all_gather(got, mesh.tp) if sequence else got

    for got in on_ranks(2, body):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("schedule", ["plain", "pieces:2"])
@pytest.mark.parametrize("sequence", [False, True])
def test_results_may_be_changed_in_place(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, sequence: bool, schedule: str
) -> None:
    """``nn.ReLU(inplace=True)`` behind a column layer, ``y += x`` behind a row layer: torch forbids it for views."""
    monkeypatch.setenv("CROSSCUT_SCHEDULE", schedule)

    def body(mesh: Mesh) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"mesh": mesh, "seed": 1, "dtype": torch.float64, "sequence_dim": 1}
        options["sequence_parallel"] = sequence
        up, relu = cc.ColumnParallelLinear(8, 13, **options), nn.ReLU(inplace=True)
        down, out = cc.RowParallelLinear(13, 8, False, **options), cc.ColumnParallelLinear(8, 7, **options)
        embedding = cc.VocabParallelEmbedding(9, 8, **options)
        x = embedding(torch.arange(10).view(2, 5) % 9)
        x *= 2
        y = down(relu(up(x, 5)))
        y += x
        out.gather_output = not sequence
        z = out(y, 5)
        z.mul_(3).square().sum().backward()
        found: list[Any] = [(embedding.weight.grad, 0, 9), (up.weight.grad, 0, 13), (down.weight.grad, 1, 13)]
        found += [(z.detach(), -1, 7)] if sequence else []
        return tuple(collectives.all_gather(t, mesh.tp, dim, shard_sizes(n, mesh.tp.size)) for t, dim, n in found)

    (whole,) = on_ranks(1, body)
    for got in on_ranks(2, body):
        for mine, right in zip(got, whole, strict=True):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("sequence", [False, True])
def test_autocast_gives_the_dtype_that_one_rank_gives(on_ranks: OnRanks, sequence: bool) -> None:
    def body(mesh: Mesh) -> torch.dtype:
        layer = cc.RowParallelLinear(8, 6, mesh=mesh, input_is_parallel=False, sequence_parallel=sequence, seed=1)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.ones(4, 8))
        y.float().sum().backward()
        assert layer.bias is not None
        assert layer.bias.grad is not None
        assert layer.bias.grad.tolist() == [4.0] * 6
        return y.dtype

    assert {*on_ranks(1, body), *on_ranks(2, body)} == {torch.bfloat16}


def test_what_comes_back_is_frozen_and_computed_as_it_was(on_ranks: OnRanks) -> None:
    frozen = nn.Linear(5, 7).requires_grad_(False)

    def body(mesh: Mesh) -> None:
        split = cc.ColumnParallelLinear.from_linear(frozen, mesh)
        assert not any(p.requires_grad for p in split.to_linear().parameters())
        mlp = cc.ParallelMLP.from_linears(frozen, nn.Linear(7, 5), mesh, gate=frozen)
        assert [name for name, linear in mlp.to_linears().items() if not linear.weight.requires_grad] == ["gate", "up"]
        nn.utils.parametrizations.weight_norm(split)
        torch.testing.assert_close(split.to_linear().weight, frozen.weight)

    on_ranks(2, body)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_does_not_reach_the_drawing(on_ranks: OnRanks, device: str) -> None:
    """``with torch.device(...)`` or ``set_default_device`` around a model: weights are drawn on the CPU all the same."""

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        torch.manual_seed(mesh.rank)
        scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
        with torch.device(device):
            block = ParallelBlock(8, 4, 9, dropout=0.5, attention={"rope_theta": 1e4, "rope_scaling": scaling}, mesh=mesh)
            y = block(torch.ones(1, 3, 8, device="cpu"))
        return block.mlp.down.to_linear().weight, y

    torch.manual_seed(0)
    for weight, y in on_ranks(2, body):
        assert weight.device == y.device == torch.device("cpu")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_is_computed_is_used(on_ranks: OnRanks, name: str, compiled: bool) -> None:
    """torch's parametrisation takes one parameter out of the layer and leaves the other."""

    class Doubled(nn.Module):
        def forward(self, parameter: Tensor) -> Tensor:
            return parameter * 2

    def body(mesh: Mesh) -> None:
        x, options = torch.randn(3, 6, generator=torch.Generator().manual_seed(2)), {"mesh": mesh, "seed": 1}
        for layer in (
            cc.ColumnParallelLinear(6, 6, gather_output=True, **options),
            cc.RowParallelLinear(6, 6, input_is_parallel=False, **options),
            LayerNorm(6, mesh=mesh),
        ):
            nn.init.normal_(layer.get_parameter("bias"), generator=torch.Generator().manual_seed(3))
            twice = {key: p.detach() * (2 if key == name else 1) for key, p in layer.named_parameters()}
            expected = torch.func.functional_call(layer, twice, x)
            nn.utils.parametrize.register_parametrization(layer, name, Doubled())
            got = torch.compile(layer, backend="eager", fullgraph=True)(x) if compiled else layer(x)
            torch.testing.assert_close(got, expected)

    on_ranks(2, body)


def test_frozen_weights_autocast_and_checkpointing(on_ranks: OnRanks) -> None:
    from torch.utils.checkpoint import checkpoint

    linear = unsplit_linear(16, 24, True, torch.float32)
    x, upstream = inputs(16, 24, torch.float32)

    def grads(layer: Any, how: str) -> Tensor:
        start = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            y = checkpoint(layer, start, use_reentrant=False) if how == "checkpoint" else layer(start)
        y.float().backward(upstream)
        assert start.grad is not None
        return start.grad

    for how in ("frozen", "autocast", "checkpoint"):
        expected = grads(linear, how)

        def body(mesh: Mesh, how: str = how) -> Tensor:
            layer = cc.ColumnParallelLinear.from_linear(linear, mesh, gather_output=True)
            layer.requires_grad_(how != "frozen")
            got = grads(layer, how)
            assert (layer.weight.grad is None) == (how == "frozen")
            return got

        for got in on_ranks(2, body):
            torch.testing.assert_close(got, expected, atol=0.05 if how == "autocast" else 1e-5, rtol=1e-2)
