"""The block equals one written with torch's own layers: output, every gradient, one step; its collectives are counted."""

from __future__ import annotations

from collections import Counter
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
from crosscut.layers import ParallelBlock
from crosscut.layers.replicas import clip_grad_norm_, placed_parameters
from crosscut.layers.rope import rotary_tables, rotate
from crosscut.layers.shards import gather, take
from crosscut.sharding import shard_sizes
from parity import assert_equal_to_rounding, step

OnRanks = Callable[..., list[Any]]
BATCH, LENGTH, HIDDEN, HEADS, KV, FFN, THETA = 2, 7, 24, 6, 2, 20, 1e4


class Unsplit(nn.Module):
    """The same block from torch's layers; parameters carry the split block's names, packed as there."""

    def __init__(self, bias: bool, norm: str, parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(31)
        kind = nn.RMSNorm if norm == "rms" else nn.LayerNorm
        self.parallel, width = parallel, HIDDEN // HEADS
        self.attention_norm, self.mlp_norm = kind(HIDDEN, 1e-5), kind(HIDDEN, 1e-5)
        self.attention, self.mlp = nn.Module(), nn.Module()
        self.attention.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV) * width, bias)
        self.attention.o = nn.Linear(HIDDEN, HIDDEN, bias)
        self.mlp.up, self.mlp.down = nn.Linear(HIDDEN, 2 * FFN, bias), nn.Linear(FFN, HIDDEN, bias)

    def attend(self, x: Tensor) -> Tensor:
        width = HIDDEN // HEADS
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(1, 2)
            for part in self.attention.qkv(x).split([HEADS * width, KV * width, KV * width], -1)
        )
        cos, sin = rotary_tables(torch.arange(x.shape[1]), width, THETA, q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        return self.attention.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        gate, up = self.mlp.up(x).chunk(2, -1)
        return self.mlp.down(F.silu(gate) * up)

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel:
            return x + self.attend(self.attention_norm(x)) + self.feed(self.mlp_norm(x))
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed(self.mlp_norm(x))


def split(whole: Unsplit, mesh: Mesh, bias: bool, norm: str, sequence: bool) -> ParallelBlock:
    block = ParallelBlock(
        HIDDEN, HEADS, FFN, mesh=mesh, bias=bias, norm=norm, parallel_residual=whole.parallel, sequence_parallel=sequence,
        attention={"kv_heads": KV, "rope_theta": THETA}, dtype=next(whole.parameters()).dtype, seed=1,
    )  # fmt: skip
    with torch.no_grad():
        for placed in placed_parameters(block):
            placed.local.copy_(take(whole.get_parameter(placed.name), placed.cut, mesh.tp.size, mesh.tp.rank))
    return block


def check(
    on_ranks: OnRanks, world: int, bias: bool, norm: str, parallel: bool, sequence: bool, dtype: torch.dtype = torch.float32
) -> None:
    generator = torch.Generator().manual_seed(32)
    x, upstream = (torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    whole, copy = (Unsplit(bias, norm, parallel).to(dtype) for _ in range(2))
    precise = Unsplit(bias, norm, parallel).double()
    precise.load_state_dict(whole.state_dict())
    exact, plain = step(precise, x.double(), upstream.double(), precise), step(copy, x, upstream, copy)
    rows = shard_sizes(LENGTH, world)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        block = split(whole, mesh, bias, norm, sequence)
        places = {placed.name: placed for placed in placed_parameters(block)}
        mine, wanted = (t.split(rows, 1)[mesh.rank] for t in (x, upstream)) if sequence else (x, upstream)
        out = step(block, mine, wanted, lambda part: block(part, None, LENGTH))
        if sequence:
            out |= {key: collectives.all_gather(out[key], mesh.tp, 1, rows) for key in ("y", "dx")}
        for key in [key for key in out if " of " in key]:
            place = places[key.split()[-1]]
            out[key] = gather(out[key], place.cut, place.shape, mesh.tp)
        return out

    for rank, got in enumerate(on_ranks(world, body)):
        assert got.keys() == plain.keys()
        for key in plain:
            assert_equal_to_rounding(f"rank {rank}: {key}", got[key], plain[key], exact[key], 2 * world**0.5)


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel residual"])
@pytest.mark.parametrize(("bias", "norm"), [(False, "rms"), (True, "layer")])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_block_equals_unsplit(on_ranks: OnRanks, world: int, bias: bool, norm: str, parallel: bool, sequence: bool) -> None:
    check(on_ranks, world, bias, norm, parallel, sequence)


def test_block_in_bf16(on_ranks: OnRanks) -> None:
    check(on_ranks, 2, True, "rms", False, True, torch.bfloat16)


def test_a_bias_added_twice_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc.RowParallelLinear, "plus_bias", lambda self, y: y + 2 * self.bias)
    with pytest.raises(AssertionError, match="y: relative error"):
        check(on_ranks, 2, True, "layer", True, False)


@pytest.mark.parametrize(("parallel", "forward"), [(False, 2), (True, 1)])
def test_a_parallel_residual_needs_one_reduction(on_ranks: OnRanks, parallel: bool, forward: int) -> None:
    def body(mesh: Mesh) -> Counter[str]:
        seen: Counter[str] = Counter()

        class Count:
            def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
                seen[op] += 1
                return 0

            def end(self, token: int) -> None:
                pass

        block = split(Unsplit(False, "rms", parallel), mesh, False, "rms", False)
        for module in block.modules():
            if hasattr(module, "group"):
                module.group = module.group.observed_by(Count())
        with torch.no_grad():
            block(torch.randn(BATCH, LENGTH, HIDDEN))
        return seen

    assert on_ranks(2, body) == [Counter(all_reduce=forward)] * 2


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
