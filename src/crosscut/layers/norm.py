"""Norms whose weights are whole on every rank, right also when each rank sees only its own tokens.

With sequence parallelism (arXiv 2205.05198) a rank's norm runs on S/tp tokens, so its gradient of the weight is partial.
Leaving the sum to the caller is a known trap (replicas drift, Megatron-LM issue 1446); these layers sum it themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.collectives import copy_to_tp
from crosscut.distributed.mesh import Mesh
from crosscut.layers.checks import check_dtype, check_eps
from crosscut.layers.parts import weight_and_bias
from crosscut.layers.shards import refuse_empty
from crosscut.sharding import Cut, Replicated


class _Norm(nn.Module):
    """A weight, perhaps a bias, and whether gradients are partial."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        eps: float,
        bias: bool,
        mesh: Mesh,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        refuse_empty(hidden=hidden)
        check_eps(eps)
        check_dtype(dtype)
        where = mesh.device if device is None else device
        self.hidden, self.eps, self.group, self.sequence_parallel = hidden, eps, mesh.tp, sequence_parallel
        self.cuts: dict[str, Cut] = dict.fromkeys(("weight", "bias") if bias else ("weight",), Replicated())
        self.shapes = dict.fromkeys(self.cuts, (hidden,))
        self.partial_gradients = dict.fromkeys(self.cuts, "layer") if sequence_parallel else {}
        self.weight = nn.Parameter(torch.empty(hidden, device=where, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(hidden, device=where, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0, as at the start: what a meta model needs after ``to_empty``."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., H] -> [..., H]``."""
        weight, bias = weight_and_bias(self)
        if not self.sequence_parallel:
            return self.normalise(x, weight, bias)
        return self.normalise(x, copy_to_tp(weight, self.group), None if bias is None else copy_to_tp(bias, self.group))

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm with these parameters; their gradients are left as they come."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """For ``print(module)``."""
        return f"{self.hidden}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class RMSNorm(_Norm):
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dim (arXiv 1910.07467). ``x [..., H]``, all or own tokens.

    Raises UsageError: ``bad-size`` for a size below 1, ``bad-option`` for a negative eps, ``bad-dtype`` for integers.
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-5,
        *,
        mesh: Mesh,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, eps, False, mesh, sequence_parallel, device, dtype)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., H] -> [..., H]``; there is no bias."""
        return F.rms_norm(x, (self.hidden,), weight, self.eps)


class LayerNorm(_Norm):
    """Layer normalisation (arXiv 1607.06450) over the last dim. ``x [..., H]``, all or own tokens.

    Raises UsageError: ``bad-size`` for a size below 1, ``bad-option`` for a negative eps, ``bad-dtype`` for integers.
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        mesh: Mesh,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, eps, bias, mesh, sequence_parallel, device, dtype)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., H] -> [..., H]``."""
        return F.layer_norm(x, (self.hidden,), weight, bias, self.eps)
