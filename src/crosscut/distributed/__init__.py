"""Ranks: starting and joining them, the mesh they form, and the links between their GPUs.

``Mesh`` and ``init_mesh`` load torch when they are first used; :mod:`crosscut.distributed.topology` never does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosscut.distributed.join import init_mesh
    from crosscut.distributed.mesh import Mesh

_HOMES = {"Mesh": "crosscut.distributed.mesh", "init_mesh": "crosscut.distributed.join"}

__all__ = ["Mesh", "init_mesh"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'crosscut.distributed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
