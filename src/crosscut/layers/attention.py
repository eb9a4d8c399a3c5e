"""Attention cut by heads: each rank computes its own heads whole, and the output projection sums over the ranks.

One packed column-parallel multiply gives q, k and v of the rank's heads (``qkv``); torch's scaled_dot_product_attention does
the rest (``sdpa``; Megatron-LM, arXiv 1909.08053 section 3). Shapes: B batch, S sequence, H hidden, N query heads, K KV heads,
D head dim; ``/tp`` marks what a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers.checks import check_positive
from crosscut.layers.linear import RowParallelLinear
from crosscut.layers.parts import parts
from crosscut.layers.qkv import HeadNorm, QKVParallelLinear
from crosscut.layers.random import HeadDropout
from crosscut.layers.rope import make_rope
from crosscut.layers.sdpa import attend
from crosscut.layers.shards import pack, refuse_empty, shared_seed, unpack
from crosscut.sharding import Heads, QueryHeads


class ParallelAttention(nn.Module):
    """Self-attention ``x [B, S, H] -> y [B, S, H]`` with the heads cut over the tp group; any N >= tp, any K dividing N.

    forward:  one all-reduce; backward: one, of ``dx``, and one of the KV weights' gradients where KV heads are replicated

    ``heads``, ``kv_heads`` (default N), ``head_dim`` (default H/N): N, K and D. ``bias``: of q, k and v; ``out_bias``: of the
    output projection (default: as ``bias``). ``qk_norm``: RMS norm over D of each query and key head, before the rotation.
    ``rope_theta``: rotary embedding with this base (None: no rotation); ``rope_scaling``, ``partial_rotary_factor``,
    ``rope_interleaved``: as :func:`~crosscut.layers.rope.make_rope` says. ``causal``: a token sees itself and those before it;
    ``window`` W: only those less than W tokens away. ``scale``: of the scores (default 1/sqrt(D)). ``softcap``: a soft limit of
    theirs. ``dropout``: of the attention weights; ``dropout_invariant``: masks that do not depend on tp, and ``generator``: as
    :class:`~crosscut.layers.random.HeadDropout` says. ``sequence_dim``: where S is, 1 or, for ``x [S, B, H]``, 0.
    ``sequence_parallel``: x and y are this rank's tokens alone, ``[B, S/tp, H]``.
    Raises UsageError: ``bad-size`` for sizes that do not fit or fewer heads than ranks, ``bad-option`` and ``bad-dtype`` for
    the others.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        mesh: Mesh,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        rope_theta: float | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        partial_rotary_factor: float = 1.0,
        rope_interleaved: bool = False,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        dropout_invariant: bool = False,
        generator: torch.Generator | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        refuse_empty(hidden=hidden, heads=heads, kv_heads=kv_heads)
        head_dim = _default_head_dim(hidden, heads) if head_dim is None else head_dim
        refuse_empty(head_dim=head_dim)
        self.heads = Heads(heads, kv_heads, head_dim)
        _check_options(window, sequence_dim, rope_theta, rope_scaling, partial_rotary_factor, rope_interleaved)
        check_positive(scale=scale, softcap=softcap)
        self.rope = None
        if rope_theta is not None:
            self.rope = make_rope(self.heads.head_dim, rope_theta, rope_scaling, partial_rotary_factor, rope_interleaved)
        self.hidden, self.causal, self.window, self.scale, self.softcap = hidden, causal, window, scale, softcap
        self.sequence_dim, self.group = sequence_dim, mesh.tp
        queries = self.heads.query_range(mesh.tp.size, mesh.tp.rank)
        self.dropout = HeadDropout(dropout, queries, mesh=mesh, invariant=dropout_invariant, generator=generator)
        mapping = self.heads.kv_of_query(mesh.tp.size, mesh.tp.rank)
        self.queries_per_kv = [mapping.count(kv) for kv in range(mapping[-1] + 1)]
        self.own_heads = len(mapping), len(self.queries_per_kv)  # N/tp and K/tp

        seeds: tuple[int | None, int | None] = (None, None)
        if device is None or torch.device(device).type != "meta":
            seed = shared_seed(mesh.tp) if seed is None else seed
            seeds = (seed, seed + 2)
        like: dict[str, Any] = {"mesh": mesh, "device": device, "dtype": dtype}
        layout: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        width = self.heads.head_dim * heads
        packed = width + 2 * self.heads.head_dim * kv_heads
        self.qkv = QKVParallelLinear(hidden, packed, bias, heads=self.heads, seed=seeds[0], **layout, **like)
        cut, out_bias = QueryHeads(self.heads, dim=1), bias if out_bias is None else out_bias
        self.o = RowParallelLinear(width, hidden, out_bias, cut=cut, seed=seeds[1], **layout, **like)
        self.q_norm = HeadNorm(self.heads.head_dim, qk_norm_eps, **like) if qk_norm else None
        self.k_norm = HeadNorm(self.heads.head_dim, qk_norm_eps, **like) if qk_norm else None

    @classmethod
    def from_packed(
        cls,
        qkv: nn.Linear,
        o: nn.Linear,
        mesh: Mesh,
        *,
        heads: int,
        kv_heads: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        **options: Any,
    ) -> Self:
        """This rank's heads of unsplit layers, ``qkv [(N+2K)*D, H]`` with all rows of q first, then k, then v.

        ``q_norm``, ``k_norm``: RMS norms with a ``weight [D]`` (torch's, or those of transformers), both or none.
        ``options``: the constructor's ``rope_theta``, ``window``, ``sequence_parallel``, ...
        Raises UsageError: ``bad-size`` when the layers do not fit together, ``bad-option`` for one norm of two.
        """
        sizes = Heads(heads, heads if kv_heads is None else kv_heads, _packed_head_dim(qkv, heads, kv_heads))
        _check_output(o, sizes, qkv.in_features)
        if (q_norm is None) != (k_norm is None):
            raise UsageError("only one of q_norm and k_norm is given", code="bad-option", fix="give both, or none")
        options |= {"device": "meta", "dtype": qkv.weight.dtype}
        attention = cls(
            qkv.in_features,
            heads,
            mesh=mesh,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            bias=qkv.bias is not None,
            out_bias=o.bias is not None,
            qk_norm=False,  # those given below
            **options,
        )
        layout = {"sequence_parallel": attention.o.sequence_parallel, "sequence_dim": attention.sequence_dim}
        attention.qkv = QKVParallelLinear.from_linear(qkv, mesh, heads=sizes, **layout)
        attention.o = RowParallelLinear.from_linear(o, mesh, cut=QueryHeads(sizes, dim=1), **layout)
        if q_norm is not None and k_norm is not None:
            attention.q_norm, attention.k_norm = (HeadNorm.from_norm(n, sizes.head_dim, mesh) for n in (q_norm, k_norm))
        return attention

    @classmethod
    def from_linears(
        cls, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear, mesh: Mesh, *, heads: int, **options: Any
    ) -> Self:
        """This rank's heads of four unsplit layers: ``q [N*D, H]``, ``k``, ``v [K*D, H]``, ``o [H, N*D]``.

        ``options``: those of :meth:`from_packed`, with ``kv_heads``. Raises UsageError as it does.
        """
        if k.out_features != v.out_features:
            raise UsageError(
                f"k gives {k.out_features} features and v {v.out_features}: they cannot be stored as one",
                code="bad-size",
                fix="give both the same output features, kv_heads x head_dim",
            )
        kv_heads = options.get("kv_heads")
        for name, linear, count in (("q", q, heads), ("k", k, heads if kv_heads is None else kv_heads)):
            if count < 1 or linear.out_features % count or linear.out_features // count * heads != q.out_features:
                raise UsageError(
                    f"{name} gives {linear.out_features} features, which are not {count} heads as wide as those of q",
                    code="bad-size",
                    fix=f"check heads={heads} and kv_heads={kv_heads}: q gives heads x head_dim, k and v kv_heads x head_dim",
                )
        return cls.from_packed(pack([q, k, v]), o, mesh, heads=heads, **options)

    def to_linears(self) -> dict[str, nn.Linear]:
        """The unsplit layers ``q``, ``k``, ``v`` and ``o`` on every rank, bit for bit; norms are whole already.

        A collective call.
        """
        n, kv, d = self.heads.heads, self.heads.kv_heads, self.heads.head_dim
        q, k, v = unpack(self.qkv.to_linear(), [n * d, kv * d, kv * d])
        return {"q": q, "k": k, "v": v, "o": self.o.to_linear()}

    def forward(self, x: Tensor, positions: Tensor | None = None, total_tokens: int | None = None) -> Tensor:
        """``x [B, S, H] -> y [B, S, H]``, or with sequence_parallel this rank's tokens of both, ``[B, S/tp, H]``.

        ``positions``: ``[S]`` or ``[B, S]`` of all tokens for the rotation, default 0 to S-1; causal and window go by the
        order of the tokens. ``total_tokens``: with sequence_parallel, S when it does not divide.
        Raises UsageError (``bad-shape``) for an x that is not [B, S, H], or positions that do not fit it.
        """
        self.check_dims(x)
        layers = parts(self)
        y: Tensor = layers["o"](self.mix(layers["qkv"](x, total_tokens), positions))
        return y

    def check_dims(self, x: Tensor) -> None:
        """Raise UsageError (``bad-shape``) unless x has the dims of :meth:`forward`."""
        if x.dim() != 3:
            raise UsageError(
                f"ParallelAttention got x {list(x.shape)}",
                code="bad-shape",
                fix=f"give [{'B, S' if self.sequence_dim else 'S, B'}, H={self.hidden}]",
            )

    def mix(self, packed: Tensor, positions: Tensor | None = None) -> Tensor:
        """What lies between the two multiplies, for all tokens: ``[B, S, (N/tp + 2 K/tp) * D] -> [B, S, N/tp * D]``."""
        packed = packed.unflatten(-1, (-1, self.heads.head_dim)).movedim(self.sequence_dim, -2)  # [B, heads, S, D]
        if positions is not None:
            _check_positions(positions, packed.shape[0], packed.shape[-2])
        queries, kv = self.own_heads
        if self.rope is not None and self.q_norm is None:  # one rotation serves both
            both, v = packed.split_with_sizes([queries + kv, kv], 1)
            q, k = self._turned(both, positions).split_with_sizes([queries, kv], 1)
        else:
            q, k, v = packed.split_with_sizes([queries, kv, kv], 1)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self._turned(self.q_norm(q), positions), self._turned(self.k_norm(k), positions)
        y = attend(
            q,
            k,
            v,
            self.queries_per_kv,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            dropout=parts(self)["dropout"],
        )
        return y.movedim(-2, self.sequence_dim).flatten(-2)

    def _turned(self, heads: Tensor, positions: Tensor | None) -> Tensor:
        """``[B, heads, S, D]``, each head rotated by the positions, where the layer has a rotation."""
        if self.rope is None:
            return heads
        return self.rope.rotate(
            heads, *self.rope.tables(heads.shape[-2] if positions is None else positions, heads.device, heads.dtype)
        )

    def extra_repr(self) -> str:
        """Heads and options, for ``print(module)``."""
        options = f"rope={self.rope}, causal={self.causal}, window={self.window}, scale={self.scale}, softcap={self.softcap}"
        return f"{self.hidden}, heads={self.heads.heads}, kv_heads={self.heads.kv_heads}, {options}"


def _default_head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise UsageError(
            f"hidden={hidden} does not divide into {heads} heads",
            code="bad-size",
            fix="give head_dim, or a number of heads that divides hidden",
        )
    return hidden // heads


def _check_options(window: int | None, sequence_dim: int, theta: float | None, *rope: Any) -> None:
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UsageError(f"window={window}", code="bad-option", fix="give a window of at least 1 token, or None for no limit")
    if sequence_dim not in (0, 1):
        raise UsageError(f"sequence_dim={sequence_dim}", code="bad-option", fix="use 1 for x [B, S, H] or 0 for x [S, B, H]")
    if theta is None and rope != (None, 1.0, False):
        raise UsageError("rope options without rope_theta", code="bad-option", fix="give rope_theta too, such as 10000.0")


def _check_positions(positions: object, batch: int, length: int) -> None:
    shape = tuple(positions.shape) if isinstance(positions, Tensor) else None
    if shape not in ((length,), (batch, length), (1, length)):
        raise UsageError(
            f"positions {positions if shape is None else list(shape)} for {batch} sequences of {length} tokens",
            code="bad-shape",
            fix=f"give a tensor [{length}] or [{batch}, {length}]; with sequence_parallel, those of the whole sequence",
        )


def _packed_head_dim(qkv: nn.Linear, heads: int, kv_heads: int | None) -> int:
    blocks = heads + 2 * (heads if kv_heads is None else kv_heads)
    if blocks < 1 or qkv.out_features % blocks:
        raise UsageError(
            f"a packed qkv with {qkv.out_features} output features does not divide into heads={heads}, kv_heads={kv_heads}",
            code="bad-size",
            fix="it must have (heads + 2 x kv_heads) x head_dim of them",
        )
    return qkv.out_features // blocks


def _check_output(o: nn.Linear, heads: Heads, hidden: int) -> None:
    if (o.in_features, o.out_features) != (heads.heads * heads.head_dim, hidden):
        raise UsageError(
            f"the output projection is {o.in_features} -> {o.out_features}",
            code="bad-size",
            fix=f"for {heads.heads} heads of {heads.head_dim} and hidden {hidden} it must be "
            f"{heads.heads * heads.head_dim} -> {hidden}",
        )
