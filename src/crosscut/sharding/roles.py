"""What a module does in a model, and the cut of its parameters that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from crosscut.model_config import ModelConfig
from crosscut.sharding.cut import Column, Cut, Packed, Replicated, Row
from crosscut.sharding.heads import GroupedQKV, Heads, KVHeads, PackedQKV, QueryHeads


class Role(str, Enum):
    """What a module or a bare parameter does. Sizes: N query and K KV heads of D, H hidden, F ffn, V vocabulary, E experts."""

    EMBEDDING = "embedding"
    """``[V, H]``: the rows are dealt; the looked-up rows are summed over the ranks."""
    LM_HEAD = "lm_head"
    """``[V, H]``: a column layer whose output is gathered."""
    COLUMN = "column"
    """``[F, H]``, output features dealt."""
    ROW = "row"
    """``[H, F]``, input features dealt, the output summed; its bias is replicated and added once."""
    GATE_UP = "gate_up"
    """``[2F, H]``: gate and up stored as one, each dealt on its own."""
    QUERY = "query"
    """``[N*D, H]`` by query heads."""
    KEY_VALUE = "key_value"
    """``[K*D, H]`` by KV heads, replicated where ranks share one; then the gradient is partial."""
    QKV = "qkv"
    """``[(N+2K)*D, H]``: all q, all k, all v."""
    GROUPED_QKV = "grouped_qkv"
    """``[K, N/K q and k and v, D; H]``: by KV head, as GPT-NeoX and Falcon store it."""
    ATTENTION_OUT = "attention_out"
    """``[H, N*D]``: a row layer by query heads."""
    LATENT_QUERY = "latent_query"
    """MLA ``[N*(nope+rope), Q]``: queries out of their latent (or the input), by heads."""
    LATENT_KEY_VALUE = "latent_key_value"
    """MLA ``[N*(nope+v), R]``: keys and values out of their latent, by heads."""
    LATENT_OUT = "latent_out"
    """MLA ``[H, N*v]``: a row layer by heads."""
    LATENT_DOWN = "latent_down"
    """MLA ``[R+rope, H]``: replicated. The gradient of its last ``rope`` outputs, the key that all heads share, is partial."""
    HEAD_NORM = "head_norm"
    """``[D]``, one norm for every head: replicated, and its gradient is partial."""
    QUERY_NORM = "query_norm"
    """``[N, D]``: a norm with weights of its own for each query head; by query heads."""
    KEY_NORM = "key_norm"
    """``[K, D]``: likewise for each KV head."""
    WIDE_QUERY_NORM = "wide_query_norm"
    """``[N*D]``: one norm over all query heads together; by query heads, and its statistics are sums over the ranks."""
    WIDE_KEY_NORM = "wide_key_norm"
    """``[K*D]``: likewise over all KV heads, each counted once."""
    ROUTER = "router"
    """``[E, H]``: replicated. Where experts are cut inside, the gradient of the routing weights is partial."""
    EXPERTS_GATE_UP = "experts_gate_up"
    """``[E, 2F, H]``: every rank holds a part of every expert, gate and up each dealt on its own."""
    EXPERTS_DOWN = "experts_down"
    """``[E, H, F]``: a row layer in each expert."""
    REPLICATED = "replicated"
    """Whole on every rank, with a whole gradient."""


_ROWS = (Role.ROW, Role.ATTENTION_OUT, Role.LATENT_OUT)
_PER_HEAD = (Role.QUERY_NORM, Role.KEY_NORM)


def heads_of(config: ModelConfig, head_dim: int | None = None) -> Heads:
    """The heads of each attention layer; ``head_dim`` in place of the config's where a weight has another one."""
    return Heads(config.heads, config.kv_heads, config.head_dim if head_dim is None else head_dim)


def role_cut(role: Role, config: ModelConfig, shape: Sequence[int], transposed: bool = False) -> Cut:
    """The cut of a parameter of ``shape`` (the weight or, with one dim, the bias) of a module with this role.

    ``transposed``: the weight is stored ``[in, out]`` (GPT-2's Conv1D). A role that pairs gate with up takes half the length
    of the dim as the size of each. Raises UsageError (``bad-size``) as :class:`Heads` does.
    """
    vector = len(shape) < 2
    out_dim, in_dim = (1, 0) if transposed and not vector else (0, 1)
    if role in _ROWS:
        return Replicated() if vector else _row(role, config, in_dim)
    if role in (Role.EMBEDDING, Role.LM_HEAD, Role.COLUMN):
        return Column(out_dim)
    if role is Role.GATE_UP:
        return Packed(out_dim, _halves(shape[out_dim]))
    if role is Role.EXPERTS_GATE_UP:
        return Packed(1, _halves(shape[1]))
    if role is Role.EXPERTS_DOWN:
        return Row(2)
    return _head_cut(role, config, out_dim)


def _row(role: Role, config: ModelConfig, dim: int) -> Cut:
    if role is Role.ROW:
        return Row(dim)
    v_dim = config.latent.v_dim if role is Role.LATENT_OUT and config.latent else None
    return QueryHeads(heads_of(config, v_dim), dim=dim)


def _head_cut(role: Role, config: ModelConfig, dim: int) -> Cut:
    if role in _PER_HEAD:
        return (QueryHeads if role is Role.QUERY_NORM else KVHeads)(heads_of(config, 1))
    heads, latent = heads_of(config), config.latent
    if role is Role.LATENT_KEY_VALUE and latent:
        return QueryHeads(heads_of(config, latent.nope_dim + latent.v_dim), dim=dim)
    if role in (Role.QUERY, Role.WIDE_QUERY_NORM, Role.LATENT_QUERY):
        return QueryHeads(heads, dim=dim)
    if role in (Role.KEY_VALUE, Role.WIDE_KEY_NORM):
        return KVHeads(heads, dim=dim)
    if role is Role.QKV:
        return PackedQKV(heads, dim=dim)
    if role is Role.GROUPED_QKV:
        return GroupedQKV(heads, dim=dim)
    return Replicated()


def _halves(length: int) -> tuple[int, ...]:
    return (length // 2, length - length // 2)
