"""The parallel residual's two branches share one exchange of x and one of its gradient: counted, and equal in every way of use.

That output, every gradient and one step equal the unsplit block's is in test_block.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from block_cases import check
from crosscut.collectives import all_gather, reduce_from_tp
from crosscut.distributed.mesh import Mesh
from crosscut.layers import ParallelBlock
from crosscut.layers import shared_input as shared_module
from crosscut.layers.replicas import placed_parameters
from crosscut.layers.shards import gather
from crosscut.sharding import shard_sizes

OnRanks = Callable[..., list[Any]]
BATCH, LENGTH, HIDDEN = 2, 6, 16


def block_of(mesh: Mesh, parallel: bool = True, sequence: bool = False, norm: str = "layer") -> ParallelBlock:
    return ParallelBlock(
        HIDDEN, 4, 20, mesh=mesh, norm=norm, bias=True, parallel_residual=parallel, sequence_parallel=sequence,
        attention={"kv_heads": 4}, seed=1,
    )  # fmt: skip


def branches_of(block: ParallelBlock) -> list[shared_module.Branch]:
    attention = shared_module.Branch(block.attention_norm, *block.attention.qkv.rows())
    return [attention, shared_module.Branch(block.mlp_norm, *block.mlp.up._own())]


def batch() -> Tensor:
    return torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2))


class Seen(list[str]):
    """Notes the collectives of a block's tp group: those of activations, and apart the sums of parameters' gradients."""

    def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
        self.append(op if len(shape) == 3 else "small")
        return 0

    def end(self, token: int) -> None:
        pass

    def of(self, block: ParallelBlock) -> Seen:
        for module in block.modules():
            if hasattr(module, "group"):
                module.group = module.group.observed_by(self)
        return self


def exchanges(mesh: Mesh, parallel: bool, sequence: bool) -> tuple[list[str], list[str]]:
    block = block_of(mesh, parallel, sequence)
    seen = Seen().of(block)
    x = batch().chunk(mesh.tp.size, 1)[mesh.rank] if sequence else batch()
    y = block(x.clone().requires_grad_())
    forward = sorted(seen)
    seen.clear()
    y.sum().backward()
    return forward, sorted(seen)


@pytest.mark.parametrize(
    ("parallel", "sequence", "forward", "backward"),
    [
        (False, False, "all_reduce all_reduce", "all_reduce all_reduce"),
        (True, False, "all_reduce", "all_reduce small"),
        (False, True, "all_gather all_gather reduce_scatter reduce_scatter",
         "all_gather all_gather all_gather all_gather reduce_scatter reduce_scatter small small small small small small"),
        (True, True, "all_gather reduce_scatter", "all_gather all_gather reduce_scatter small small small"),
    ],
    ids=["sequential", "parallel residual", "sequential, tokens split", "parallel residual, tokens split"],
)  # fmt: skip
def test_a_parallel_residual_needs_one_exchange_each_way(
    on_ranks: OnRanks, parallel: bool, sequence: bool, forward: str, backward: str
) -> None:
    """The small ones: two norms' weights and biases, in the parallel residual stacked; with tokens split two row biases."""
    assert on_ranks(2, exchanges, parallel, sequence) == [(forward.split(), backward.split())] * 2


def test_norm_gradients_left_partial_turn_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_summed", lambda partial, group: list(partial))
    with pytest.raises(AssertionError, match=r"grad of attention_norm.weight: relative error"):
        check(on_ranks, 2, True, "layer", True, False, torch.bfloat16)


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
def test_a_gradient_summed_for_each_branch_turns_the_check_red(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, sequence: bool
) -> None:
    monkeypatch.setattr(shared_module, "_composed", composed := shared_module._composed)
    monkeypatch.setattr(
        shared_module._SharedColumns, "apply", lambda x, *rest: composed(x * 2 - x.detach(), *rest[:4], rest[4:])
    )
    with pytest.raises(AssertionError, match="dx: relative error"):
        check(on_ranks, 2, True, "layer", True, sequence, torch.bfloat16)


def results(mesh: Mesh, how: str, sequence: bool, norm: str) -> dict[str, Tensor]:
    """y, dx and all gradients, whole, of one use of the block."""
    block = block_of(mesh, True, sequence, norm)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(not (how == "frozen norms" and "norm" in name) and not (how == "frozen" and "weight" in name))
    if how == "hooked":
        block.attention.qkv.register_forward_hook(lambda module, args, y: y * 1.0)
    rows = shard_sizes(LENGTH, mesh.tp.size)
    x = batch().split(rows, 1)[mesh.rank] if sequence else batch()
    x = x.clone().requires_grad_(how != "input without gradient")
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = checkpoint(block, x, None, LENGTH, use_reentrant=False) if how == "checkpoint" else block(x, None, LENGTH)
    y.float().square().sum().backward()
    found = {"y": y.detach(), "dx": x.grad} if x.grad is not None else {"y": y.detach()}
    if sequence:
        found = {key: all_gather(value, mesh.tp, 1, rows) for key, value in found.items()}
    for placed in placed_parameters(block):
        if placed.local.grad is not None:
            found[placed.name] = gather(placed.local.grad, placed.cut, placed.shape, mesh.tp)
    return found


WAYS = ["plain", "frozen", "frozen norms", "checkpoint", "autocast", "hooked", "input without gradient"]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("how", WAYS)
def test_every_way_of_use_gives_what_one_rank_gives(on_ranks: OnRanks, how: str, sequence: bool, norm: str) -> None:
    (alone,) = on_ranks(1, results, how, False, norm)
    rough = {"rtol": 0.05, "atol": 0.3} if how == "autocast" else {"rtol": 1e-4, "atol": 1e-4}
    for got in on_ranks(2, results, how, sequence, norm):
        assert got.keys() == alone.keys()
        for key in alone:
            torch.testing.assert_close(got[key], alone[key], **rough, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
def test_gradients_of_gradients(on_ranks: OnRanks, sequence: bool) -> None:
    """A penalty on the gradient's size: autograd goes through the backward itself."""

    def body(mesh: Mesh, sequence: bool) -> Tensor:
        block = block_of(mesh, True, sequence)
        x = batch().chunk(mesh.tp.size, 1)[mesh.rank] if sequence else batch()
        x = x.clone().requires_grad_()
        results = shared_module.shared_columns(x, branches_of(block), mesh.tp, 1 if sequence else None, LENGTH)
        total = reduce_from_tp(torch.stack([(y**3).sum() for y in results]).sum(), mesh.tp)
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        penalty = (first**2).sum()
        second = torch.autograd.grad(reduce_from_tp(penalty, mesh.tp) if sequence else penalty, x)[0]
        return all_gather(second, mesh.tp, 1) if sequence else second

    (alone,) = on_ranks(1, body, False)
    for got in on_ranks(2, body, sequence):
        torch.testing.assert_close(got, alone, rtol=1e-3, atol=1e-3)


def test_with_tokens_split_only_own_tokens_are_kept(on_ranks: OnRanks) -> None:
    """Of what the two multiplies keep for the backward, activations are x's own tokens once, and no norm's output."""

    def body(mesh: Mesh) -> list[tuple[int, ...]]:
        block, kept = block_of(mesh, True, True), []
        known = {id(parameter) for parameter in block.parameters()}

        def pack(t: Tensor) -> Tensor:
            if id(t) not in known and t.dim() == 3 and t.shape[-1] == HIDDEN:
                kept.append(tuple(t.shape))
            return t

        x = batch().chunk(mesh.tp.size, 1)[mesh.rank].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            shared_module.shared_columns(x, branches_of(block), mesh.tp, 1, LENGTH)
        return kept

    assert on_ranks(2, body) == [[(BATCH, LENGTH // 2, HIDDEN)]] * 2
