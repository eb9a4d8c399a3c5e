"""What a layer keeps for its backward, and its peak: measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], object], parameters: Sequence[Tensor]) -> int:
    """Bytes that ``run`` has autograd keep, each storage once and whole, without those of ``parameters``."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no storage is used again meanwhile

    def keep(t: Tensor) -> Tensor:
        kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)


def peak_bytes(run: Callable[[], object]) -> int:
    """How far ``run`` takes the GPU's allocated memory above where it was, at most."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
