"""A decoder block as one layer: norm, attention, norm, MLP, each with its residual (or both beside one residual).

Shapes: B batch, S sequence, H hidden; with sequence parallelism a rank holds ``[B, S/tp, H]`` between the layers.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from crosscut.collectives import all_reduce_norm
from crosscut.collectives.fast import joins_norm
from crosscut.distributed.mesh import Mesh
from crosscut.errors import choose
from crosscut.layers.attention import ParallelAttention
from crosscut.layers.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.layers.matmul import linear
from crosscut.layers.mlp import ParallelMLP
from crosscut.layers.norm import LayerNorm, RMSNorm
from crosscut.layers.parts import parts, weight_and_bias
from crosscut.layers.qkv import QKVParallelLinear
from crosscut.layers.random import ParallelDropout
from crosscut.layers.shards import shared_seed
from crosscut.layers.shared_input import Branch, shared_columns

NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


class ParallelBlock(nn.Module):
    """``x [B, S, H] -> [B, S, H]``: ``h = x + attention(norm(x))``, ``y = h + mlp(norm(h))`` (pre-norm, as Llama).

    ``parallel_residual``: ``y = x + attention(norm1(x)) + mlp(norm2(x))`` (GPT-J, GPT-NeoX): the two partial sums are added
    before one all-reduce, where the sequential block needs two, and so are the gradients of x (see ``shared_input``).
    ``norm``: ``rms`` or ``layer``. ``dropout``: of what each branch adds; ``dropout_invariant``, ``generator``: as in
    :class:`ParallelDropout`, also for the attention's. ``attention``: options of :class:`ParallelAttention` (``kv_heads``,
    ``rope_theta``, ``window``, ``bias``, ...). ``gated`` and ``activation``: of :class:`ParallelMLP`. ``sequence_parallel``: x
    and y are this rank's tokens. Raises UsageError as the layers do, and ``bad-option`` for an unknown attention option.
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
        dropout_invariant: bool = False,
        generator: torch.Generator | None = None,
        sequence_parallel: bool = False,
        attention: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        kind = NORMS[choose("norm", str(norm), NORMS)]
        like: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        drawn: tuple[int | None, int | None] = (None, None)
        if device is None or torch.device(device).type != "meta":
            seed = shared_seed(mesh.tp) if seed is None else seed
            drawn = (seed, seed + 4)
        self.attention_norm, self.mlp_norm = kind(hidden, eps, **like), kind(hidden, eps, **like)
        random: dict[str, Any] = {"generator": generator}
        chosen = {"bias": bias, "dropout_invariant": dropout_invariant, **random, **_checked(attention or {})}
        self.attention = ParallelAttention(hidden, heads, seed=drawn[0], **like, **chosen)
        self.mlp = ParallelMLP(
            hidden, ffn, activation=activation, gated=gated, bias=bias, sequence_dim=1, seed=drawn[1], **like
        )
        random["invariant"] = dropout_invariant
        self.dropout = ParallelDropout(dropout, mesh=mesh, sharded=sequence_parallel, dim=1, **random)
        self.parallel_residual = parallel_residual
        if parallel_residual:
            self.attention.o.reduce_output = self.mlp.down.reduce_output = False
            for each in (self.attention_norm, self.mlp_norm):
                each.partial_gradients = dict.fromkeys(each.cuts, "layer")

    def forward(self, x: Tensor, positions: Tensor | None = None, total_tokens: int | None = None) -> Tensor:
        """``x [B, S, H]`` or, with sequence_parallel, ``[B, S/tp, H]`` -> the same shape.

        ``positions``: for the rotation, of the whole sequence; ``total_tokens``: S when it does not divide.
        """
        if self.parallel_residual:
            partial = self._both(x, positions, total_tokens)
            both = self.mlp.down.plus_bias(self.attention.o.finish(partial))
            return x + self.dropout(both, total_tokens)
        part = parts(self)
        if self._in_one_kernel(x):
            x, normed = self._attended(x, positions)
        else:
            mixed = part["attention"](part["attention_norm"](x), positions, total_tokens)
            x = x + part["dropout"](mixed, total_tokens)
            normed = part["mlp_norm"](x)
        y: Tensor = x + part["dropout"](part["mlp"](normed, total_tokens), total_tokens)
        return y

    def _in_one_kernel(self, x: Tensor) -> bool:
        """Whether a kernel can do all between the attention's output multiply and the MLP: sum over ranks, residual, norm."""
        if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return False
        part = parts(self)
        attention, norm = part["attention"], part["mlp_norm"]
        if attention.group.size == 1 or norm.sequence_parallel or torch.is_autocast_enabled(x.device.type):
            return False
        return (
            joins_norm(x, attention.group)
            and not (self.training and part["dropout"].p)
            and _untouched(attention, attention.o, norm)
        )

    def _attended(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x + attention(norm(x))`` and its norm, for the MLP."""
        attention, norm = self.attention, self.mlp_norm
        attention.check_dims(x)
        (weight, bias), (scale, shift) = weight_and_bias(attention.o), weight_and_bias(norm)
        mixed = attention.mix(attention.qkv(self.attention_norm(x)), positions)
        partial = linear(mixed, weight, then=("all_reduce", attention.group))
        is_layer = isinstance(norm, LayerNorm)
        normed, x = all_reduce_norm(partial, x, scale, attention.group, norm.eps, bias, shift, is_layer)
        return x, normed

    def _both(self, x: Tensor, positions: Tensor | None, total_tokens: int | None) -> Tensor:
        """What the two branches add, this rank's partial sums, without biases."""
        attention, mlp = self.attention, self.mlp
        attention.check_dims(x)
        if not _untouched(attention, mlp, attention.qkv, mlp.up, self.attention_norm, self.mlp_norm):
            partial = attention(self.attention_norm(x), positions, total_tokens)  # someone changed a part: call it
            return partial + mlp(self.mlp_norm(x), total_tokens)
        branches = Branch(self.attention_norm, *attention.qkv.rows()), Branch(self.mlp_norm, *mlp.up._own())
        qkv, up = shared_columns(x, branches, attention.group, attention.qkv.sequence_dim, total_tokens)
        return attention.o(attention.mix(qkv, positions)) + mlp.down(mlp.activate(up))


_OWN = {ParallelAttention, ParallelMLP, QKVParallelLinear, ColumnParallelLinear, RowParallelLinear, RMSNorm, LayerNorm}
_HUNG_ON = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_compiled_call_impl", "forward"),  # by Module.compile, and by libraries that wrap a module in place
)
_SET_BY_BLOCK = ("self", "hidden", "heads", "mesh", "sequence_parallel", "sequence_dim", "device", "dtype", "seed")


def _untouched(*layers: nn.Module) -> bool:
    """Whether these are crosscut's own layers with nothing hung on them, so that their work may be done elsewhere."""
    if _has_any_global_hook():
        return False
    return all(type(part) in _OWN and not any(part.__dict__.get(name) for name in _HUNG_ON) for part in layers)


def _checked(attention: dict[str, Any]) -> dict[str, Any]:
    known = [name for name in signature(ParallelAttention.__init__).parameters if name not in _SET_BY_BLOCK]
    for name in attention:
        choose("attention option", name, known)
    return attention
