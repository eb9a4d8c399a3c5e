"""Complaints about other libraries, each with a test that would show the fault here. docs/complaints.md is the table of them.

Those whose test fits better beside a layer's other tests are there; a unit test checks that the table's names exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosscut as cc
from block_cases import check as check_block
from crosscut.collectives import all_gather
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers import ParallelBlock, RMSNorm, check_replicas, clip_grad_norm_
from crosscut.layers.replicas import grad_norm, placed_parameters
from crosscut.layers.shards import gather
from crosscut.sharding import shard_range, shard_sizes

OnRanks = Callable[..., list[Any]]
SPLIT = [2, 3, 4]


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("world", SPLIT)
def test_a_row_bias_counts_once(on_ranks: OnRanks, world: int, sequence: bool) -> None:
    """TGI issue 1036: the bias added on each rank. torchtitan PR 4332: its gradient 1/tp too small. Exact, not to rounding."""
    linear = nn.Linear(12, 5)
    nn.init.ones_(linear.bias)
    rows = shard_sizes(6, world)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        row = cc.RowParallelLinear.from_linear(linear, mesh, input_is_parallel=False, sequence_parallel=sequence)
        y = row(torch.zeros(6, 12))
        y.sum().backward()
        assert row.bias is not None
        assert row.bias.grad is not None
        return all_gather(y.detach(), mesh.tp, 0, rows) if sequence else y.detach(), row.bias.grad

    for y, grad in on_ranks(world, body):
        assert torch.equal(y, torch.ones(6, 5))
        assert torch.equal(grad, torch.full((5,), 6.0))


@pytest.mark.parametrize("world", SPLIT)
def test_gathered_logits_never_pass_for_shards(on_ranks: OnRanks, world: int) -> None:
    """Megatron-LM issue 7452: with gathered logits the parallel loss is too large by log(tp), and nothing says so."""
    logits, target = noise(4, 12), torch.tensor([0, 5, 11, 3])

    def body(mesh: Mesh) -> Tensor:
        for vocab in (12, None):
            with pytest.raises(UsageError):
                cc.vocab_parallel_cross_entropy(logits, target, mesh.tp, vocab)
        wrong = cc.vocab_parallel_cross_entropy(logits, target, mesh.tp, 12 * world)  # what the fault computes
        assert float(wrong - F.cross_entropy(logits, target)) != pytest.approx(0, abs=1e-3)
        return cc.vocab_parallel_cross_entropy(logits[:, shard_range(12, world, mesh.rank)], target, mesh.tp, 12)

    for loss in on_ranks(world, body):
        torch.testing.assert_close(loss, F.cross_entropy(logits, target))


def test_a_vocabulary_that_does_not_divide_trains_as_unsplit(on_ranks: OnRanks) -> None:
    """Megatron-LM issue 1754: vocabulary 50257 without padding, tp 2, lr 0.3: the loss leaves the unsplit one's."""
    vocab, hidden, steps = 50257, 4, 6
    ids = torch.tensor([[0, 25128, 25129, 50256, 7, 40000]])
    embedding = nn.Embedding(vocab, hidden, _weight=noise(vocab, hidden) / 2)

    def train(
        embed: nn.Module, head: Callable[[Tensor], Tensor], loss_of: Callable[..., Tensor], parameters: Any
    ) -> list[float]:
        optimizer, losses = torch.optim.SGD(parameters, lr=0.3), []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(head(embed(ids[:, :-1])), ids[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def body(mesh: Mesh) -> list[float]:
        embed = cc.VocabParallelEmbedding.from_embedding(embedding, mesh)
        head = cc.VocabParallelHead(hidden, vocab, mesh=mesh, embedding=embed)
        loss = cc.vocab_parallel_cross_entropy
        return train(embed, head, lambda z, target: loss(z, target, mesh.tp, vocab), embed.parameters())

    split = on_ranks(2, body)
    whole = train(
        embedding, lambda x: F.linear(x, embedding.weight), lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()),
        embedding.parameters(),
    )  # fmt: skip
    assert whole[-1] < whole[0] - 0.5
    for losses in split:
        assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_do_not_drift_over_steps(on_ranks: OnRanks, world: int) -> None:
    """NeMo-RL issue 3716, Automodel PR 3822: replicas drift apart step by step, and a reload then changes the model."""

    def body(mesh: Mesh) -> list[Tensor]:
        block = ParallelBlock(
            16, 4, 20, mesh=mesh, bias=True, norm="layer", sequence_parallel=True, seed=1,
            attention={"kv_heads": 1, "qk_norm": True},
        )  # fmt: skip
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
        for index in range(4):
            optimizer.zero_grad()
            x = noise(2, 8, 16, seed=index).chunk(mesh.tp.size, 1)[mesh.rank]
            block(x, None, 8).square().sum().backward()
            optimizer.step()
        check_replicas(block, mesh)
        return [gather(p.local, p.cut, p.shape, mesh.tp) for p in placed_parameters(block)]

    (alone,) = on_ranks(1, body)
    for split in on_ranks(world, body):
        for a, b in zip(alone, split, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("world", SPLIT)
def test_clipping_takes_split_and_plain_parameters_together(on_ranks: OnRanks, world: int) -> None:
    """torchtune issue 2420, pytorch issues 180346 and 121020: clipping fails when not all parameters are split."""
    up, down, head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 3)
    whole = nn.Sequential(up, nn.GELU(), down, nn.RMSNorm(6, 1e-5), head)
    (whole(noise(5, 6)) ** 2).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        plain = nn.Linear(6, 3)
        plain.load_state_dict(head.state_dict())
        model = nn.Sequential(cc.ParallelMLP.from_linears(up, down, mesh), RMSNorm(6, mesh=mesh), plain)
        (model(noise(5, 6)) ** 2).sum().backward()
        return clip_grad_norm_(model, 0.5, mesh), grad_norm(model, mesh)

    for before, after in on_ranks(world, body):
        torch.testing.assert_close(before, norm)
        torch.testing.assert_close(after, torch.tensor(0.5))


@pytest.mark.parametrize("world", [3, 4])
def test_sizes_that_do_not_divide_keep_their_shapes(on_ranks: OnRanks, world: int) -> None:
    """pytorch issues 150336, 141335, 144109 and 110762: uneven shards break local outputs, or give a wrong whole shape."""
    up, down = nn.Linear(10, 17), nn.Linear(17, 10)
    x = noise(4, 10)

    def body(mesh: Mesh) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        mlp = cc.ParallelMLP.from_linears(up, down, mesh)
        back = mlp.to_linears()["up"]
        return mlp(x).detach(), tuple(mlp.up(x).shape), tuple(back.weight.shape)

    results = on_ranks(world, body)
    assert [local[1] for _, local, _ in results] == shard_sizes(17, world)
    for y, _, shape in results:
        assert shape == (17, 10)
        torch.testing.assert_close(y, down(F.gelu(up(x))).detach())


@pytest.mark.parametrize("world", SPLIT)
def test_a_cut_vocabulary_keeps_every_row(on_ranks: OnRanks, world: int) -> None:
    """transformers issue 37051: wrong strides where vocab % tp != 0, rows lost. ColossalAI issue 6167: it will not load."""
    embedding = nn.Embedding(29, 6)

    def body(mesh: Mesh) -> Tensor:
        layer = cc.VocabParallelEmbedding.from_embedding(embedding, mesh)
        assert layer.weight.is_contiguous()
        other = cc.VocabParallelEmbedding(29, 6, mesh=mesh, seed=2)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(torch.arange(29)), embedding.weight)
        return layer.to_embedding().weight

    for weight in on_ranks(world, body):
        assert torch.equal(weight, embedding.weight)


def test_rounding_and_failure_are_told_apart(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """TE issue 1761, Megatron-LM issue 1736: in bf16 every tp gives other logits; which difference is a fault?

    The block on 8 ranks is as near to float64 as an unsplit one that sums in another order; with the partial sums of one rank
    10 % off it is not.
    """
    check_block(on_ranks, 8, False, "rms", False, False, torch.bfloat16)
    right = cc.RowParallelLinear.finish

    def wrong(self: Any, y: Tensor) -> Tensor:
        return right(self, y * (1.1 if self.group.rank == 0 else 1))

    monkeypatch.setattr(cc.RowParallelLinear, "finish", wrong)
    with pytest.raises(AssertionError, match="relative error"):
        check_block(on_ranks, 8, False, "rms", False, False, torch.bfloat16)


@pytest.mark.parametrize("world", SPLIT)
def test_every_rank_holds_only_its_part(on_ranks: OnRanks, world: int) -> None:
    """trl PR 5331: a tp size that is set and silently ignored, so that every rank holds and computes everything."""

    def body(mesh: Mesh) -> tuple[int, int]:
        block = ParallelBlock(24, 12, 24, mesh=mesh, seed=1)
        model = nn.ModuleList([block, cc.VocabParallelEmbedding(24, 24, mesh=mesh), cc.VocabParallelHead(24, 24, mesh=mesh)])
        cut = [placed for placed in placed_parameters(model) if not placed.replicated]
        return sum(p.local.numel() for p in cut), sum(math.prod(p.shape) for p in cut)

    for own, whole in on_ranks(world, body):
        assert own * world == whole
