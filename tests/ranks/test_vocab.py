"""Vocabulary-parallel embedding and cross-entropy equal torch's own, at every tp and vocabulary, with every option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosscut as cc
from crosscut import collectives
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers import cross_entropy as cross_entropy_module
from crosscut.layers.shards import gather
from crosscut.sharding import shard_range, shard_sizes
from parity import assert_equal_to_rounding, expected, step

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]
TOKENS = 10
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "label smoothing": {"label_smoothing": 0.3},
    "class weights": {"weight": True},
    "class weights, smoothing, sum": {"weight": True, "label_smoothing": 0.2, "reduction": "sum"},
    "class weights, smoothing, mean": {"weight": True, "label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.1},
    "z-loss, weights, none": {"z_loss": 0.1, "weight": True, "reduction": "none"},
    "nothing ignored": {"ignore_index": 10_000},
}


def case(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(2, TOKENS // 2, vocab, generator=generator) * 3).to(dtype)
    target = torch.randint(0, vocab, (2, TOKENS // 2), generator=generator)
    weight = torch.rand(vocab, generator=generator) + 0.5
    upstream = torch.randn(2, TOKENS // 2, generator=generator)
    return logits, target, weight, upstream


def unsplit(logits: Tensor, target: Tensor, z_loss: float = 0.0, reduction: str = "mean", **options: Any) -> Tensor:
    """torch's own loss, with PaLM's z-loss added."""
    flat, wanted = logits.flatten(0, -2), target.flatten()
    loss = F.cross_entropy(flat, wanted, reduction=reduction, **options)
    if z_loss:
        kept = wanted != options.get("ignore_index", -100)
        extra = torch.where(kept, z_loss * flat.logsumexp(-1) ** 2, 0.0)
        loss = loss + (extra.sum() / kept.sum() if reduction == "mean" else extra.sum() if reduction == "sum" else extra)
    return loss.view(target.shape) if reduction == "none" else loss


def run_case(loss: Callable[..., Tensor], logits: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    value = loss(logits)
    value.backward(upstream.to(value.dtype) if value.dim() else None)
    assert logits.grad is not None
    return value.detach(), logits.grad


def check_loss(on_ranks: OnRanks, world: int, vocab: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits, target, weight, upstream = case(vocab, dtype)
    options = options | ({"weight": weight} if options.get("weight") else {})
    if "ignore_index" not in options:
        target[0, 1] = target[1, 3] = -100
    doubled = options | ({"weight": weight.double()} if "weight" in options else {})
    exact = run_case(lambda z: unsplit(z, target, **doubled), logits.double(), upstream)
    plain = run_case(lambda z: unsplit(z.float(), target, **options), logits, upstream)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        mine = logits[..., shard_range(vocab, world, mesh.rank)]
        value, grad = run_case(lambda z: cc.vocab_parallel_cross_entropy(z, target, mesh.tp, vocab, **options), mine, upstream)
        assert grad.dtype == dtype
        return value, collectives.all_gather(grad, mesh.tp, -1, shard_sizes(vocab, world))

    for value, grad in on_ranks(world, body):
        assert_equal_to_rounding("loss", value, plain[0].float(), exact[0])
        assert_equal_to_rounding("gradient", grad, plain[1], exact[1])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab", [24, 29, 5])
@pytest.mark.parametrize("world", WORLDS)
def test_cross_entropy_equals_unsplit(on_ranks: OnRanks, world: int, vocab: int, options: dict[str, Any]) -> None:
    check_loss(on_ranks, world, vocab, torch.float32, options)


@pytest.mark.parametrize("world", WORLDS)
def test_cross_entropy_of_bf16_logits_is_taken_in_float32(on_ranks: OnRanks, world: int) -> None:
    check_loss(on_ranks, world, 29, torch.bfloat16, OPTIONS["class weights, smoothing, mean"])


def test_smoothing_over_the_local_vocabulary_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM issue 737: each rank smooths over its own part, and the loss differs from rank to rank."""
    honest = cross_entropy_module.all_reduce

    def forgetful(x: Tensor, group: Any, op: str = "sum") -> Tensor:
        if op == "max":
            return honest(x, group, op)
        return torch.stack([*honest(x, group)[:2], x[2]])

    monkeypatch.setattr(cross_entropy_module, "all_reduce", forgetful)
    with pytest.raises(AssertionError, match="loss: relative error"):
        check_loss(on_ranks, 2, 24, torch.float32, OPTIONS["label smoothing"])


def test_all_ignored_is_what_torch_says(on_ranks: OnRanks) -> None:
    target = torch.full((3,), -100)

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(3, 4)
        return (
            cc.vocab_parallel_cross_entropy(logits, target, mesh.tp, 8),
            cc.vocab_parallel_cross_entropy(logits, target, mesh.tp, 8, reduction="sum"),
        )

    for mean, total in on_ranks(2, body):
        assert mean.isnan()
        assert float(total) == 0


def test_huge_logits_do_not_overflow(on_ranks: OnRanks) -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3, 0.0]])

    def body(mesh: Mesh) -> Tensor:
        return cc.vocab_parallel_cross_entropy(logits.chunk(2, 1)[mesh.rank], torch.tensor([2]), mesh.tp, 4)

    for value in on_ranks(2, body):
        assert float(value) == pytest.approx(1000)


# ---------------------------------------------------------------------------------------------------------- embedding


def unsplit_embedding(vocab: int, padding: int | None, dtype: torch.dtype) -> nn.Embedding:
    torch.manual_seed(3)
    return nn.Embedding(vocab, 6, padding_idx=padding, dtype=dtype)


def embedding_step(embedding: nn.Module, ids: Tensor, upstream: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    ignored = torch.zeros(1)
    out = step(embedding, ignored, upstream, lambda x: call(ids) + 0 * x.to(upstream.dtype))
    del out["dx"]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize(("vocab", "padding"), [(24, None), (29, 0), (29, -1), (5, 2)])
@pytest.mark.parametrize("world", WORLDS)
def test_embedding_equals_unsplit(
    on_ranks: OnRanks, world: int, vocab: int, padding: int | None, sequence: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    ids = torch.randint(0, vocab, (TOKENS,), generator=generator)
    ids[3] = 0 if padding is None else padding % vocab
    upstream = torch.randn(TOKENS, 6, generator=generator).to(dtype)
    embedding = unsplit_embedding(vocab, padding, dtype)
    right = expected(embedding, upstream, upstream, world, lambda module, _, g: embedding_step(module, ids, g, module))
    rows = shard_sizes(TOKENS, world)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        layer = cc.VocabParallelEmbedding.from_embedding(embedding, mesh, sequence_parallel=sequence)
        mine = upstream.split(rows)[mesh.rank] if sequence else upstream
        out = embedding_step(layer, ids, mine, layer)
        if sequence:
            out["y"] = collectives.all_gather(out["y"], mesh.tp, 0, rows)
        return {
            key: gather(value, layer.cuts["weight"], layer.shapes["weight"], mesh.tp) if " of " in key else value
            for key, value in out.items()
        }

    for rank, got in enumerate(on_ranks(world, body)):
        right.check(got, f"rank {rank}")


def test_embedding_round_trips_and_starts_equal_at_every_tp(on_ranks: OnRanks) -> None:
    embedding = unsplit_embedding(29, 4, torch.bfloat16)
    embedding.weight.requires_grad_(False)

    def body(mesh: Mesh) -> Tensor:
        back = cc.VocabParallelEmbedding.from_embedding(embedding, mesh).to_embedding()
        assert torch.equal(back.weight, embedding.weight)
        assert back.padding_idx == 4
        assert not back.weight.requires_grad
        return cc.VocabParallelEmbedding(131, 5, mesh=mesh, seed=5, padding_idx=7).to_embedding().weight.detach()

    (alone,) = on_ranks(1, body)
    assert float(alone[7].abs().max()) == 0
    assert float(alone.std()) == pytest.approx(1, rel=0.1)
    for world in (2, 3, 4):
        assert all(torch.equal(alone, other) for other in on_ranks(world, body))


def alone() -> Mesh:
    from crosscut.distributed.mesh import make_mesh

    return make_mesh(device="cpu")


def loss(**options: Any) -> Tensor:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 4), "target": torch.zeros(2, dtype=torch.long)} | options
    return cc.vocab_parallel_cross_entropy(group=alone().tp, **arguments)


BAD: dict[str, Callable[[], object]] = {
    "num_embeddings=0": lambda: cc.VocabParallelEmbedding(0, 4, mesh=alone()),
    "padding_idx=9 in a vocabulary of 4": lambda: cc.VocabParallelEmbedding(4, 4, mesh=alone(), padding_idx=9),
    "token 4 is not one of the 4 of the vocabulary": lambda: cc.VocabParallelEmbedding(4, 4, mesh=alone())(
        torch.tensor([1, 4])
    ),
    "token -1 is not one of the 4": lambda: cc.VocabParallelEmbedding(4, 4, mesh=alone())(torch.tensor([1, -1])),
    "an embedding with sparse": lambda: cc.VocabParallelEmbedding.from_embedding(nn.Embedding(4, 4, sparse=True), alone()),
    "target 4 is not one of the 4 of the vocabulary": lambda: loss(target=torch.tensor([0, 4])),
    r"logits \[2, 4\] and target \[3\]": lambda: loss(target=torch.zeros(3, dtype=torch.long)),
    "vocabulary 5": lambda: loss(vocab_size=5),
    r"class weights \[3\] for a vocabulary of 4": lambda: loss(weight=torch.ones(3)),
    "label_smoothing=1.5": lambda: loss(label_smoothing=1.5),
    "reduction 'avg' is not known": lambda: loss(reduction="avg"),
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_work_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BAD[words]()


@pytest.mark.parametrize("options", [{"z_loss": 0.3}, {"label_smoothing": 0.2, "weight": torch.arange(1.0, 6.0)}], ids=str)
@pytest.mark.parametrize("world", [1, 2, 6])
def test_cross_entropy_gradients_of_gradients(on_ranks: OnRanks, world: int, options: dict[str, Any]) -> None:
    logits, target, *_ = case(5, torch.float32)

    def penalty(loss: Tensor, x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad((first**2).sum() + loss**2, x)[0]

    whole = logits.double().requires_grad_()
    wanted = {key: value.double() if isinstance(value, Tensor) else value for key, value in options.items()}
    right = penalty(unsplit(whole, target, **wanted), whole)

    def body(mesh: Mesh) -> None:
        own = shard_range(5, world, mesh.tp.rank)
        x = logits[..., own].clone().requires_grad_()
        got = penalty(cc.vocab_parallel_cross_entropy(x, target, mesh.tp, 5, **options), x)
        torch.testing.assert_close(got, right[..., own].float(), rtol=1e-3, atol=1e-5)

    on_ranks(world, body)


def test_autocast_leaves_the_loss_in_float32(on_ranks: OnRanks) -> None:
    """The smoothing's sum over the vocabulary is a multiply, which autocast takes in bfloat16."""
    logits, target = torch.randn(64, 1001) + 3, torch.randint(0, 1001, (64,))

    def body(mesh: Mesh) -> None:
        mine = logits[:, shard_range(1001, 2, mesh.tp.rank)]
        with torch.autocast("cpu", torch.bfloat16):
            got = cc.vocab_parallel_cross_entropy(mine, target, mesh.tp, 1001, label_smoothing=0.9)
        torch.testing.assert_close(got, F.cross_entropy(logits, target, label_smoothing=0.9))

    on_ranks(2, body)
