"""``softmax(scale * q k^T) v`` for the heads of one rank: torch's fused kernels where they can do it, its formula where not.

A sliding window is computed in blocks of queries, each against the keys that it can see: work and memory grow with S * W,
not S * S, and every block uses one small mask that all layers share. (FlexAttention could fuse the mask, but needs a compiler
at the first call, and on CPUs has no backward; torch's own flash kernel takes a window only through a private operator.)
Shapes: B batch, S sequence, N query heads, K KV heads, D head dim; ``/tp`` marks what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.layers.checks import remembered
from crosscut.layers.random import HeadDropout

BLOCK = 256  # fewest queries of a window's block: with small windows, larger blocks waste little and call less

Weigh = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool], Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries_per_kv: list[int],
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dropout: HeadDropout,
) -> Tensor:
    """``q [B, N/tp, S, D]``, ``k``, ``v [B, K/tp, S, D]`` -> ``[B, N/tp, S, D]``; KV head i serves ``queries_per_kv[i]`` heads.

    ``softcap`` c: scores become ``c * tanh(scores / c)`` before mask and softmax (Gemma 2, arXiv 2408.00118). It and masks of
    dropout that are drawn head by head need the scores written out, ``[B, N/tp, S, S]`` (with a window, a block of them).
    """
    if len(set(queries_per_kv)) > 1:  # the border between ranks lies inside a group of heads
        k, v = one_per_query(k, queries_per_kv), one_per_query(v, queries_per_kv)
    if not dropout.drops():
        return _attend(q, k, v, causal, window, scale, softcap, 0.0)
    with dropout.drawn(q.device) as drop:
        return _attend(q, k, v, causal, window, scale, softcap, drop)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    drop: Callable[[Tensor], Tensor] | float,
) -> Tensor:
    """As :func:`attend`, each KV head for as many query heads. ``drop``: drops weights, or p for a kernel that does."""
    weigh: Weigh
    if softcap is not None or callable(drop):
        weigh = partial(_by_formula, scale=q.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap, drop=drop)
    else:
        weigh = partial(_fused, scale=scale, p=drop)
    if window is None or window >= q.shape[-2]:
        return weigh(q, k, v, None, causal)
    return _in_blocks(weigh, q, k, v, causal, window)


def one_per_query(kv: Tensor, queries_per_kv: list[int]) -> Tensor:
    """``[B, K/tp, S, D] -> [B, N/tp, S, D]``, each head as often as query heads use it."""
    return torch.cat([kv[:, i, None].expand(-1, n, -1, -1) for i, n in enumerate(queries_per_kv)], 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *, scale: float | None, p: float) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal, scale=scale, enable_gqa=gqa)


def _by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    *,
    scale: float,
    softcap: float | None,
    drop: Callable[[Tensor], Tensor] | float,
) -> Tensor:
    """The formula; scores and softmax in at least float32."""
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    scores = (q * scale) @ k.transpose(-1, -2)  # scaled before, not after: float16 holds no sum above 65504
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = window_mask(0, q.shape[-2], k.shape[-2], k.shape[-2], True, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    return (drop(weights) if callable(drop) else F.dropout(weights, drop)).to(v.dtype) @ v


def _in_blocks(weigh: Weigh, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int) -> Tensor:
    """Blocks of queries, each against the keys less than ``window`` away. The first blocks with no key to hide take no mask."""
    length, block, parts = q.shape[-2], max(window, BLOCK), []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first, last = max(0, start - window + 1), stop if causal else min(length, stop + window - 1)
        own = q[..., start:stop, :], k[..., first:last, :], v[..., first:last, :]
        if causal and last <= window:
            parts.append(weigh(*own, None, True))
        else:
            mask = window_mask(start - first, stop - start, last - first, window, causal, q.device)
            parts.append(weigh(*own, mask, False))
    return torch.cat(parts, -2)


@remembered
def window_mask(offset: int, rows: int, columns: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """``[rows, columns]``, true where the query at place ``offset + row`` sees the key at place ``column``."""
    distance = torch.arange(offset, offset + rows, device=device)[:, None] - torch.arange(columns, device=device)
    near = distance.abs() < window
    return near & (distance >= 0) if causal else near
