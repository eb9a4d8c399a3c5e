"""A split model in and out of torch.distributed.checkpoint (DCP): a folder to which each rank writes its own blocks.

No rank gathers anything. A plain DTensor cannot say what a rank holds here: rows of gate and of up, heads of q, k and v, KV
heads that ranks share, uneven parts. So each parameter is given to DCP as blocks with their places in the whole (its
protocol of ``__create_write_items__``, ``__create_chunk_list__`` and ``__get_tensor_shard__``). The folder then holds whole
parameters under the model's names, in torch's own layout: ``model``, and ``optimizer`` with ``state`` and ``param_groups``
as ``torch.distributed.checkpoint.state_dict`` has them. Any tool that reads DCP reads it, any tp and dp load it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from crosscut.collectives import all_reduce
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers.placed import Box, Placed
from crosscut.models.agree import together
from crosscut.models.stream import file_sum, refuse_fixed
from crosscut.models.training_state import make_state, refuse_damage, refuse_mismatch, state_tensors

SUMS = "crosscut.json"
"""Beside DCP's own files: the notes, and size and CRC-32 of each file. DCP does not look at it."""


class Blocks(Tensor):
    """A tensor of the whole shape with this rank's blocks behind it, for DCP and for nothing else."""

    _place: Placed
    _boxes: dict[torch.Size, Box]

    @staticmethod
    def __new__(cls, placed: Placed, group: Group) -> Blocks:
        own = placed.own
        blocks: Blocks = Tensor._make_wrapper_subclass(cls, placed.shape, dtype=own.dtype, device=own.device)
        blocks._place = placed
        blocks._boxes = {_chunk(box).offsets: box for box in placed.boxes(group)}
        return blocks

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise TypeError(f"{func}: these blocks can be given to torch.distributed.checkpoint.save and load, not computed with")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Blocks({self._place.name}, {list(self.shape)}, {[list(offset) for offset in self._boxes]})"

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self._place.own), self.size()
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=size),
            )
            for offsets, box in self._boxes.items()
            if box.first
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._place.own[self._boxes[index.offset].own]


def _chunk(box: Box) -> ChunkStorageMetadata:
    offsets = torch.Size([part.start for part in box.whole])
    return ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([part.stop - part.start for part in box.whole]))


def state_dict(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What to give to ``torch.distributed.checkpoint.save`` or ``load`` yourself; loading fills model and optimizer in place.

    An optimizer that has not made a step has no state: :func:`load` makes it one first. Its ``param_groups`` (lr, ...) are
    there for torch's own loader; loading into this dict does not set them.
    """
    whole: dict[str, Any] = {"model": {}}
    if optimizer is not None:
        whole["optimizer"] = {"state": {}, "param_groups": []}
    names: dict[int, str] = {}
    for key, placed in state_tensors(model, mesh, optimizer):
        if key:
            whole["optimizer"]["state"].setdefault(placed.name, {})[key] = Blocks(placed, mesh.tp)
        else:
            whole["model"][placed.name] = Blocks(placed, mesh.tp)
            names[id(placed.local)] = placed.name
    for group in [] if optimizer is None else optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        whole["optimizer"]["param_groups"].append({"params": [names[id(p)] for p in group["params"]], **options})
    return whole


def save(
    model: nn.Module,
    path: str | Path,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | None = None,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write ``model``, and the state of ``optimizer``, to the folder ``path``, which all ranks must see. A collective call.

    An older checkpoint of that name is replaced at the end: a save that is interrupted leaves it whole, as ``path`` or,
    between two renames, as ``.NAME.old``, which :func:`load` finds. Raises UsageError: ``file-missing`` when the folder
    around it does not exist, ``bad-option`` when ``path`` is something else than a checkpoint, or the optimizer is not this
    model's.
    """
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name}.part")
    together(mesh, lambda: _refuse_target(target))
    state = together(mesh, lambda: state_dict(model, mesh, optimizer))
    try:
        _on_first_rank(mesh, lambda: shutil.rmtree(temporary, ignore_errors=True))
        with _quiet(mesh):
            torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(temporary))
        sums = _sums(temporary, mesh)
        _on_first_rank(mesh, lambda: _finish(temporary, target, sums, notes or {}))
    finally:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def load(
    model: nn.Module, path: str | Path, mesh: Mesh, optimizer: torch.optim.Optimizer | None = None, check: bool = True
) -> dict[str, str]:
    """Fill ``model``, and the state of ``optimizer``, from the folder ``path``; returns the notes that were saved with it.

    Each rank reads its own blocks, converted to the dtype that the model has. Reads what other programs saved with DCP in
    torch's layout too, without notes and checksums. ``check``: compare all checksums first, each rank of the world a share.
    DCP keeps its metadata as a pickle, so load what you trust. A collective call.
    Raises UsageError before anything is changed: ``file-missing``, ``file-unreadable`` (damaged files are named),
    ``parameter-missing`` (it lacks a parameter, or has one that the model lacks), ``bad-size`` (another shape).
    """
    source = together(mesh, lambda: _source(Path(path).resolve()))
    notes = _check_sums(source, mesh, check)
    if optimizer is not None:
        make_state(optimizer)
    state = together(mesh, lambda: state_dict(model, mesh, optimizer))
    wanted = {f"model.{name}": blocks._place for name, blocks in state["model"].items()}
    if optimizer is not None:
        del state["optimizer"]["param_groups"]
        for name, entries in state["optimizer"]["state"].items():
            wanted |= {f"optimizer.state.{name}.{key}": blocks._place for key, blocks in entries.items()}
    roots = tuple("model." if key == "model" else "optimizer.state." for key in state)
    together(mesh, lambda: refuse_mismatch(source, _stored(source, roots), wanted))
    with _quiet(mesh):
        torch_dcp.load(state, storage_reader=torch_dcp.FileSystemReader(source))
    return notes


def _on_first_rank(mesh: Mesh, action: Callable[[], None]) -> None:
    """Run ``action`` on the first rank while the others wait."""
    together(mesh, lambda: action() if mesh.rank == 0 else None)


@contextmanager
def _quiet(mesh: Mesh) -> Iterator[None]:
    """Without DCP's warning that one rank without a process group saves alone."""
    if mesh.world_size > 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _refuse_target(target: Path) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", code="file-missing", fix="create it first")
    refuse_fixed(target)
    ours = not target.exists() or (target.is_dir() and all(_is_part(entry) for entry in target.iterdir()))
    if not ours:
        raise UsageError(
            f"{str(target)!r} is there and is not a checkpoint alone; saving would remove it",
            code="bad-option",
            fix="give the name of a new folder, or of a checkpoint to replace",
        )


def _is_part(file: Path) -> bool:
    return file.suffix == ".distcp" or file.name in (".metadata", SUMS)


def _sums(folder: Path, mesh: Mesh) -> dict[str, list[int]]:
    """Size and CRC-32 of each file, each rank reading the one that it wrote."""
    table = torch.zeros((mesh.world_size, 2), dtype=torch.int64, device=mesh.device)
    table[mesh.rank] = torch.tensor(together(mesh, lambda: file_sum(folder / _file_of(mesh.rank))))
    table = all_reduce(all_reduce(table, mesh.tp), mesh.dp)
    return {_file_of(rank): sums for rank, sums in enumerate(table.tolist())}


def _file_of(rank: int) -> str:
    """What DCP's FileSystemWriter calls the one file of a rank."""
    return f"__{rank}_0.distcp"


def _finish(new: Path, target: Path, sums: Mapping[str, list[int]], notes: Mapping[str, str]) -> None:
    """Put ``new`` in the place of ``target``. A folder cannot be replaced in one step, so the old one steps aside first."""
    with (new / SUMS).open("w", encoding="utf-8") as out:
        files = {**sums, ".metadata": list(file_sum(new / ".metadata"))}
        json.dump({"notes": dict(notes), "files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    if target.exists():
        shutil.rmtree(_old(target), ignore_errors=True)
        os.rename(target, _old(target))
    os.rename(new, target)
    shutil.rmtree(_old(target), ignore_errors=True)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _source(target: Path) -> Path:
    for folder in (target, _old(target)):
        if (folder / ".metadata").is_file():
            return folder
    raise UsageError(
        f"there is no checkpoint {str(target)!r} (a folder with .metadata)", code="file-missing", fix="check the path"
    )


def _check_sums(source: Path, mesh: Mesh, check: bool) -> dict[str, str]:
    """Compare sizes and checksums, where they were kept; returns the notes."""
    notes, wrong = together(mesh, lambda: _wrong(source, mesh, check))
    found = torch.tensor([len(wrong)], device=mesh.device)
    refuse_damage(source, wrong, int(all_reduce(all_reduce(found, mesh.tp), mesh.dp)))
    return notes


def _wrong(source: Path, mesh: Mesh, check: bool) -> tuple[dict[str, str], list[str]]:
    """The notes, and which files of this rank's share are not those that were saved."""
    if not (source / SUMS).is_file():
        return {}, []
    try:
        kept = json.loads((source / SUMS).read_text(encoding="utf-8"))
        notes, files = dict(kept["notes"]), sorted(kept["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{str(source / SUMS)!r} cannot be read: {error}", code="file-unreadable", fix="use another checkpoint"
        ) from None
    own = files[mesh.rank :: mesh.world_size] if check else []
    return notes, [name for name, sums in own if not (source / name).is_file() or list(file_sum(source / name)) != sums]


def _stored(source: Path, roots: tuple[str, ...]) -> dict[str, torch.Size]:
    """The shapes of all tensors that a checkpoint holds under ``roots``."""
    try:
        entries = torch_dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle can raise anything
        raise UsageError(
            f"{str(source / '.metadata')!r} cannot be read: {error}", code="file-unreadable", fix="use another checkpoint"
        ) from None
    found = {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: shape for name, shape in found.items() if name.startswith(roots)}
