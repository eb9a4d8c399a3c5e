"""A split model in and out of one plain safetensors file: the whole parameters under the model's own names.

Saving gathers one parameter at a time, so no rank holds the whole model; loading reads each rank's own rows or columns. A
file saved on one arrangement of ranks (tp, dp, with FSDP2 or without) loads on any other, the optimizer's state too. A save
replaces the file at its end in one step: an interrupted one leaves the old file as it was. Checksums of all tensors are
compared on load, each rank taking its share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from crosscut.collectives import all_reduce
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers.placed import Placed
from crosscut.models.agree import agree, together
from crosscut.models.stream import Entry, damaged, write_stream
from crosscut.models.training_state import make_state, refuse_damage, refuse_mismatch, state_tensors


def save(
    model: nn.Module,
    path: str | Path,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | None = None,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write the parameters of ``model``, and the state of ``optimizer``, to the file ``path``. A collective call.

    State that has a parameter's shape (AdamW's moments) is cut like it; other tensors (the step) are taken from the first
    rank. ``notes``: words to keep in the file, such as the step of training. Raises UsageError: ``file-missing`` when the
    folder does not exist (then nothing has been written), ``bad-option`` when ``path`` is a folder or the optimizer is not
    this model's. What the
    first rank's disk refuses is an OSError there and a RankError on the other ranks: none is left waiting.
    """
    target = Path(path).absolute()
    parts = together(mesh, lambda: _checked(target, model, mesh, optimizer))
    entries: list[Entry] = [(part.name, part.local.dtype, part.shape) for part in parts]
    wholes = (part.whole(mesh.tp) for part in parts)
    failed: OSError | None = None
    if mesh.rank == 0:
        failed = _write(target, entries, wholes, notes)
    for _ in wholes:  # the other ranks' part, and after a failure the first rank's: all gather all
        pass
    agree(mesh, failed)
    return target


def _checked(target: Path, model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer | None) -> list[Placed]:
    if not target.parent.is_dir():
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", code="file-missing", fix="create it first")
    if target.is_dir():
        raise UsageError(f"{str(target)!r} is a folder", code="bad-option", fix="give the name of a file")
    return list(_parts(model, mesh, optimizer))


def _write(target: Path, entries: list[Entry], wholes: Iterator[Tensor], notes: Mapping[str, str] | None) -> OSError | None:
    temporary = target.with_name(f".{target.name}.part")
    try:
        write_stream(temporary, entries, wholes, notes)
        os.replace(temporary, target)
    except OSError as error:
        return error
    finally:
        temporary.unlink(missing_ok=True)
    return None


def load(
    model: nn.Module, path: str | Path, mesh: Mesh, optimizer: torch.optim.Optimizer | None = None, check: bool = True
) -> dict[str, str]:
    """Fill ``model``, and the state of ``optimizer``, from the file ``path``; returns the notes that were saved with it.

    Each rank reads its own part of each tensor, converted to the dtype that the model has. ``check``: also compare all
    checksums, which reads the whole file once, each rank of the tp group a share. A collective call.
    Raises UsageError before anything is changed: ``file-missing``, ``file-unreadable`` (damaged tensors are named),
    ``parameter-missing`` (the file lacks a parameter, or has one that the model lacks), ``bad-size`` (another shape).
    """
    source = Path(path)
    wrong = together(mesh, lambda: _damaged(source, mesh.tp, check))
    refuse_damage(source, wrong, int(all_reduce(torch.tensor([len(wrong)], device=mesh.device), mesh.tp)))
    return together(mesh, lambda: _fill(model, source, mesh, optimizer))


def _fill(model: nn.Module, source: Path, mesh: Mesh, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    if optimizer is not None:
        make_state(optimizer)
    parts = {part.name: part for part in _parts(model, mesh, optimizer)}
    with safe_open(source, framework="pt") as file, torch.no_grad():
        stored = [name for name in file.keys() if optimizer is not None or not name.startswith("optimizer.")]  # noqa: SIM118
        refuse_mismatch(source, {name: file.get_slice(name).get_shape() for name in stored}, parts)
        for part in parts.values():
            _read(file, part, mesh.tp)
        notes = dict(file.metadata() or {})
    return {key: value for key, value in notes.items() if key not in ("format", "crc32")}


def _parts(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer | None) -> Iterator[Placed]:
    """All tensors of the file under their names in it."""
    for key, placed in state_tensors(model, mesh, optimizer):
        yield placed.like(placed.local, f"optimizer.{key}.{placed.name}") if key else placed


def _read(file: Any, part: Placed, group: Group) -> None:
    """Fill this rank's own part from the file, no more of it read."""
    if not part.shape:
        part.own.copy_(file.get_tensor(part.name))
        return
    stored = file.get_slice(part.name)
    for box in part.boxes(group):
        part.own[box.own].copy_(stored[box.whole])


def _damaged(source: Path, group: Group, check: bool) -> list[str]:
    if not source.is_file():
        raise UsageError(f"there is no file {str(source)!r}", code="file-missing", fix="check the path")
    return damaged(source, group.rank, group.size) if check else []
