"""Equality of a split layer with its unsplit self: output, every gradient, one optimizer step.

Both compute in ``dtype`` from the same values; the reference is float64. How far a right result may be off is measured, not
chosen: the unsplit layer is run again with its sums cut into as many parts as there are ranks (and a few more), each part
rounded to ``dtype`` and the parts added in another order, which is all that a right split does to it. A split may be off by
``FACTOR`` times what the worst of these controls is off, no more: that bound is what a planted fault must break.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

SLACK = 4  # of assert_equal_to_rounding: another order rounds elsewhere; a wrong result is off by hundreds of roundings
FACTOR = (
    4  # of Expected: both are a few random roundings; the largest ratio seen is 2.6 (float32 norms of 5 features), 1.8 in bf16
)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference|| in float64; NaN anywhere gives infinity."""
    x, reference = x.detach().double(), reference.detach().double()
    assert x.shape == reference.shape, f"shape {list(x.shape)} instead of {list(reference.shape)}"
    error = (x - reference).norm() / reference.norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def assert_equal_to_rounding(what: str, x: Tensor, unsplit: Tensor, exact: Tensor, roundings: float = 1) -> None:
    """``x`` is as near to the float64 result ``exact`` as ``unsplit`` is, to within a few roundings of its dtype."""
    rounding = torch.finfo(x.dtype).eps
    allowed = SLACK * roundings * max(relative_error(unsplit, exact), rounding)
    got = relative_error(x, exact)
    assert got <= allowed, f"{what}: relative error {got:.3g}, allowed {allowed:.3g}"


def step(module: nn.Module, x: Tensor, upstream: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Forward, backward with the given upstream gradient, and one AdamW step; everything that came out, by name."""
    x = x.clone().requires_grad_()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    y = call(x)
    y.backward(upstream)
    out = {"y": y.detach(), "dx": x.grad}
    out |= {f"grad of {name}": p.grad.clone() for name, p in module.named_parameters()}
    optimizer.step()
    return {k: v for k, v in out.items() if v is not None} | {
        f"step of {name}": p.detach().clone() for name, p in module.named_parameters()
    }


Run = Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]


@dataclass
class Expected:
    """What one step of an unsplit layer gives in float64, and how far from it a split may be, by name.

    ``sure``: AdamW's first step goes by the gradient's sign, so it is compared where the exact gradient is zero or larger than
    what it may be off; elsewhere rounding decides the sign.
    """

    exact: dict[str, Tensor]
    allowed: dict[str, float]
    sure: dict[str, Tensor]

    def check(self, got: dict[str, Tensor], where: str) -> None:
        """Raise AssertionError naming the first result of ``got`` that is off by more than the control explains."""
        assert got.keys() == self.exact.keys()
        for key, exact in self.exact.items():
            sure = self.sure.get(key, slice(None))
            assert got[key].shape == exact.shape, f"{where}: {key}: shape {list(got[key].shape)}"
            off = relative_error(got[key][sure], exact[sure])
            assert off <= self.allowed[key], f"{where}: {key}: relative error {off:.3g}, allowed {self.allowed[key]:.3g}"


def expected(module: nn.Module, x: Tensor, upstream: Tensor, parts: int, run: Run | None = None) -> Expected:
    """One step of ``module`` in float64, and its error in its own dtype, as it is and with sums in ``parts`` parts.

    ``run(module, x, upstream)``: the step, when it is not plain ``module(x)``.
    """
    run = run or (lambda module, x, upstream: step(module, x, upstream, module))
    exact = run(deepcopy(module).double(), x.double(), upstream.double())
    tries = [run(deepcopy(module), x, upstream)]
    for count in (parts, parts + 1, 2 * parts):
        with Reordered(max(count, 2)):
            tries.append(run(deepcopy(module), x, upstream))
    allowed: dict[str, float] = {}
    sure: dict[str, Tensor] = {}
    rounding = torch.finfo(x.dtype).eps / 2  # of a result that is right but for its last rounding
    for key, right in exact.items():  # a step comes behind its gradient
        if key.startswith("step of "):
            grad = exact[key.replace("step", "grad", 1)]
            sure[key] = (grad == 0) | (grad.abs() > allowed[key.replace("step", "grad", 1)] * grad.norm())
        at = sure.get(key, slice(None))
        allowed[key] = FACTOR * max(rounding, *(relative_error(t[key][at], right[at]) for t in tries))
    return Expected(exact, allowed, sure)


class Reordered(TorchFunctionMode):
    """Within: multiplies sum in ``parts`` parts, last first, each rounded, forward and backward; norms' weights likewise."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = (*args, None)[:3]
            return _ReorderedLinear.apply(x, weight, bias, self.parts)
        if func in (F.rms_norm, F.layer_norm):  # the weights' gradients sum over tokens
            x, *rest = args
            tokens = x.flatten(0, -2).tensor_split(self.parts)
            return torch.cat([func(part, *rest, **kwargs) for part in tokens if len(part)]).view(x.shape)
        return func(*args, **kwargs)


class _ReorderedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.bias = parts, bias is not None
        y = _in_parts(partial(F.linear), x, weight, (-1, -1), parts)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, rows = grad.flatten(0, -2), x.flatten(0, -2)
        dx = _in_parts(torch.matmul, grad, weight, (-1, 0), ctx.parts)
        dw = _in_parts(lambda g, x: g.t() @ x, flat, rows, (0, 0), ctx.parts)
        db = _in_parts(lambda g, _: g.sum(0), flat, rows, (0, 0), ctx.parts) if ctx.bias else None
        return dx, dw, db, None


def _in_parts(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, dims: tuple[int, int], parts: int) -> Tensor:
    pairs = zip(a.tensor_split(parts, dims[0]), b.tensor_split(parts, dims[1]), strict=True)
    return reduce(torch.add, reversed([multiply(*pair) for pair in pairs]))
