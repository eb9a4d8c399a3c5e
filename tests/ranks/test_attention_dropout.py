"""Dropout of attention weights: masks of heads are independent and do not depend on tp; ranks draw alike from the generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import crosscut as cc
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.layers import ParallelBlock
from crosscut.layers import sdpa as sdpa_module
from crosscut.layers.random import HeadDropout
from crosscut.sharding import Heads, shard_range, shard_sizes

OnRanks = Callable[..., list[Any]]
HEADS, LENGTH = 6, 64


def masks(mesh: Mesh, state: bool = False) -> list[Tensor]:
    """Of this rank's heads, the masks of two calls ``[2, N/tp, S, S]``; then where the generator stands."""
    generator = torch.Generator().manual_seed(3)
    own = Heads(HEADS, HEADS, 4).query_range(mesh.tp.size, mesh.tp.rank)
    drop = HeadDropout(0.25, own, mesh=mesh, generator=generator)
    seen = []
    for _ in range(2):
        with drop.drawn(torch.device("cpu")) as masked:
            seen.append(masked(torch.ones(2, own.stop - own.start, LENGTH, LENGTH)))
    return [*seen, generator.get_state()]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_heads_mask_is_its_own_and_the_same_at_every_tp(on_ranks: OnRanks, world: int) -> None:
    (alone,) = on_ranks(1, masks)
    ranks = on_ranks(world, masks)
    for call in range(2):
        assert torch.equal(torch.cat([rank[call] for rank in ranks], 1), alone[call])
    assert all(torch.equal(rank[2], alone[2]) for rank in ranks), "ranks drew different amounts from the common generator"
    every = [alone[call][batch, head] for call in range(2) for batch in range(2) for head in range(HEADS)]
    for i, mine in enumerate(every):
        assert float((mine == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
        for other in every[:i]:
            agree = float(((mine == 0) == (other == 0)).float().mean())
            assert agree == pytest.approx(0.25**2 + 0.75**2, abs=0.05), "two masks are not independent"


def test_evaluation_drops_nothing_and_checkpointing_recomputes_the_masks() -> None:
    layer = cc.ParallelAttention(16, 4, mesh=make_mesh(device="cpu"), dropout=0.5, seed=1)
    x = torch.randn(2, 8, 16, requires_grad=True)

    def grad(run: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(5)
        return torch.autograd.grad(run(x).square().sum(), x)[0]

    assert torch.equal(grad(layer), grad(lambda x: checkpoint(layer, x, use_reentrant=False)))
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    without = cc.ParallelAttention(16, 4, mesh=make_mesh(device="cpu"), seed=1)
    assert torch.equal(layer(x), without(x))


def test_without_dropout_or_soft_cap_the_fused_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the scores out is what dropout costs on a CPU, and must not happen where nothing is dropped."""
    monkeypatch.setattr(sdpa_module, "_by_formula", lambda *args, **options: pytest.fail("scores were written out"))
    layer = cc.ParallelAttention(16, 4, mesh=make_mesh(device="cpu"), dropout=0.5, window=3, seed=1).eval()
    layer(torch.randn(1, 8, 16))
    with pytest.raises(pytest.fail.Exception, match="written out"):
        layer.train()(torch.randn(1, 8, 16))


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel residual"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_block_with_all_its_dropouts_does_not_depend_on_tp(
    on_ranks: OnRanks, world: int, parallel: bool, sequence: bool
) -> None:
    """pytorch issue 168058: dropout of a split model depends on the number of ranks, and so does its loss."""
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(2))

    def body(mesh: Mesh, sequence: bool) -> tuple[Tensor, Tensor]:
        block = ParallelBlock(
            16, 8, 20, mesh=mesh, dropout=0.2, attention={"dropout": 0.3, "kv_heads": 2}, parallel_residual=parallel,
            sequence_parallel=sequence, dropout_invariant=True, generator=torch.Generator().manual_seed(SEED), seed=1,
        )  # fmt: skip
        rows = shard_range(9, mesh.tp.size, mesh.rank) if sequence else slice(None)
        mine = x[:, rows].clone().requires_grad_()
        y = block(mine, None, 9)
        y.square().sum().backward()
        assert mine.grad is not None
        return y.detach(), mine.grad

    ((y, dx),) = on_ranks(1, body, False)
    results = on_ranks(world, body, sequence)
    if sequence:
        assert [r[0].shape[1] for r in results] == shard_sizes(9, world)
        results = [tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))]
    for got, got_dx in results:
        torch.testing.assert_close(got, y)
        torch.testing.assert_close(got_dx, dx, rtol=1e-4, atol=1e-5)


SEED = 7


def test_a_rate_outside_its_range_is_refused() -> None:
    for p in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match=f"dropout p={p}"):
            cc.ParallelAttention(16, 4, mesh=make_mesh(device="cpu"), dropout=p, seed=1)


def test_scores_above_float16s_range_do_not_overflow() -> None:
    """Scores are scaled before they are summed, as torch's fused kernels do: 128 * 30 * 30 is no float16."""
    attention = cc.ParallelAttention(128, 1, dropout=1e-9, dtype=torch.float16, mesh=make_mesh(device="cpu"))
    packed = torch.full((1, 4, 3 * 128), 30.0, dtype=torch.float16)
    assert torch.equal(attention.mix(packed), packed[..., :128])
