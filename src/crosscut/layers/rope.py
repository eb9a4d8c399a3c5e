"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-rotation as Llama's checkpoints are trained with it.

Feature i of a head is paired with feature i + D/2, and each pair is turned by ``position * theta^(-2i/D)``. (The paper pairs
neighbours, 2i and 2i + 1; the two differ by a permutation of the rows of the q and k weights.) Angles and products are at
least float32, whatever the dtype of the heads: in bfloat16 a position past 256 is not even representable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crosscut.errors import UsageError


def check_rope(head_dim: int, theta: float) -> None:
    """Raises UsageError: ``bad-size`` for an odd head_dim, ``bad-option`` for a theta that is not positive."""
    if head_dim % 2:
        raise UsageError(
            f"rope_theta with head_dim={head_dim}: rotary embedding turns pairs of features",
            code="bad-size",
            fix="use an even head_dim, or leave rope_theta out",
        )
    if not theta > 0:
        raise UsageError(f"rope_theta={theta}", code="bad-option", fix="give a number above 0, such as 10000.0")


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions [S]`` or ``[B, S]``, each ``[S, D/2]`` or ``[B, 1, S, D/2]``: ready for [B, N, S, D].

    ``dtype``: of the heads to be turned; the tables are in float32 or, for float64 heads, in float64.
    """
    table = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=table)
    angles = positions.to(table).unsqueeze(-1) * theta ** (-pairs / head_dim)
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [..., S, D]`` with each pair (i, i + D/2) turned by its angle; same dtype as ``x``."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
