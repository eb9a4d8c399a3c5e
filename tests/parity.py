"""Equality of a split layer with its unsplit self: output, every gradient, one optimizer step.

Both compute in ``dtype`` from the same values; the reference is float64. A split result may be off by a few roundings of
``dtype`` more than the unsplit one, never by more: that bound is what a planted fault must break.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SLACK = 4  # a sum in another order rounds elsewhere; a wrong result is off by hundreds of roundings


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
