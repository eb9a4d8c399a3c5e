"""Loss scaling for float16 whose decision to skip a step is one decision of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crosscut.collectives import all_reduce
from crosscut.distributed.mesh import Mesh


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` on the ranks of ``mesh``: an infinite gradient on one rank skips the step on every rank.

    torch's own looks at the gradients of its rank alone. A shard overflows on one rank, which then skips the step and halves
    its scale while the others step: the model is torn, and nothing says so. ``options``: torch's (``init_scale``, ...).
    Before clipping call ``unscale_(optimizer)``, as with torch's. ``unscale_`` and ``step`` become collective calls.
    """

    def __init__(self, mesh: Mesh, **options: Any) -> None:
        super().__init__(mesh.device.type, **options)
        self._mesh = mesh

    def _unscale_grads_(self, *args: Any, **options: Any) -> dict[torch.device, Tensor]:
        # torch calls this for unscale_, and for step of a fused optimizer: the one place that sees every finding
        found = super()._unscale_grads_(*args, **options)
        for flag in found.values():
            for group in (self._mesh.tp, self._mesh.dp):
                all_reduce(flag, group, "max", out=flag)
        return found
