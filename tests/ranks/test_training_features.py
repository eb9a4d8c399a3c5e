"""What training uses around split layers, each equal to the unsplit model: accumulation, recomputation, AMP, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crosscut as cc
from crosscut.collectives import all_gather
from crosscut.distributed.mesh import Mesh
from crosscut.errors import MismatchError, UsageError
from crosscut.layers import GradScaler, ParallelBlock, RMSNorm, check_replicas, clip_grad_norm_, sum_partial_gradients
from crosscut.layers.placed import gradients, placed_parameters
from crosscut.sharding import shard_sizes
from split_net import HIDDEN, Net, alone, batch, wholes

OnRanks = Callable[..., list[Any]]
Loss = Callable[[Net, int], Tensor]


def plain(model: Net, step: int) -> Tensor:
    return model.loss(step, 4)


def recomputed(reentrant: bool) -> Loss:
    def loss(model: Net, step: int) -> Tensor:
        ids = batch(step, 4)
        x = checkpoint(model.block, model.embedding(ids), use_reentrant=reentrant)
        return cc.vocab_parallel_cross_entropy(model.head(x), ids, model.mesh.tp, 19)

    return loss


def train(mesh: Mesh, loss: Loss, micro: int = 1, steps: int = 3, **options: Any) -> dict[str, Tensor]:
    """Whole parameters after AdamW steps of ``micro`` backward passes each, clipped."""
    model = Net(mesh, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(steps):
        optimizer.zero_grad()
        if micro == 1:
            loss(model, step).backward()
        for part in batch(step, 4).chunk(micro) if micro > 1 else ():
            model(part).div(micro).backward()
        clip_grad_norm_(model, 0.5, mesh)
        optimizer.step()
    check_replicas(model, mesh)
    return wholes(model, mesh)


WAYS: dict[str, tuple[Loss, dict[str, Any]]] = {
    "accumulated": (plain, {"micro": 4}),
    "recomputed": (recomputed(False), {}),
    "recomputed, reentrant": (recomputed(True), {}),
    "fused": (plain, {"fused": True}),
    "foreach": (plain, {"foreach": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_train_gives_the_unsplit_models_parameters(on_ranks: OnRanks, way: str) -> None:
    loss, options = WAYS[way]
    expected = train(alone(), plain)
    for world in (2, 3):
        for got in on_ranks(world, lambda mesh: train(mesh, loss, **options)):
            for name, whole in expected.items():
                torch.testing.assert_close(got[name], whole, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_lost_micro_batch_would_turn_it_red() -> None:
    expected, got = train(alone(), plain), train(alone(), lambda model, step: model(batch(step, 4)[:3]))
    assert not torch.allclose(got["head.weight"], expected["head.weight"], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_autocast_rounds_as_the_unsplit_model_does(on_ranks: OnRanks, world: int, dtype: torch.dtype) -> None:
    """Multiplies under autocast: as far from float32 as the unsplit model, to twice (sums in another order round anew)."""

    def gradient(mesh: Mesh, autocast: bool) -> dict[str, Tensor]:
        model = Net(mesh, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = GradScaler(mesh, init_scale=256.0, enabled=dtype == torch.float16)
        with torch.autocast("cpu", dtype, enabled=autocast):
            loss = plain(model, 0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        return {grad.name: grad.whole(mesh.tp) for grad in gradients(model, mesh)}

    exact, unsplit = gradient(alone(), False), gradient(alone(), True)

    def error(found: dict[str, Tensor]) -> float:
        squares = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        return (squares / sum(float(whole.square().sum()) for whole in exact.values())) ** 0.5

    assert error(unsplit) > torch.finfo(dtype).eps / 4, "nothing was rounded"
    for got in on_ranks(world, gradient, True):
        assert error(got) < 2 * error(unsplit)


def scaled_steps(mesh: Mesh, scaler: Any, fused: bool) -> tuple[list[bool], float]:
    """Which of 4 steps were skipped, and the scale; in step 2 one element of the last rank's shard is infinite."""
    model = Net(mesh, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    skipped = []
    for step in range(4):
        before = wholes(model, mesh)
        optimizer.zero_grad()
        scaler.scale(plain(model, step)).backward()
        if step == 2 and mesh.tp.rank == mesh.tp.size - 1:
            assert model.head.weight.grad is not None
            model.head.weight.grad[0, 0] = float("inf")
        if step % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, 0.5, mesh)
        scaler.step(optimizer)
        scaler.update()
        after = wholes(model, mesh)
        skipped.append(all(torch.equal(before[name], after[name]) for name in before))
    check_replicas(model, mesh)
    return skipped, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_an_inf_on_one_rank_skips_the_step_on_every_rank(on_ranks: OnRanks, fused: bool) -> None:
    results = on_ranks(3, lambda mesh: scaled_steps(mesh, GradScaler(mesh, init_scale=512.0), fused))
    assert results == [([False, False, True, False], 256.0)] * 3


def test_torchs_own_scaler_tears_the_model(on_ranks: OnRanks) -> None:
    """Why there is another: the rank with the inf skips, its peers step."""
    with pytest.raises(MismatchError, match="differ between ranks 0 and 1 of tp"):
        on_ranks(2, lambda mesh: scaled_steps(mesh, torch.amp.GradScaler("cpu", init_scale=512.0), False))


def test_unscaled_gradients_are_those_without_a_scaler(on_ranks: OnRanks) -> None:
    def norm(mesh: Mesh, scale: bool) -> float:
        model = Net(mesh, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = GradScaler(mesh, init_scale=4096.0, enabled=scale)
        scaler.scale(plain(model, 0)).backward()
        scaler.unscale_(optimizer)
        return float(clip_grad_norm_(model, 1e9, mesh))

    expected = norm(alone(), False)
    assert on_ranks(2, norm, True) == pytest.approx([expected] * 2, rel=1e-6)


class TokenScale(nn.Module):
    """A user's module between the layers: with sequence parallelism it sees its rank's tokens, and sums nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def token_scale_step(mesh: Mesh, declared: bool) -> Tensor:
    """The gradient of its weight, from the rank's own tokens."""
    scale = TokenScale()
    if declared:
        scale.partial_gradients = {"weight": "caller"}
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(5))
    scale(x.split(shard_sizes(7, mesh.tp.size))[mesh.tp.rank]).square().sum().backward()
    sum_partial_gradients(scale, mesh)
    assert scale.weight.grad is not None
    copies = all_gather(scale.weight.grad, mesh.tp).view(mesh.tp.size, -1)
    assert bool((copies == copies[0]).all()), "replicas would drift"
    return scale.weight.grad


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_partial_gradients_of_others_modules_are_summed_when_declared(on_ranks: OnRanks, world: int) -> None:
    expected = token_scale_step(alone(), False)
    for got in on_ranks(world, token_scale_step, True):
        torch.testing.assert_close(got, expected)


def test_without_the_declaration_replicas_drift(on_ranks: OnRanks) -> None:
    """Megatron-LM 1446, NeMo-RL 3716: the sum is the caller's job, and forgotten."""
    with pytest.raises(AssertionError, match="replicas would drift"):
        on_ranks(2, token_scale_step, False)


def test_a_cut_parameter_cannot_be_declared_partial(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> None:
        layer = cc.ColumnParallelLinear(4, 6, mesh=mesh, seed=1)
        layer.partial_gradients = {"weight": "caller"}
        layer(torch.ones(2, 4)).sum().backward()
        sum_partial_gradients(layer, mesh)

    with pytest.raises(UsageError, match="'weight', which is cut"):
        on_ranks(2, body)


@pytest.mark.parametrize("sequence", [False, True])
def test_what_kind_each_parameter_is(sequence: bool) -> None:
    mesh = alone()
    attention = {"qk_norm": True, "out_bias": True}
    block = ParallelBlock(8, 2, 6, mesh=mesh, sequence_parallel=sequence, attention=attention, bias=True, norm="layer")
    model = nn.ModuleDict({"block": block, "norm": RMSNorm(8, mesh=mesh), "other": nn.Linear(2, 2)})
    kinds = {placed.name: placed.kind for placed in placed_parameters(model)}
    own_tokens = "partial" if sequence else "replicated"
    assert kinds == {
        "block.attention_norm.weight": own_tokens,
        "block.attention_norm.bias": own_tokens,
        "block.mlp_norm.weight": own_tokens,
        "block.mlp_norm.bias": own_tokens,
        "block.attention.qkv.weight": "sharded",
        "block.attention.qkv.bias": "sharded",
        "block.attention.o.weight": "sharded",
        "block.attention.o.bias": own_tokens,
        "block.attention.q_norm.weight": "partial",  # each rank sees its own heads, with and without sequence parallelism
        "block.attention.k_norm.weight": "partial",
        "block.mlp.up.weight": "sharded",
        "block.mlp.up.bias": "sharded",
        "block.mlp.down.weight": "sharded",
        "block.mlp.down.bias": own_tokens,
        "norm.weight": "replicated",
        "other.weight": "replicated",
        "other.bias": "replicated",
    }
