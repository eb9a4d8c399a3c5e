"""The block equals one written with torch's own layers: output, every gradient, one step. Each check can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscut as cc
from block_cases import FFN, HEADS, HIDDEN, KV, check
from crosscut.collectives.select import ALGORITHMS
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers import ParallelBlock
from crosscut.layers.replicas import clip_grad_norm_, placed_parameters
from crosscut.layers.shards import gather

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel residual"])
@pytest.mark.parametrize(("bias", "norm"), [(False, "rms"), (True, "layer")])
@pytest.mark.parametrize("world", WORLDS)
def test_block_equals_unsplit(
    on_ranks: OnRanks, world: int, bias: bool, norm: str, parallel: bool, sequence: bool, dtype: torch.dtype
) -> None:
    check(on_ranks, world, bias, norm, parallel, sequence, dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("bias", "norm"), [(False, "rms"), (True, "layer")])
def test_without_gradients_sum_residual_and_norm_are_one_call(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, world: int, bias: bool, norm: str
) -> None:
    """Same result as part by part. A hook on a part, dropout, autograd and sequence parallelism keep the parts apart."""
    from crosscut.layers import block as module

    calls: list[int] = []
    whole, multiply = module.all_reduce_norm, module.linear

    def handed_over(x: Tensor, weight: Tensor, then: tuple[str, Group]) -> Tensor:
        assert then[0] in ALGORITHMS, "the rule of few tokens asks the table of sizes by this name"
        return multiply(x, weight, then=then)

    monkeypatch.setattr(module, "linear", handed_over)
    monkeypatch.setattr(module, "joins_norm", lambda x, group: True)
    monkeypatch.setattr(module, "all_reduce_norm", lambda *args: (calls.append(1), whole(*args))[1])
    options: dict[str, Any] = {"bias": bias, "norm": norm, "seed": 5, "attention": {"kv_heads": KV, "rope_theta": 1e4}}

    def body(mesh: Mesh) -> None:
        block = ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, **options)
        with torch.no_grad():
            for number, parameter in enumerate(block.parameters()):
                parameter.add_(torch.arange(parameter.numel()).view_as(parameter).sin() * 0.1 + number * 1e-3)
        x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(3))
        apart = block(x)
        with torch.no_grad():
            torch.testing.assert_close(block(x), apart, rtol=1e-5, atol=1e-5)
            block.mlp_norm.register_forward_hook(lambda *_: None)
            torch.testing.assert_close(block(x), apart, rtol=0, atol=0)
            ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, dropout=0.1, **options)(x)

    on_ranks(world, body)
    assert len(calls) == world


def test_a_bias_added_twice_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc.RowParallelLinear, "plus_bias", lambda self, y: y + 2 * self.bias)
    with pytest.raises(AssertionError, match="y: relative error"):
        check(on_ranks, 2, True, "layer", True, False)


def test_initial_weights_do_not_depend_on_tp_and_norms_count_once(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> tuple[list[Tensor], Tensor]:
        block = ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, attention={"kv_heads": KV}, seed=9)
        block(torch.ones(1, 3, HIDDEN)).square().sum().backward()
        weights = [gather(p.local, p.cut, p.shape, mesh.tp) for p in placed_parameters(block)]
        return weights, clip_grad_norm_(block, 1.0, mesh)

    ((alone, norm),) = on_ranks(1, body)
    for world in (2, 3, 4):
        for weights, other in on_ranks(world, body):
            assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))
            torch.testing.assert_close(other, norm, rtol=1e-4, atol=0)


def test_dropout_trains_and_rests(on_ranks: OnRanks) -> None:
    (block,) = on_ranks(1, lambda mesh: ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, dropout=0.5, seed=1))
    x = torch.ones(1, 3, HIDDEN)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_what_cannot_work_is_refused(on_ranks: OnRanks) -> None:
    with pytest.raises(UsageError, match="norm 'rsm' is not known; did you mean 'rms'"):
        on_ranks(1, lambda mesh: ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, norm="rsm"))
