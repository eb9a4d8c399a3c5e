"""Single tensors of a Hugging Face directory, read without loading the rest.

A benchmark wants one real weight, and a rank wants its own rows of one; a checkpoint of many gigabytes should not pass
through memory for either. Reads ``model.safetensors``, or the files that ``model.safetensors.index.json`` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from crosscut.errors import UsageError, nearest
from crosscut.models.stream import DTYPES
from crosscut.sharding.headers import INDEX, SINGLE, find_files

__all__ = ["INDEX", "SINGLE", "Checkpoint", "parse_source"]


@dataclass(frozen=True)
class Checkpoint:
    """Where each parameter of a Hugging Face directory lies. Made by :meth:`open`; holds no file open.

    Every method that takes a name raises UsageError ``parameter-missing`` when the checkpoint has none of that name,
    and ``file-unreadable`` when its file is truncated, damaged or gone.
    """

    directory: Path
    files: dict[str, Path]
    """Parameter name -> the safetensors file that holds it."""

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Find the parameters of ``directory``; reads headers, no tensor.

        Raises UsageError ``file-missing`` (no directory, no safetensors in it, or a file that the index names is not
        there) and ``file-unreadable``.
        """
        files: dict[str, Path] = {}
        for path, names in find_files(directory).items():
            if names is None:
                with _opened(path) as file:
                    names = list(file.keys())
            files |= dict.fromkeys(names, path)
        return cls(Path(directory), files)

    def names(self) -> list[str]:
        """All parameter names, sorted."""
        return sorted(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of parameter ``name``."""
        with self._file_of(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of parameter ``name``. Raises UsageError ``bad-dtype`` when PyTorch has no such dtype."""
        with self._file_of(name) as file:
            stored = file.get_slice(name).get_dtype()
        if stored not in DTYPES:
            raise UsageError(
                f"the parameter {name!r} is stored as {stored}, which crosscut does not read",
                code="bad-dtype",
                fix=f"save it as one of: {', '.join(DTYPES)}",
            )
        return DTYPES[stored]

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Parameter ``name``, or its ``rows`` along dim 0 (Python's rules for slices; step 1), on the CPU.

        Raises UsageError ``bad-shape`` when rows of a scalar are asked for, ``bad-option`` for another step.
        """
        with self._file_of(name) as file:
            if rows is None:
                return file.get_tensor(name)
            part = file.get_slice(name)
            start, stop, step = rows.indices(_rows(name, part))
            if step != 1:
                raise UsageError(f"rows with the step {step} were asked for", code="bad-option", fix="use the step 1")
            return part[start:stop]

    def gather(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ``name`` [V, ...] that ``ids`` [T] (int64) names, in that order: [T, ...]. Reads each row once.

        Raises UsageError ``bad-shape`` when an id is below 0 or not below V, and when ``name`` is a scalar.
        """
        unique, inverse = torch.unique(ids, return_inverse=True)
        with self._file_of(name) as file:
            part = file.get_slice(name)
            count = _rows(name, part)
            if not unique.numel() or unique[0] < 0 or unique[-1] >= count:
                given = f"{int(unique[0])} to {int(unique[-1])}" if unique.numel() else "none"
                raise UsageError(
                    f"the parameter {name!r} has the rows 0 to {count - 1}; asked for: {given}",
                    code="bad-shape",
                    fix="check that the tokenizer and the weights are of the same model",
                )
            found = torch.cat([part[row : row + 1] for row in unique.tolist()])
        return found[inverse]

    @contextmanager
    def _file_of(self, name: str) -> Iterator[Any]:
        if name not in self.files:
            raise UsageError(
                f"{str(self.directory)!r} has no parameter {name!r}{nearest(name, self.files)}",
                code="parameter-missing",
                fix=f"use one of its {len(self.files)} parameters, for example {min(self.files, default='(none)')}",
            )
        with _opened(self.files[name]) as file:
            yield file


def parse_source(text: str) -> tuple[Path, str]:
    """``DIR:PARAM`` as (directory, parameter name). The last ':' splits, so that DIR may hold some.

    Raises UsageError ``bad-option`` when there is no ':' or nothing on one of its sides.
    """
    directory, _, parameter = text.rpartition(":")
    if not directory or not parameter:
        raise UsageError(
            f"{text!r} does not name a parameter of a checkpoint",
            code="bad-option",
            fix="write DIR:PARAM, for example ./Llama-3-8B:model.layers.0.mlp.up_proj.weight",
        )
    return Path(directory), parameter


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The safetensors file ``path``, memory-mapped; what is wrong with it becomes UsageError ``file-unreadable``."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read as safetensors: {error}",
            code="file-unreadable",
            fix="check that the download is complete, or download the file again",
        ) from None


def _rows(name: str, part: Any) -> int:
    shape = part.get_shape()
    if not shape:
        raise UsageError(f"the parameter {name!r} is a scalar and has no rows", code="bad-shape", fix="read it whole")
    return int(shape[0])
