"""The protocol that collectives call around each operation. Silent by default: a group without an observer pays nothing.

The room ``diagnose`` implements it (the hang recorder); tests implement it to count bytes.
"""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Sees each collective of a group begin and end."""

    def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
        """Called before the operation is issued; ``detail`` is the reduce op or the root. Returns a token for ``end``."""
        ...

    def end(self, token: int) -> None:
        """Called when the operation was issued (async) or has returned (sync)."""
        ...
