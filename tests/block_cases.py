"""A decoder block of torch's own layers, and the check that the split block equals it: output, every gradient, one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut import collectives
from crosscut.distributed.mesh import Mesh
from crosscut.layers import ParallelBlock
from crosscut.layers.replicas import placed_parameters
from crosscut.layers.shards import gather, take
from crosscut.sharding import shard_sizes
from parity import expected, step

OnRanks = Callable[..., list[Any]]
BATCH, LENGTH, HIDDEN, HEADS, KV, FFN, THETA = 2, 7, 32, 8, 2, 20, 1e4


def rotated(x: Tensor) -> Tensor:
    """The rotary embedding as a product of complex numbers."""
    wide, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=wide)[:, None] / THETA ** (torch.arange(half, dtype=wide) / half)
    turned = torch.complex(*x.to(wide).split(half, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


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
        q, k = rotated(q), rotated(k)
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
    whole = Unsplit(bias, norm, parallel).to(dtype)
    right = expected(whole, x, upstream, world)
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
        right.check(got, f"rank {rank}")
