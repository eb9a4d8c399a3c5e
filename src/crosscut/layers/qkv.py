"""What attention needs next to its heads: q, k and v in one multiply, norms over heads, gradients of shared KV heads.

Where there are fewer KV heads than ranks, a KV head is replicated on the ranks that need it, each of which sees the gradient
from its own query heads alone: the backward sums them once, so that replicas stay equal. Shapes as in ``attention``: N query
heads, K KV heads, D head dim; ``/tp`` marks what a rank holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import Self

from crosscut.collectives import reduce_from_tp
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers.linear import _ParallelLinear
from crosscut.layers.norm import RMSNorm
from crosscut.layers.overlap import column_linear
from crosscut.sharding import Cut, Heads, PackedQKV


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
        return column_linear(x, *self.rows(), self.group, self.sequence_dim, total_tokens, self.out_features)

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as the multiply uses them, so that the gradients of replicated KV rows are summed."""
        weight, bias = self._own()
        return sum_kv_gradient(weight, self.heads, self.group), (
            None if bias is None else sum_kv_gradient(bias, self.heads, self.group)
        )


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

        Raises UsageError: ``bad-size`` when its weight is not ``[D]``, ``bad-option`` when it computes something else.
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
            probe = torch.linspace(-1, 2, head_dim, dtype=weight.dtype, device=weight.device)
            if not weight.is_meta and not torch.allclose(norm(probe), copy.normalise(probe, weight, None), 0.05, 0.01):
                raise UsageError(
                    f"{norm} is not an RMS norm with the factor weight",
                    code="bad-option",
                    fix="give one that is; of Gemma, whose factor is 1 + weight, a copy with 1 added to its weight",
                )
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
    if not (rows.requires_grad and torch.is_grad_enabled()) or not heads.kv_replicated(group.size):
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
