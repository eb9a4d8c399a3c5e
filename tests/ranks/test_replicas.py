"""Replicas: counted once in norms, made equal at start, and found when they drift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import crosscut as cc
from crosscut.collectives import all_reduce
from crosscut.distributed.mesh import Mesh
from crosscut.errors import MismatchError, UsageError
from crosscut.layers import RMSNorm, replicas
from crosscut.layers.replicas import (
    broadcast_parameters,
    check_replicas,
    clip_grad_norm_,
    grad_norm,
    placed_parameters,
)

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]


class Unsplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.norm, self.up, self.down = nn.RMSNorm(10, 1e-5), nn.Linear(10, 21), nn.Linear(21, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Split(nn.Module):
    def __init__(self, whole: Unsplit, mesh: Mesh) -> None:
        super().__init__()
        self.norm = RMSNorm(10, mesh=mesh)
        self.mlp = cc.ParallelMLP.from_linears(whole.up, whole.down, mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def batch() -> Tensor:
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_the_unsplit_models(on_ranks: OnRanks, world: int, max_norm: float) -> None:
    whole = Unsplit()
    reference = Unsplit()
    (reference(batch()) ** 2).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
        model = Split(whole, mesh)
        (model(batch()) ** 2).sum().backward()
        before = clip_grad_norm_(model, max_norm, mesh)
        assert model.norm.weight.grad is not None
        return before, grad_norm(model, mesh), model.norm.weight.grad

    for before, after, grad in on_ranks(world, body):
        torch.testing.assert_close(before, norm)
        torch.testing.assert_close(after, norm.clamp(max=max_norm))
        torch.testing.assert_close(grad, reference.norm.weight.grad)


def test_counting_replicas_on_every_rank_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL PR 3788, ROCm TE PR 715: replicated gradients counted tp times."""

    def careless(model: nn.Module, mesh: Mesh) -> Tensor:
        grads = [p.local.grad for p in placed_parameters(model) if p.local.grad is not None]
        return all_reduce(torch.stack([g.square().sum() for g in grads]).sum(), mesh.tp).sqrt()

    monkeypatch.setattr(replicas, "grad_norm", careless)
    with pytest.raises(AssertionError):
        test_clipping_is_the_unsplit_models(on_ranks, 4, 0.5)


def test_a_tied_parameter_is_counted_once() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(5, 3)
    model.head = nn.Linear(3, 5, bias=False)
    model.head.weight = model.embedding.weight
    assert [placed.name for placed in placed_parameters(model)] == ["embedding.weight"]


def drift(mesh: Mesh, where: str, rank: int) -> None:
    model = Split(Unsplit(), mesh)
    broadcast_parameters(model, mesh)
    check_replicas(model, mesh)
    if mesh.rank == rank:
        with torch.no_grad():
            model.get_parameter(where).flatten()[0].add_(1e-3)
    check_replicas(model, mesh)


@pytest.mark.parametrize(
    ("where", "rank", "words"),
    [
        ("norm.weight", 1, "the copies of 'norm.weight' differ between ranks 0 and 1 of tp"),
        ("mlp.down.bias", 0, "the copies of 'mlp.down.bias' differ between ranks 0 and 1 of tp"),
        ("mlp.up.weight", 2, "the copies of 'mlp.up.weight' differ between ranks 0 and 1 of dp"),
    ],
)
def test_drift_is_named(on_ranks: OnRanks, where: str, rank: int, words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        on_ranks(4, drift, where, rank, tp=2)


def test_shared_kv_heads_are_copies_too(on_ranks: OnRanks) -> None:
    """Two KV heads on four ranks: each is on two of them, and a drift between those two must show."""

    def body(mesh: Mesh, mend: bool) -> None:
        attention = cc.ParallelAttention(16, 4, kv_heads=2, mesh=mesh, seed=1)
        check_replicas(attention, mesh)
        if mesh.rank == 3:
            with torch.no_grad():
                attention.qkv.weight[-1, 0] += 1e-3
        if mend:
            broadcast_parameters(attention, mesh)
        check_replicas(attention, mesh)

    on_ranks(4, body, True)
    with pytest.raises(MismatchError, match=r"the copies of 'qkv.weight' differ between ranks of tp that share its rows"):
        on_ranks(4, body, False)


def test_swapped_elements_are_drift_too(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> None:
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]) if mesh.rank else torch.tensor([[2.0, 1.0, 3.0, 4.0]]))
        check_replicas(model, mesh)

    with pytest.raises(MismatchError, match="'weight'"):
        on_ranks(2, body)


def test_broadcast_makes_copies_equal_and_leaves_shards_alone(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        norm = RMSNorm(4, mesh=mesh)
        up = cc.ColumnParallelLinear(4, 6, mesh=mesh, seed=1)
        with torch.no_grad():
            norm.weight.fill_(float(mesh.rank))
        model = nn.ModuleDict({"norm": norm, "up": up})
        before = up.weight.detach().clone()
        broadcast_parameters(model, mesh)
        assert torch.equal(before, up.weight)
        check_replicas(model, mesh)
        return norm.weight.detach(), up.weight.detach()

    results = on_ranks(4, body, tp=2)
    assert all(float(norm.sum()) == 0 for norm, _ in results)


def test_parameters_spread_over_other_ranks_than_dp_are_refused(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> None:
        assert mesh.device_mesh is not None
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh.device_mesh["tp"], [Shard(0)]))
        check_replicas(model, mesh)

    with pytest.raises(UsageError, match=r"'weight' is a DTensor over the ranks \[0, 1\], and dp is \[\d\]"):
        on_ranks(2, body)


def test_max_norm_must_be_positive(on_ranks: OnRanks) -> None:
    with pytest.raises(UsageError, match="max_norm=0"):
        on_ranks(1, lambda mesh: clip_grad_norm_(nn.Linear(2, 2), 0, mesh))
    with pytest.raises(UsageError, match="max_norm=None"):
        on_ranks(1, lambda mesh: clip_grad_norm_(nn.Linear(2, 2), None, mesh))  # type: ignore[arg-type]


def test_ranks_without_rows_are_copies_too(on_ranks: OnRanks) -> None:
    """Three ranks of tp and two tokens: one rank of each has nothing to compare over dp."""

    def body(mesh: Mesh) -> None:
        check_replicas(cc.VocabParallelEmbedding(2, 4, mesh=mesh, seed=1), mesh)

    on_ranks(6, body, tp=3)


@pytest.mark.parametrize("how", [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_a_cut_weight_that_is_computed_is_refused(on_ranks: OnRanks, how: Any) -> None:
    """Its sources pass for whole parameters: the first rank's shard would be broadcast over the others'."""

    def body(mesh: Mesh) -> None:
        model = nn.ModuleDict({"up": how(cc.ColumnParallelLinear(4, 6, mesh=mesh, seed=1)), "norm": RMSNorm(4, mesh=mesh)})
        for act in (broadcast_parameters, check_replicas, grad_norm):
            with pytest.raises(UsageError, match=r"'up.weight' is cut and no parameter"):
                act(model, mesh)
        torch.nn.utils.parametrize.remove_parametrizations(model["up"], "weight")
        torch.nn.utils.parametrize.register_parametrization(model["norm"], "weight", nn.Identity())
        check_replicas(model, mesh)

    on_ranks(2, body)
