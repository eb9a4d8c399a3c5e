"""Which file of a checkpoint holds which tensor, in what order: as it was loaded, or as transformers would save it.

Order of the bytes in a file: safetensors sorts by alignment (its dtypes in falling order), then by name (serialize in
github.com/huggingface/safetensors). Names, and the division into files, are asked of transformers and huggingface_hub.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.errors import UsageError
from crosscut.layers.placed import placed_parameters
from crosscut.models import import_extra
from crosscut.models.slots import tensors_of
from crosscut.models.stream import DTYPES, NAMES
from crosscut.sharding import FAMILIES, Family
from crosscut.sharding.describe import Tensor as Described
from crosscut.sharding.headers import INDEX, SINGLE

DEFAULT_SHARD = "50GB"
"""What transformers 5 puts into one file at most."""
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")


@dataclass(frozen=True)
class File:
    """One safetensors file. ``tensors``: stored names in the order of their bytes."""

    name: str
    tensors: tuple[str, ...]
    metadata: Mapping[str, str]
    checksums: bool = False


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint. ``names``: stored names by the names in the model's spelling. ``index``: its metadata."""

    files: tuple[File, ...]
    names: Mapping[str, str]
    family: Family | None
    index: Mapping[str, Any] | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """What each was stored in, where it was loaded."""

    def dtype_of(self, stored: str, own: torch.dtype, models: torch.dtype) -> torch.dtype:
        """The dtype to save in: the tensor's ``own``, unless the model alone keeps it in a wider one than its file did."""
        return models if self.dtypes.get(stored) == models else own


def loaded_layout(directory: Path, tensors: Sequence[Described], family: Family) -> Layout:
    """The layout of the checkpoint in ``directory``, as far as its ``tensors`` are loaded."""
    by_file: dict[Path, list[tuple[int, str]]] = {}
    for tensor in tensors:
        assert tensor.stored is not None
        by_file.setdefault(tensor.stored.file, []).append((tensor.stored.start, tensor.stored.name))
    files = []
    for path, found in sorted(by_file.items()):
        metadata = _metadata(path)
        sums = metadata.pop("crc32", None) is not None
        files.append(File(path.name, tuple(name for _, name in sorted(found)), metadata, sums))
    index = directory / INDEX
    divided = index.is_file() and not (directory / SINGLE).is_file()
    kept = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}) if divided else None
    names = {tensor.place.name: tensor.stored.name for tensor in tensors if tensor.stored}
    dtypes = {tensor.stored.name: DTYPES[tensor.stored.dtype] for tensor in tensors if tensor.stored}
    return Layout(tuple(files), names, family, kept, dtypes)


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return dict(json.loads(file.read(length)).get("__metadata__") or {})


def transformers_layout(model: Any, max_shard_size: int | str) -> Layout:
    """The layout in which transformers saves the unsplit ``model``. Raises UsageError (``bad-option``) for a wrong size."""
    whole = {placed.name: (placed.shape, placed.local.dtype) for placed in tensors_of(model)}
    state = {
        name: torch.empty(whole[name][0], dtype=whole[name][1], device="meta")
        for name in model.state_dict(keep_vars=True)
        if name in whole and name not in (getattr(model, "_keys_to_ignore_on_save", None) or ())
    }
    state = _as_stored(model, state)
    try:
        division = import_extra("huggingface_hub").split_state_dict_into_shards_factory(
            state,
            filename_pattern=SINGLE.replace(".safetensors", "{suffix}.safetensors"),
            max_shard_size=max_shard_size,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # experts that are views of one stay in one file
        )
    except ValueError as error:
        raise UsageError(str(error), code="bad-option", fix="give a number of bytes, or a size such as '5GB'") from None
    files = [
        File(name, tuple(sorted(tensors, key=lambda key: (_ORDER.index(NAMES[state[key].dtype]), key))), {"format": "pt"})
        for name, tensors in division.filename_to_tensors.items()
    ]
    family = FAMILIES.find(model.config.model_type)
    names = {family.name_in_model(name) if family else name: name for name in state}
    count = sum(torch.Size(placed.shape).numel() for placed in placed_parameters(model))
    index = {"total_parameters": count, **division.metadata} if division.is_sharded else None
    return Layout(tuple(files), names, family, index)


def _as_stored(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names and in the parts that checkpoints have, in transformers' order."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # transformers 4 stores what its models have
        return state
    reverted: dict[str, Tensor] = loading.revert_weight_conversion(model, state)
    return reverted
