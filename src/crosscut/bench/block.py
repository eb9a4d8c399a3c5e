"""``crosscut bench block``: a Transformer's decoder block (Llama's: RMS norm, rotary, grouped heads, gated MLP), split or not.

Shapes: B batch, S sequence (the record's tokens), H hidden, N query heads, K KV heads, D head dim, F ffn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.bench import hand
from crosscut.bench.block_memory import GPTBlock, memory_rows
from crosscut.bench.calls import Place, Way, Ways, Weights, Work, alone, by_hand, by_module, own, whole
from crosscut.bench.context import make_record
from crosscut.bench.layers import LayerConfig, measured
from crosscut.distributed.launch import RankContext
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.layers import ParallelBlock
from crosscut.layers.replicas import placed_parameters
from crosscut.records import RunRecord, now

THETA, EPS = 10000.0, 1e-5


@dataclass(frozen=True)
class BlockConfig(LayerConfig):
    """What to measure. None: the defaults, a Llama 3 8B block on GPUs, a small one on CPU."""

    tokens: tuple[int, ...] | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    batch: int = 1
    memory: bool = False
    """Measure what a GPT-like layer keeps for its backward, instead of times."""
    forms: tuple[bool, ...] = (False, True)
    """With ``memory``: without and with sequence parallelism."""
    layers: int = 2
    limit: int | None = None
    """With ``memory``: bytes beyond the weights in which ``layers`` layers must run."""

    def sizes(self, device: torch.device) -> Sizes:
        """The block's sizes on ``device``. Raises UsageError (``bad-size``) when they do not fit together."""
        gpu = device.type == "cuda"
        hidden = self.hidden or (4096 if gpu else 256)
        heads = self.heads or max(hidden // (128 if gpu else 32), 1)
        kv_heads = self.kv_heads or (heads // 4 if heads % 4 == 0 else heads)
        ffn = self.ffn or hidden * 7 // 2
        if hidden % heads or (hidden // heads) % 2 or heads % kv_heads:
            raise UsageError(
                f"a block of hidden {hidden} with {heads} heads and {kv_heads} KV heads does not work out",
                code="bad-size",
                fix="hidden must divide into heads of an even width, and the heads into the KV heads",
            )
        if heads < self.tp:  # before anything is measured, and not when the first rank without a head is built
            raise UsageError(
                f"{heads} heads cannot be dealt to {self.tp} ranks", code="bad-size", fix=f"use --tp {heads}, or more --heads"
            )
        return Sizes(hidden, heads, kv_heads, ffn)


@dataclass(frozen=True)
class Sizes:
    """H, N, K and F of a block."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden // self.heads


def run(ctx: RankContext, config: BlockConfig) -> RunRecord:
    """Measure on the ranks of ``ctx`` and return the record; rank 0's holds every row.

    Raises UsageError on a config that cannot work on these ranks.
    """
    mesh = make_mesh(tp=config.tp, device=ctx.device)
    sizes, gpu = config.sizes(mesh.device), mesh.device.type == "cuda"
    if config.memory:
        return _memory(config, sizes, mesh, (4096,) if gpu else (256,), ctx.backend)
    dtype, tokens = config.torch_dtype(mesh.device), config.tokens or ((1, 32, 512, 4096) if gpu else (1, 64))
    problems = [partial(random_block, sizes, config.batch, count, dtype, mesh.device, config.seed) for count in tokens]
    return measured(ctx, mesh, config, "bench block", problems)


def _memory(config: BlockConfig, sizes: Sizes, mesh: Mesh, tokens: tuple[int, ...], backend: str) -> RunRecord:
    started, gpu = now(), mesh.device.type == "cuda"
    dtype = torch.bfloat16 if config.dtype == "auto" else config.torch_dtype(mesh.device)
    blocks = [
        GPTBlock(config.batch, count, sizes.hidden, sizes.heads, dtype.itemsize, 4 if gpu else dtype.itemsize)
        for count in config.tokens or tokens
    ]
    forms = config.forms if mesh.tp.size > 1 else (False,)
    rows, notes = memory_rows(mesh, blocks, dtype, forms, config.layers, config.limit)
    return make_record("bench block", asdict(config) | {"backend": backend}, mesh, rows, started, notes)


@dataclass
class BlockProblem:
    """A block and its input ``x [B, S, H]``. ``weights``: whole, under ParallelBlock's names."""

    sizes: Sizes
    x: Tensor
    weights: dict[str, Tensor]
    subject: str = "block"
    kind: str = "block"

    @property
    def shape(self) -> dict[str, int]:
        """The record's shape of it; ``batch`` where it is not 1."""
        batch, tokens, _ = self.x.shape
        s = self.sizes
        sizes = {"tokens": tokens, "hidden": s.hidden, "heads": s.heads, "kv_heads": s.kv_heads, "ffn": s.ffn}
        return sizes if batch == 1 else {"batch": batch, **sizes}

    def exchange(self) -> tuple[str, int, int]:
        """One of the two sums of a forward, with the rows and the width of the whole tensor."""
        return "all_reduce", self.x.shape[0] * self.x.shape[1], self.sizes.hidden

    def work(self, backward: bool) -> Work:
        """The block as one device computes it; ``backward``: with a random gradient of its output, equal on all ranks."""
        generator = torch.Generator(self.x.device).manual_seed(1)
        dy = torch.randn(self.x.shape, dtype=self.x.dtype, device=self.x.device, generator=generator) if backward else None
        return Work(partial(block, head_dim=self.sizes.head_dim), self.x, self.weights, dy)

    def ways(self, mesh: Mesh, against: Sequence[str], backward: bool = False) -> Ways:
        """Name -> a function that builds the calls. The plain split by hand is absent where sizes do not divide, sequence
        parallelism where there are fewer tokens than ranks.
        """
        work, group, s = self.work(backward), mesh.tp, self.sizes
        ways: Ways = {"single": lambda: by_hand(work, alone(mesh.device).tp, work.compute)}
        if self.x.is_cuda:
            ways["single_best"] = partial(self._crosscut, work, alone(mesh.device))
        if group.size == 1:
            return ways
        if not (s.heads % group.size or s.kv_heads % group.size or s.ffn % group.size):
            for name in against:
                ways[name] = partial(self._plain, work, mesh)
        ways["crosscut"] = partial(self._crosscut, work, mesh)
        if self.x.shape[1] >= group.size:
            ways["crosscut_sp"] = partial(self._crosscut, work, mesh, sequence_parallel=True)
        ways["no_comm"] = partial(self._crosscut, work, mesh, silent=True)
        return ways

    def build(self, mesh: Mesh, sequence_parallel: bool = False) -> ParallelBlock:
        """crosscut's layer for it, on the meta device."""
        s = self.sizes
        like: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel, "device": "meta", "dtype": self.x.dtype}
        attention = {"kv_heads": s.kv_heads, "rope_theta": THETA}
        return ParallelBlock(s.hidden, s.heads, s.ffn, attention=attention, eps=EPS, **like)

    def _plain(self, work: Work, mesh: Mesh) -> Way:
        """By hand: each rank's heads and features, torch.distributed's own all-reduce after attention and after the MLP."""
        group = mesh.tp
        cuts = {p.name: p.cut for p in placed_parameters(self.build(mesh))}
        compute = partial(
            block,
            head_dim=self.sizes.head_dim,
            before=lambda x: hand.copied(x, group),
            after=lambda y: hand.summed(y, group),
        )
        return by_hand(work, group, compute, cuts)

    def _crosscut(self, work: Work, mesh: Mesh, sequence_parallel: bool = False, silent: bool = False) -> Way:
        total = self.x.shape[1] if sequence_parallel else None
        place = own(mesh.tp, 1) if sequence_parallel else whole
        build = partial(self.build, mesh, sequence_parallel)
        return by_module(work, mesh, build, place, call=lambda m, x: m(x, None, total), silent=silent)


def random_block(
    sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> BlockProblem:
    """A block with random weights and input, equal on all ranks."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(std=shape[-1] ** -0.5, generator=generator) if len(shape) > 1 else weight.fill_(1)

    s = sizes
    weights = {
        "attention_norm.weight": draw(s.hidden),
        "mlp_norm.weight": draw(s.hidden),
        "attention.qkv.weight": draw((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        "attention.o.weight": draw(s.hidden, s.heads * s.head_dim),
        "mlp.up.weight": draw(2 * s.ffn, s.hidden),
        "mlp.down.weight": draw(s.hidden, s.ffn),
    }
    x = torch.randn(batch, tokens, s.hidden, dtype=dtype, device=device, generator=generator)
    return BlockProblem(sizes, x, weights)


def block(x: Tensor, w: Weights, *, head_dim: int, before: Place = whole, after: Place = whole) -> Tensor:
    """The block itself, from weights or a rank's shards of them; ``before`` each column, ``after`` each row multiply.

    ``x [B, S, H] -> [B, S, H]``. Written from the papers alone, as a reference for the layers: pre-norm (arXiv 2002.04745),
    RMS norm (1910.07467), rotary in halves (2104.09864), grouped heads (2305.13245), SwiGLU (2002.05202).
    """

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    queries = w["attention.o.weight"].shape[1] // head_dim
    packed = F.linear(before(norm(x, w["attention_norm.weight"])), w["attention.qkv.weight"])
    heads = packed.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [B, N + 2K, S, D]
    own_kv = (heads.shape[1] - queries) // 2
    q, k, v = heads.split([queries, own_kv, own_kv], 1)
    q, k = _rotated(q), _rotated(k)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries > own_kv)
    h = x + after(F.linear(attended.transpose(1, 2).flatten(-2), w["attention.o.weight"]))
    gate, up = F.linear(before(norm(h, w["mlp_norm.weight"])), w["mlp.up.weight"]).chunk(2, -1)
    return h + after(F.linear(F.silu(gate) * up, w["mlp.down.weight"]))


def _rotated(x: Tensor) -> Tensor:
    """``x [B, N, S, D]`` with features i and i + D/2 of token s turned by ``s * theta^(-2i/D)``, in float32 or more."""
    cos, sin = _tables(x.shape[-2], x.shape[-1], torch.promote_types(x.dtype, torch.float32), x.device)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@lru_cache(4)
def _tables(length: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[S, D/2]``, once for all calls, as a model has them."""
    rates = THETA ** -(torch.arange(0, width, 2, device=device, dtype=dtype) / width)
    angles = torch.arange(length, device=device, dtype=dtype)[:, None] * rates
    return angles.cos(), angles.sin()
