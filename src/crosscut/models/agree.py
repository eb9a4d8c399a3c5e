"""All ranks raise, or none does: an error on one rank is told to the others before they wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from crosscut.collectives import all_gather, all_reduce
from crosscut.distributed.mesh import Mesh
from crosscut.errors import CrosscutError, RankError

T = TypeVar("T")

_WORDS = 1024  # bytes of a message that reach the other ranks


def agree(mesh: Mesh, error: Exception | None) -> None:
    """Raise on every rank of ``mesh`` when one has an ``error``: there its own, elsewhere what that rank said.

    A collective call. The other ranks get a RankError (``rank-failed``).
    """
    if int(maximum(mesh, torch.tensor([int(error is not None)]))):
        words = _exchange(mesh, _text(error))
        if error is not None:
            raise error
        rank = next(rank for rank, text in enumerate(words) if text)
        raise RankError(f"rank {rank} failed: {words[rank]}", code="rank-failed", fix="see that rank's own error")


def together(mesh: Mesh, action: Callable[[], T]) -> T:
    """What ``action`` gives on this rank. Raises on all ranks, as :func:`agree`, when it fails on one. A collective call."""
    failed = None
    try:
        result = action()
    except Exception as error:
        failed = error
    agree(mesh, failed)
    return result


def maximum(mesh: Mesh, numbers: Tensor) -> Tensor:
    """The largest of all ranks' ``numbers`` [n], element by element, on the CPU. A collective call."""
    most = numbers.to(mesh.device)
    for group in (mesh.tp, mesh.dp):
        most = all_reduce(most, group, "max")
    return most.cpu()


def _text(error: Exception | None) -> bytes:
    if error is None:
        return b""
    message = error.message if isinstance(error, CrosscutError) else f"{type(error).__name__}: {error}"
    return message.encode()[:_WORDS].decode(errors="ignore").encode() or b"an error without words"


def _exchange(mesh: Mesh, text: bytes) -> list[str]:
    """What each rank of the mesh says, by global rank."""
    mine = torch.frombuffer(bytearray(text.ljust(_WORDS, b"\0")), dtype=torch.uint8)
    words = mine.to(mesh.device).view(1, -1)
    for group in (mesh.tp, mesh.dp):
        words = all_gather(words, group, 0)
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in words.cpu()]
