"""Attention cut by heads: each rank computes its own heads whole, and the output projection sums over the ranks.

One packed column-parallel multiply gives q, k and v of the rank's heads; torch's scaled_dot_product_attention does the rest
(Megatron-LM, arXiv 1909.08053 section 3). Where there are fewer KV heads than ranks, a KV head is replicated on the ranks
that need it, each of which sees the gradient from its own query heads alone: the backward sums them once, so that replicas
stay equal. Shapes: B batch, S sequence, H hidden, N query heads, K KV heads, D head dim; ``/tp`` marks what a rank holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import Self

from crosscut.collectives import reduce_from_tp
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers.linear import RowParallelLinear, _ParallelLinear
from crosscut.layers.norm import RMSNorm
from crosscut.layers.overlap import column_linear
from crosscut.layers.rope import check_rope, rotary_tables, rotate
from crosscut.layers.shards import pack, shared_seed, unpack
from crosscut.sharding import Cut, Heads, PackedQKV, QueryHeads


class ParallelAttention(nn.Module):
    """Self-attention ``x [B, S, H] -> y [B, S, H]`` with the heads cut over the tp group; any N >= tp, any K dividing N.

    forward:  one all-reduce; backward: one, of ``dx``, and one of the KV weights' gradients where KV heads are replicated

    ``heads``, ``kv_heads`` (default N), ``head_dim`` (default H/N): N, K and D. ``bias``: of q, k and v; ``out_bias``: of the
    output projection (default: as ``bias``). ``qk_norm``: RMS norm over D of each query and key head, before the rotation.
    ``rope_theta``: rotary embedding with this base (None: no rotation). ``causal``: a token sees itself and those before it;
    ``window`` W: only those less than W tokens away. ``sequence_dim``: where S is, 1 or, for ``x [S, B, H]``, 0.
    ``sequence_parallel``: x and y are this rank's tokens alone, ``[B, S/tp, H]``.
    Raises UsageError: ``bad-size`` for sizes that do not fit or fewer heads than ranks, ``bad-option`` for the others.
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
        causal: bool = True,
        window: int | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.heads = Heads(heads, kv_heads, _default_head_dim(hidden, heads) if head_dim is None else head_dim)
        _check_options(self.heads, rope_theta, window, sequence_dim)
        self.hidden, self.rope_theta, self.causal, self.window = hidden, rope_theta, causal, window
        self.sequence_dim, self.group = sequence_dim, mesh.tp
        mapping = self.heads.kv_of_query(mesh.tp.size, mesh.tp.rank)
        self.queries_per_kv = [mapping.count(kv) for kv in range(mapping[-1] + 1)]

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
        _check_separate(q, k, v)
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
        if x.dim() != 3:
            raise UsageError(
                f"ParallelAttention got x {list(x.shape)}",
                code="bad-shape",
                fix=f"give [{'B, S' if self.sequence_dim else 'S, B'}, H={self.hidden}]",
            )
        packed = self.qkv(x, total_tokens).unflatten(-1, (-1, self.heads.head_dim)).movedim(self.sequence_dim, -2)
        own_kv = len(self.queries_per_kv)
        q, k, v = packed.split([sum(self.queries_per_kv), own_kv, own_kv], 1)  # [B, N/tp, S, D], [B, K/tp, S, D] twice
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            where = self._positions(positions, packed)
            cos, sin = rotary_tables(where, self.heads.head_dim, self.rope_theta, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o(self._attend(q, k, v).movedim(-2, self.sequence_dim).flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``softmax(q k^T / sqrt(D)) v`` for the rank's heads."""
        uniform = len(set(self.queries_per_kv)) == 1  # not where the border between ranks lies inside a group of heads
        if not uniform:
            k, v = self._one_per_query(k), self._one_per_query(v)
        mask = self._window_mask(q.shape[-2], q.device)
        causal = self.causal and mask is None
        gqa = uniform and self.queries_per_kv[0] > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)

    def _one_per_query(self, kv: Tensor) -> Tensor:
        """``[B, K/tp, S, D] -> [B, N/tp, S, D]``, each head as often as query heads use it."""
        return torch.cat([kv[:, i, None].expand(-1, n, -1, -1) for i, n in enumerate(self.queries_per_kv)], 1)

    def _window_mask(self, length: int, device: torch.device) -> Tensor | None:
        """``[S, S]``, true where token i (row) sees token j; None when the window cuts nothing off."""
        if self.window is None or self.window >= length:
            return None
        index = torch.arange(length, device=device)
        distance = index[:, None] - index
        near = distance.abs() < self.window
        return near & (distance >= 0) if self.causal else near

    def _positions(self, positions: Tensor | None, heads: Tensor) -> Tensor:
        batch, _, length, _ = heads.shape
        if positions is None:
            return torch.arange(length, device=heads.device)
        if tuple(positions.shape) not in ((length,), (batch, length), (1, length)):
            raise UsageError(
                f"positions {list(positions.shape)} for {batch} sequences of {length} tokens",
                code="bad-shape",
                fix=f"give [{length}] or [{batch}, {length}]; with sequence_parallel, those of the whole sequence",
            )
        return positions

    def extra_repr(self) -> str:
        """Heads and options, for ``print(module)``."""
        options = f"rope_theta={self.rope_theta}, causal={self.causal}, window={self.window}"
        return f"{self.hidden}, heads={self.heads.heads}, kv_heads={self.heads.kv_heads}, {options}"


class QKVParallelLinear(_ParallelLinear):
    """q, k and v of the rank's heads in one multiply: ``x [B, S, H] -> [B, S, (N/tp + 2 K/tp) * D]``, all of q first.

    Like ColumnParallelLinear, with the cut ``PackedQKV(heads)``; the gradient of replicated KV rows is summed over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        heads: Heads,
        mesh: Mesh,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        cuts: dict[str, Cut] = dict.fromkeys(("weight", "bias"), PackedQKV(heads))
        super().__init__(in_features, out_features, bias, mesh, cuts, device, dtype)
        self.heads, self.sequence_dim = heads, sequence_dim if sequence_parallel else None
        self.reset_parameters(seed)

    def forward(self, x: Tensor, total_tokens: int | None = None) -> Tensor:
        """As ColumnParallelLinear's. Raises UsageError (``bad-shape``) when x does not have H features."""
        self._check_width(x, self.in_features, "the input")
        weight, bias = (None if p is None else sum_kv_gradient(p, self.heads, self.group) for p in self._own())
        assert weight is not None
        return column_linear(x, weight, bias, self.group, self.sequence_dim, total_tokens)


class HeadNorm(RMSNorm):
    """RMS norm over D of each of the rank's heads, ``[B, N/tp, S, D]`` -> the same.

    The weight ``[D]`` is the same on all ranks, each of which sees its own heads alone, as with sequence parallelism its own
    tokens alone: in both cases the gradients are partial, and the norm sums them.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float,
        *,
        mesh: Mesh,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(head_dim, eps, mesh=mesh, sequence_parallel=True, device=device, dtype=dtype)

    @classmethod
    def from_norm(cls, norm: nn.Module, head_dim: int, mesh: Mesh) -> Self:
        """A copy of ``norm`` (torch's RMSNorm with ``eps``, or transformers' with ``variance_epsilon``) on this rank.

        Raises UsageError (``bad-size``) when its weight is not ``[D]``.
        """
        weight = norm.get_parameter("weight")
        if tuple(weight.shape) != (head_dim,):
            raise UsageError(
                f"a QK-norm weight {list(weight.shape)} for heads of {head_dim} features",
                code="bad-size",
                fix="give a norm over one head, shared by all heads; one over all heads at once cannot be cut by heads",
            )
        eps: Any = getattr(norm, "variance_epsilon", None) or norm.eps
        eps = torch.finfo(weight.dtype).eps if eps is None else eps  # as torch reads None
        copy = cls(head_dim, eps, mesh=mesh, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            copy.weight.copy_(weight)
        copy.weight.requires_grad_(weight.requires_grad)
        return copy

    def extra_repr(self) -> str:
        """For ``print(module)``."""
        return f"{self.hidden}, eps={self.eps}"


def sum_kv_gradient(rows: Tensor, heads: Heads, group: Group) -> Tensor:
    """Identity on this rank's packed ``rows [(N/tp + 2 K/tp) * D, ...]`` whose backward sums what belongs to KV heads.

    Each KV head's gradient becomes the sum over the ranks that hold it, so that replicas get equal steps. Where no head is
    replicated it does nothing at all.
    """
    if not heads.kv_replicated(group.size) or not (rows.requires_grad and torch.is_grad_enabled()):
        return rows
    return _SumKVGradient.apply(rows, heads, group)


class _SumKVGradient(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, heads: Heads, group: Group) -> Tensor:
        ctx.heads, ctx.group = heads, group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, group = ctx.heads, ctx.group
        own, d = heads.kv_range(group.size, group.rank), heads.head_dim
        place = slice(own.start * d, own.stop * d)
        mine = 2 * (place.stop - place.start)
        total = grad.new_zeros((2, heads.kv_heads * d, *grad.shape[1:]))  # k and v, each of all heads
        total[:, place] = grad[-mine:].unflatten(0, (2, -1))
        total = reduce_from_tp(total, group, True)
        return torch.cat([grad[:-mine], total[:, place].flatten(0, 1)]), None, None


def _default_head_dim(hidden: int, heads: int) -> int:
    if heads >= 1 and hidden % heads:
        raise UsageError(
            f"hidden={hidden} does not divide into {heads} heads",
            code="bad-size",
            fix="give head_dim, or a number of heads that divides hidden",
        )
    return hidden // max(heads, 1)


def _check_options(heads: Heads, rope_theta: float | None, window: int | None, sequence_dim: int) -> None:
    if rope_theta is not None:
        check_rope(heads.head_dim, rope_theta)
    if window is not None and window < 1:
        raise UsageError(f"window={window}", code="bad-option", fix="give a window of at least 1 token, or None for no limit")
    if sequence_dim not in (0, 1):
        raise UsageError(f"sequence_dim={sequence_dim}", code="bad-option", fix="use 1 for x [B, S, H] or 0 for x [S, B, H]")


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


def _check_separate(q: nn.Linear, k: nn.Linear, v: nn.Linear) -> None:
    traits = {
        (linear.in_features, linear.weight.dtype, *((n, p.requires_grad) for n, p in linear.named_parameters()))
        for linear in (q, k, v)
    }
    if len(traits) > 1 or k.out_features != v.out_features:
        found = "; ".join(f"{name}: {linear}" for name, linear in (("q", q), ("k", k), ("v", v)))
        raise UsageError(
            f"these layers cannot be stored as one: {found}",
            code="bad-size",
            fix="q, k and v need the same input features, dtype, bias and requires_grad, k and v the same output features",
        )
