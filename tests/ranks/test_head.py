"""The head equals an unsplit one, tied or not; a tied weight stays one parameter with one gradient whatever is done to it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import crosscut as cc
from crosscut.collectives import all_gather
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.layers.replicas import clip_grad_norm_, placed_parameters
from crosscut.layers.shards import gather, take
from crosscut.models.weights import load, save
from crosscut.sharding import shard_range, shard_sizes
from parity import expected, step

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]
TOKENS, HIDDEN = 7, 6


class Net(nn.Module):
    """``head(embedding(ids) + x)``, of torch's layers or of the split ones."""

    def __init__(self, embedding: nn.Module, head: nn.Module, softcap: float | None = None) -> None:
        super().__init__()
        self.embedding, self.head, self.softcap = embedding, head, softcap

    def forward(self, ids: Tensor, x: Tensor, *total: int) -> Tensor:
        y = self.head(self.embedding(ids) + x, *total)
        return y if self.softcap is None else self.softcap * torch.tanh(y / self.softcap)


def unsplit(vocab: int, tied: bool, dtype: torch.dtype, softcap: float | None = None) -> Net:
    torch.manual_seed(3)
    net = Net(nn.Embedding(vocab, HIDDEN), nn.Linear(HIDDEN, vocab, bias=False), softcap)
    if tied:
        net.head.weight = net.embedding.weight
    return net.to(dtype)


def split(mesh: Mesh, whole: Net, tied: bool, sequence: bool = False) -> Net:
    embedding = cc.VocabParallelEmbedding.from_embedding(whole.embedding, mesh, sequence_parallel=sequence)
    options: dict[str, Any] = {"sequence_parallel": sequence, "softcap": whole.softcap}
    if tied:
        return Net(embedding, cc.VocabParallelHead(HIDDEN, embedding.num_embeddings, mesh=mesh, embedding=embedding, **options))
    return Net(embedding, cc.VocabParallelHead.from_linear(whole.head, mesh, **options))


def check(
    on_ranks: OnRanks, world: int, vocab: int, tied: bool, sequence: bool, dtype: torch.dtype, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    ids = torch.randint(0, vocab, (TOKENS,), generator=generator)
    x, upstream = (torch.randn(TOKENS, width, generator=generator).to(dtype) for width in (HIDDEN, vocab))
    whole = unsplit(vocab, tied, dtype, softcap)
    right = expected(whole, x, upstream, world, lambda net, x, g: step(net, x, g, lambda x: net(ids, x)))
    rows = shard_sizes(TOKENS, world)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        net = split(mesh, whole, tied, sequence)
        assert len(list(net.parameters())) == (1 if tied else 2)
        mine = upstream[:, shard_range(vocab, world, mesh.rank)]
        own = x.split(rows)[mesh.rank] if sequence else x
        out = step(net, own, mine, lambda x: net(ids, x, TOKENS))
        out["y"] = all_gather(out["y"], mesh.tp, 1, shard_sizes(vocab, world))
        if sequence:
            out["dx"] = all_gather(out["dx"], mesh.tp, 0, rows)
        places = {placed.name: placed for placed in placed_parameters(net)}
        for key in [key for key in out if " of " in key]:
            place = places[key.split()[-1]]
            out[key] = gather(out[key], place.cut, place.shape, mesh.tp)
        return out

    for rank, got in enumerate(on_ranks(world, body)):
        right.check(got, f"rank {rank}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocab", [24, 29, 5])
@pytest.mark.parametrize("world", WORLDS)
def test_head_equals_unsplit(on_ranks: OnRanks, world: int, vocab: int, tied: bool, sequence: bool, dtype: torch.dtype) -> None:
    check(on_ranks, world, vocab, tied, sequence, dtype, 0.7 if vocab == 29 else None)


def test_a_second_weight_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan issue 1524, fairseq2 issue 1380: what was tied is two weights after the split, each with half the gradient."""
    copied = cc.VocabParallelHead._own
    monkeypatch.setattr(cc.VocabParallelHead, "_own", lambda self: (copied(self)[0].detach(), None))
    with pytest.raises(AssertionError, match=r"grad of embedding.weight: relative error"):
        check(on_ranks, 2, 24, True, False, torch.bfloat16, None)


def alone(tied: bool = True) -> Net:
    return split(make_mesh(device="cpu"), unsplit(29, tied, torch.float32), tied)


def is_tied(net: Net) -> bool:
    (parameter,) = net.parameters()
    net.zero_grad()
    net(torch.tensor([1, 2]), torch.zeros(2, HIDDEN, dtype=parameter.dtype)).square().sum().backward()
    assert parameter.grad is not None
    both = parameter.grad.abs().sum(1) > 0  # the head's part reaches every row, the lookups' only two of them
    return parameter is net.embedding.weight and bool(both.all())


def test_a_tie_outlives_what_is_done_to_the_model() -> None:
    """transformers PR 47503, torch's parallelize_module: tied before, two parameters after, and no warning."""
    assert is_tied(alone())
    assert is_tied(deepcopy(alone()))
    assert is_tied(alone().to(torch.bfloat16))
    mesh = make_mesh(device="cpu")
    meta = cc.VocabParallelEmbedding(29, HIDDEN, mesh=mesh, device="meta")
    net = Net(meta, cc.VocabParallelHead(HIDDEN, 29, mesh=mesh, embedding=meta)).to_empty(device="cpu")
    net.load_state_dict(alone().state_dict())
    assert is_tied(net)
    again = alone()
    again.load_state_dict(net.state_dict(), assign=True)
    assert is_tied(again)
    assert [placed.name for placed in placed_parameters(net)] == ["embedding.weight"]


def test_a_tie_by_assignment_is_parted_by_to_empty_alone_and_loading_then_says_so(tmp_path: Path) -> None:
    mesh = make_mesh(device="cpu")

    def assigned(device: str) -> Net:
        embedding = cc.VocabParallelEmbedding(29, HIDDEN, mesh=mesh, device=device)
        net = Net(embedding, cc.ColumnParallelLinear(HIDDEN, 29, bias=False, mesh=mesh, device=device))
        net.head.weight = embedding.weight
        return net

    for kept in (assigned("cpu"), deepcopy(assigned("cpu")), assigned("cpu").to(torch.bfloat16)):
        assert is_tied(kept)
    path = save(assigned("cpu"), tmp_path / "one.safetensors", mesh)
    assert list(load_file(path)) == ["embedding.weight"]
    parted = assigned("meta").to_empty(device="cpu")
    assert len(list(parted.parameters())) == 2
    with pytest.raises(UsageError, match=r"has no 'head\.weight'"):
        load(parted, path, mesh)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 4), (4, 1)])
def test_a_tied_model_is_saved_once_and_loads_tied(on_ranks: OnRanks, before: int, after: int, tmp_path: Path) -> None:
    whole = unsplit(29, True, torch.float32)
    path = tmp_path / "model.safetensors"
    on_ranks(before, lambda mesh: save(split(mesh, whole, True), path, mesh))
    assert list(load_file(path)) == ["embedding.weight"]
    assert torch.equal(load_file(path)["embedding.weight"], whole.embedding.weight)

    def body(mesh: Mesh) -> None:
        other = unsplit(29, True, torch.float32)
        nn.init.zeros_(other.embedding.weight)
        net = split(mesh, other, True)
        load(net, path, mesh)
        assert torch.equal(net.head.to_linear().weight, whole.embedding.weight)
        assert torch.equal(net.embedding.to_embedding().weight, whole.embedding.weight)

    on_ranks(after, body)


def test_the_tied_gradient_is_counted_once(on_ranks: OnRanks) -> None:
    whole = unsplit(29, True, torch.float32)
    ids, x = torch.arange(7), torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    whole(ids, x).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)

    def body(mesh: Mesh) -> Tensor:
        net = split(mesh, unsplit(29, True, torch.float32), True)
        net(ids, x).square().sum().backward()
        return clip_grad_norm_(net, 1e9, mesh)

    for got in on_ranks(3, body):
        torch.testing.assert_close(got, norm)


def test_logits_are_gathered_on_request_and_starts_do_not_depend_on_tp(on_ranks: OnRanks) -> None:
    x = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        head = cc.VocabParallelHead(HIDDEN, 29, True, mesh=mesh, gather_output=True, seed=4)
        back = head.to_linear()
        assert torch.equal(take(back.weight, head.cuts["weight"], mesh.tp.size, mesh.tp.rank), head.weight)
        return head(x).detach(), back(x).detach()

    ((alone, _),) = on_ranks(1, body)
    for logits, unsplit_logits in on_ranks(3, body):
        torch.testing.assert_close(logits, alone)
        torch.testing.assert_close(unsplit_logits, alone)


def test_what_cannot_work_is_refused() -> None:
    mesh = make_mesh(device="cpu")
    embedding = cc.VocabParallelEmbedding(29, HIDDEN, mesh=mesh, seed=1)
    for sizes in ((HIDDEN, 30), (HIDDEN + 1, 29), (HIDDEN, 29, True)):
        with pytest.raises(UsageError, match="cannot be tied to an embedding of 29 tokens with 6 features"):
            cc.VocabParallelHead(*sizes, mesh=mesh, embedding=embedding)
    with pytest.raises(UsageError, match="from_linear with an embedding"):
        cc.VocabParallelHead.from_linear(nn.Linear(HIDDEN, 29, bias=False), mesh, embedding=embedding)
    with pytest.raises(UsageError, match=r"got x \[2, 5\]"):
        cc.VocabParallelHead(HIDDEN, 29, mesh=mesh, embedding=embedding)(torch.ones(2, 5))
