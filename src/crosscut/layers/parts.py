"""How a layer reaches its parts and its parameters: past nn.Module's attribute search, which takes a microsecond a name.

A layer of few tokens takes as long as its Python. Parts are still called as modules, so that every hook fires.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def parts(layer: nn.Module) -> dict[str, Any]:
    """The modules of ``layer`` by name, as they are now."""
    return layer._modules


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """``layer.weight`` and ``layer.bias``."""
    own: dict[str, Any] = layer._parameters
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    whole: Any = layer  # one is parametrised by the user: computed anew at each look
    return whole.weight, whole.bias
