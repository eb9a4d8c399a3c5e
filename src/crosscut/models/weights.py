"""A split model in and out of one plain safetensors file: the whole parameters under the model's own names.

Saving gathers one parameter at a time, so no rank holds the whole model; loading reads each rank's own rows or columns. A
file saved at one tp loads at any other, the optimizer's state too. A save replaces the file at its end in one step: an
interrupted one leaves the old file as it was. Checksums of all tensors are compared on load, each rank taking its share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from crosscut.collectives import all_reduce, barrier
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError, nearest
from crosscut.layers.replicas import Placed, placed_parameters
from crosscut.layers.shards import gather
from crosscut.models.stream import Entry, damaged, write_stream
from crosscut.sharding import Cut


@dataclass(frozen=True)
class _Part:
    """One tensor to save or load: its name in the file, this rank's part of it, its cut and whole shape."""

    name: str
    local: Tensor
    cut: Cut
    shape: tuple[int, ...]


def save(
    model: nn.Module,
    path: str | Path,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | None = None,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write the parameters of ``model``, and the state of ``optimizer``, to the file ``path``. A collective call.

    State that has a parameter's shape (AdamW's moments) is cut like it; other tensors (the step) are taken from the first
    rank. ``notes``: words to keep in the file, such as the step of training. Raises UsageError (``file-missing``) when the
    folder does not exist; then nothing has been written.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", code="file-missing", fix="create it first")
    parts = list(_parts(model, optimizer))
    entries: list[Entry] = [(part.name, part.local.dtype, part.shape) for part in parts]
    wholes = (gather(part.local, part.cut, part.shape, mesh.tp) for part in parts)
    if mesh.rank == 0:
        temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            write_stream(temporary, entries, wholes, notes)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    else:
        for _ in wholes:
            pass
    barrier(mesh.tp)
    barrier(mesh.dp)
    return target


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
    if not source.is_file():
        raise UsageError(f"there is no file {str(source)!r}", code="file-missing", fix="check the path")
    _refuse_damage(source, mesh.tp, check)
    if optimizer is not None:
        _make_state(optimizer)
    parts = {part.name: part for part in _parts(model, optimizer)}
    with safe_open(source, framework="pt") as file, torch.no_grad():
        _refuse_mismatch(source, file, parts, optimizer is not None)
        for part in parts.values():
            part.local.copy_(_own(file, part, mesh.tp))
        notes = dict(file.metadata() or {})
    return {key: value for key, value in notes.items() if key not in ("format", "crc32")}


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[_Part]:
    placed = list(placed_parameters(model))
    for parameter in placed:
        yield _Part(parameter.name, parameter.local, parameter.cut, parameter.shape)
    if optimizer is None:
        return
    for parameter in placed:
        for key, value in sorted(optimizer.state.get(parameter.local, {}).items()):
            if isinstance(value, Tensor):
                yield _state(parameter, key, value)


def _state(parameter: Placed, key: str, value: Tensor) -> _Part:
    name = f"optimizer.{key}.{parameter.name}"
    if value.shape == parameter.local.shape:
        return _Part(name, value, parameter.cut, parameter.shape)
    return _Part(name, value, Cut(None), tuple(value.shape))


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state: a step without change, on gradients of zero."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p, p.grad, p.detach().clone()) for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, grad, value in kept:
            parameter.copy_(value)
            parameter.grad = grad


def _own(file: Any, part: _Part, group: Group) -> Tensor:
    """This rank's part of a stored tensor, no more of it read."""
    if part.cut.dim is None or group.size == 1:
        whole: Tensor = file.get_tensor(part.name)
        return whole
    stored, before = file.get_slice(part.name), (slice(None),) * part.cut.dim
    places = [(*before, piece.full) for piece in part.cut.pieces(part.shape, group.size, group.rank)]
    return torch.cat([stored[place] for place in places], part.cut.dim)


def _refuse_damage(source: Path, group: Group, check: bool) -> None:
    wrong = damaged(source, group.rank, group.size) if check else []
    total = int(all_reduce(torch.tensor([len(wrong)], device=group.device), group).item())
    if total:
        which = f"{wrong[0]!r} and {total - 1} more" if wrong else f"{total}, read by another rank,"
        raise UsageError(
            f"{str(source)!r} is damaged: the bytes of {which} are not those that were saved",
            code="file-unreadable",
            fix="use another checkpoint; the disk or the copy is bad",
        )


def _refuse_mismatch(source: Path, file: Any, parts: Mapping[str, _Part], with_state: bool) -> None:
    stored = {name for name in file.keys() if with_state or not name.startswith("optimizer.")}  # noqa: SIM118
    for name in parts:
        if name not in stored:
            raise UsageError(
                f"{str(source)!r} has no {name!r}{nearest(name, stored)}",
                code="parameter-missing",
                fix="load it into the model that it was saved from; without optimizer if it was saved without one",
            )
    extra = sorted(stored - set(parts))
    if extra:
        raise UsageError(
            f"{str(source)!r} has {extra[0]!r}{f' and {len(extra) - 1} more' if len(extra) > 1 else ''}, the model has not",
            code="parameter-missing",
            fix="load it into the model that it was saved from",
        )
    for name, part in parts.items():
        shape = tuple(file.get_slice(name).get_shape())
        if shape != part.shape:
            raise UsageError(
                f"{name!r} is {list(shape)} in {str(source)!r} and {list(part.shape)} in the model",
                code="bad-size",
                fix="build the model with the sizes that it was saved with",
            )
