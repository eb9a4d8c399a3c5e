"""crosscut: tensor parallelism that is proved equal, measured and made to pay.

The names below load torch when they are first used, not before::

    import crosscut as cc

    mesh = cc.init_mesh(tp=2)
    up = cc.ColumnParallelLinear(4096, 14336, mesh=mesh)
    down = cc.RowParallelLinear(14336, 4096, mesh=mesh)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crosscut.version import __version__

if TYPE_CHECKING:
    from crosscut.distributed import Mesh, init_mesh
    from crosscut.layers import (
        ColumnParallelLinear,
        ParallelAttention,
        ParallelBlock,
        ParallelMLP,
        RowParallelLinear,
        VocabParallelEmbedding,
        VocabParallelHead,
        broadcast_parameters,
        check_replicas,
        clip_grad_norm_,
        vocab_parallel_cross_entropy,
    )
    from crosscut.models.load import from_pretrained
    from crosscut.models.parallelize import gather, parallelize
    from crosscut.models.save import save_pretrained

_HOMES = {
    "ColumnParallelLinear": "crosscut.layers",
    "Mesh": "crosscut.distributed",
    "ParallelAttention": "crosscut.layers",
    "ParallelBlock": "crosscut.layers",
    "ParallelMLP": "crosscut.layers",
    "RowParallelLinear": "crosscut.layers",
    "VocabParallelEmbedding": "crosscut.layers",
    "VocabParallelHead": "crosscut.layers",
    "broadcast_parameters": "crosscut.layers",
    "check_replicas": "crosscut.layers",
    "clip_grad_norm_": "crosscut.layers",
    "from_pretrained": "crosscut.models.load",
    "gather": "crosscut.models.parallelize",
    "init_mesh": "crosscut.distributed",
    "parallelize": "crosscut.models.parallelize",
    "save_pretrained": "crosscut.models.save",
    "vocab_parallel_cross_entropy": "crosscut.layers",
}

__all__ = [
    "ColumnParallelLinear",
    "Mesh",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "__version__",
    "broadcast_parameters",
    "check_replicas",
    "clip_grad_norm_",
    "from_pretrained",
    "gather",
    "init_mesh",
    "parallelize",
    "save_pretrained",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'crosscut' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
