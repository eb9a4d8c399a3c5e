"""A whole model from the ranks that share it to a Hugging Face directory: the safetensors that it was loaded from.

Parameters are gathered one stored tensor at a time and written by the first rank, so no rank holds the model. The directory
is written beside the old one and takes its place at the end.
"""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers.shards import gather
from crosscut.models.adapters import core_of
from crosscut.models.agree import agree, together
from crosscut.models.layout import DEFAULT_SHARD, Layout, transformers_layout
from crosscut.models.slots import Slot, slots_of, tensors_of
from crosscut.models.stream import refuse_fixed, write_stream
from crosscut.sharding.headers import INDEX


def save_pretrained(model: Any, directory: str | Path, mesh: Mesh, max_shard_size: int | str | None = None) -> Path:
    """Write ``model``, split over ``mesh`` or whole, to ``directory`` as safetensors that any tool reads. A collective call.

    What :func:`crosscut.from_pretrained` loaded whole is divided into files, named and ordered as it was there. With
    ``max_shard_size`` (bytes, or ``'5GB'``), and for other models, as transformers' ``save_pretrained`` does it, which puts at
    most 50GB into a file. config.json and generation_config.json are written too; other files of the directory (a
    tokenizer) stay. The dtype is the model's own.

    An interrupted save leaves the old directory whole. Raises UsageError: ``file-missing`` (no parent folder), ``bad-option``
    (a PEFT model, a file in the way, a folder that cannot be replaced, a wrong size or generation_config),
    ``parameter-missing`` (names that cannot be told). What the first rank's disk refuses is an OSError there and a RankError
    on the others.
    """
    target, error = Path(directory).resolve(), None
    layout, slots = together(mesh, lambda: _ready(model, target, mesh, max_shard_size))
    wholes = _wholes(slots, layout, mesh)
    if mesh.rank == 0:
        try:
            _write(model, target, layout, slots, wholes)
        except Exception as raised:
            error = raised
    for _ in wholes:  # the other ranks' part, and after a failure the first rank's: all gather all
        pass
    agree(mesh, error)
    return target


def _ready(model: Any, target: Path, mesh: Mesh, max_shard_size: int | str | None) -> tuple[Layout, dict[str, Slot]]:
    """The files to write and what of this rank goes into them; raises where the save could not be finished."""
    layout = _layout(model, max_shard_size)
    slots = {slot.stored: slot for slot in _slots(model, layout, mesh)}
    _check(model, target)
    return layout, slots


def _layout(model: Any, max_shard_size: int | str | None) -> Layout:
    if core_of(model) is not model:
        raise UsageError(
            "the model has PEFT adapters, which the original files have no place for",
            code="bad-option",
            fix="model.save_pretrained(folder) writes the adapters; or save what model.merge_and_unload() returns",
        )
    loaded: Layout | None = getattr(model, "loaded_layout", None)
    if loaded is not None and max_shard_size is None:
        return loaded
    return transformers_layout(model, DEFAULT_SHARD if max_shard_size is None else max_shard_size)


def _slots(model: Any, layout: Layout, mesh: Mesh) -> list[Slot]:
    return slots_of(tensors_of(model), layout.names, layout.family, mesh.tp, "the table of names")


def _check(model: Any, target: Path) -> None:
    """Refuse what could not be finished, before anything is gathered."""
    if not target.parent.is_dir():
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", code="file-missing", fix="create it first")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{str(target)!r} is a file", code="bad-option", fix="give the name of a folder")
    refuse_fixed(target)
    try:
        if model.can_generate():
            model.generation_config.validate(strict=True)
    except ValueError as error:
        raise UsageError(
            f"transformers does not write the model's generation_config: {error}",
            code="bad-option",
            fix="correct model.generation_config",
        ) from None


def _wholes(slots: dict[str, Slot], layout: Layout, mesh: Mesh) -> Iterator[Tensor]:
    """Every stored tensor, whole, in the order of the files."""
    shards: dict[str, Tensor] = {}
    for file in layout.files:
        for name in file.tensors:
            slot = slots[name]
            if slot.target.spread:  # over dp: gathered once, though the experts of a layer are many tensors
                shards = shards if slot.target.name in shards else {slot.target.name: slot.target.shard()}
                shard = shards[slot.target.name]
            else:
                shard = slot.target.shard()
            yield gather(slot.own(shard), slot.cut, slot.shape, mesh.tp)


# ---- the first rank


def _write(model: Any, target: Path, layout: Layout, slots: dict[str, Slot], wholes: Iterator[Tensor]) -> None:
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        total = 0
        for file in layout.files:
            entries = [(name, _dtype(model, layout, slots[name]), slots[name].shape) for name in file.tensors]
            total += sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in entries)
            metadata = {key: value for key, value in file.metadata.items() if key != "format"}
            tensors = (next(wholes).to(dtype) for _, dtype, _ in entries)
            write_stream(part / file.name, entries, tensors, metadata, file.checksums)
        if layout.index is not None:
            _write_index(part / INDEX, layout, total)
        _write_configs(model, part)
        if target.exists():
            _keep_others(target, part, layout)
        _replace(target, part)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _dtype(model: Any, layout: Layout, slot: Slot) -> torch.dtype:
    return layout.dtype_of(slot.stored, slot.target.local.dtype, model.dtype)


def _write_index(path: Path, layout: Layout, total: int) -> None:
    assert layout.index is not None
    metadata = {**layout.index, "total_size": total}
    files = {name: file.name for file in layout.files for name in file.tensors}
    path.write_text(json.dumps({"metadata": metadata, "weight_map": files}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_configs(model: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _keep_others(old: Path, new: Path, layout: Layout) -> None:
    """What is no weight and is not written anew is in the new folder, too: linked, so it takes no room and no time."""
    for path in old.iterdir():
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if weights or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, new / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def _replace(target: Path, new: Path) -> None:
    """Put ``new`` in the place of ``target``, in one step where the system can exchange two folders (Linux)."""
    if not target.exists():
        os.rename(new, target)
    elif not _exchange(target, new):
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        os.rename(new, target)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """renameat2(2) with RENAME_EXCHANGE; False where the system or the file system has no such thing."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
