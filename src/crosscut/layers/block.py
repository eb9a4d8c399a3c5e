"""A decoder block as one layer: norm, attention, norm, MLP, each with its residual (or both beside one residual).

Shapes: B batch, S sequence, H hidden; with sequence parallelism a rank holds ``[B, S/tp, H]`` between the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from crosscut.distributed.mesh import Mesh
from crosscut.errors import choose
from crosscut.layers.attention import ParallelAttention
from crosscut.layers.mlp import ParallelMLP
from crosscut.layers.norm import LayerNorm, RMSNorm
from crosscut.layers.random import ParallelDropout
from crosscut.layers.shards import shared_seed

NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


class ParallelBlock(nn.Module):
    """``x [B, S, H] -> [B, S, H]``: ``h = x + attention(norm(x))``, ``y = h + mlp(norm(h))`` (pre-norm, as Llama).

    ``parallel_residual``: ``y = x + attention(norm1(x)) + mlp(norm2(x))`` (GPT-J, GPT-NeoX): the two partial sums are added
    before one all-reduce, where the sequential block needs two. ``norm``: ``rms`` or ``layer``. ``dropout``: of what each
    branch adds. ``attention``: options of :class:`ParallelAttention` (``kv_heads``, ``rope_theta``, ``window``, ...).
    ``gated`` and ``activation``: of :class:`ParallelMLP`. ``sequence_parallel``: x and y are this rank's tokens.
    Raises UsageError as the layers do.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        mesh: Mesh,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        norm: str = "rms",
        eps: float = 1e-5,
        parallel_residual: bool = False,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        attention: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        kind = NORMS[choose("norm", norm, NORMS)]
        like: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        drawn: tuple[int | None, int | None] = (None, None)
        if device is None or torch.device(device).type != "meta":
            seed = shared_seed(mesh.tp) if seed is None else seed
            drawn = (seed, seed + 4)
        self.attention_norm, self.mlp_norm = kind(hidden, eps, **like), kind(hidden, eps, **like)
        self.attention = ParallelAttention(hidden, heads, bias=bias, seed=drawn[0], **like, **(attention or {}))
        self.mlp = ParallelMLP(
            hidden, ffn, activation=activation, gated=gated, bias=bias, sequence_dim=1, seed=drawn[1], **like
        )
        self.dropout = ParallelDropout(dropout, mesh=mesh, sharded=sequence_parallel, dim=1)
        self.parallel_residual = parallel_residual
        if parallel_residual:
            self.attention.o.reduce_output = self.mlp.down.reduce_output = False

    def forward(self, x: Tensor, positions: Tensor | None = None, total_tokens: int | None = None) -> Tensor:
        """``x [B, S, H]`` or, with sequence_parallel, ``[B, S/tp, H]`` -> the same shape.

        ``positions``: for the rotation, of the whole sequence; ``total_tokens``: S when it does not divide.
        """
        attended = self.attention(self.attention_norm(x), positions, total_tokens)
        if self.parallel_residual:
            partial = attended + self.mlp(self.mlp_norm(x), total_tokens)
            both = self.mlp.down.plus_bias(self.attention.o.finish(partial))
            return x + self.dropout(both, total_tokens)
        x = x + self.dropout(attended, total_tokens)
        return x + self.dropout(self.mlp(self.mlp_norm(x), total_tokens), total_tokens)
