"""Saves that SIGKILL ends at a chosen moment, one forked child each: ``killed_saves.py FOLDER`` prints what was left as JSON.

A script of its own, because forking needs a process without threads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor

from crosscut.models import dcp, weights
from split_net import Net, alone, wholes


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def before_renaming(ending: str) -> Callable[[Any, Any], None]:
    """``os.rename`` that dies when it is to rename from or to a name with this ending."""

    def rename(source: Any, target: Any) -> None:
        die() if ending in (Path(source).suffix, Path(target).suffix) else honest_rename(source, target)

    return rename


def half(path: Path, entries: Any, tensors: Iterator[Tensor], notes: Any) -> None:
    def some() -> Iterator[Tensor]:
        for index, tensor in enumerate(tensors):
            if index == len(entries) // 2:
                die()
            yield tensor

    honest_stream(path, entries, some(), notes)


honest_stream, honest_rename = weights.write_stream, os.rename
MOMENTS: dict[str, tuple[Any, Any, str, Callable[..., Any]]] = {
    "safetensors, half written": (weights, weights, "write_stream", half),
    "safetensors, before the rename": (weights, os, "replace", die),
    "dcp, nothing of it written": (dcp, torch_dcp.FileSystemWriter, "write_data", die),
    "dcp, without metadata": (dcp, torch_dcp.FileSystemWriter, "finish", die),
    "dcp, before the renames": (dcp, os, "rename", before_renaming(".old")),
    "dcp, between the renames": (dcp, os, "rename", before_renaming(".part")),
}


def main(folder: str) -> None:
    found = {}
    for moment, (how, owner, name, replacement) in MOMENTS.items():
        mesh, path = alone(), Path(folder) / f"{how.__name__.rsplit('.', 1)[-1]}"
        old = Net(mesh, 1)
        how.save(old, path, mesh, notes={"step": "1"})
        child = os.fork()
        if child == 0:
            setattr(owner, name, replacement)
            how.save(Net(mesh, 2), path, mesh, notes={"step": "2"})
            os._exit(0)  # it was to be killed
        _, status = os.waitpid(child, 0)
        loaded = Net(mesh, 3)
        notes = how.load(loaded, path, mesh)
        equal = all(torch.equal(a, b) for a, b in zip(wholes(old, mesh).values(), wholes(loaded, mesh).values(), strict=True))
        how.save(Net(mesh, 4), path, mesh, notes={"step": "3"})  # what was left lying about is in nobody's way
        again = how.load(Net(mesh, 5), path, mesh)
        left = sorted(entry.name for entry in Path(folder).iterdir())
        found[moment] = [os.WTERMSIG(status) == signal.SIGKILL, notes, equal, again, left]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
