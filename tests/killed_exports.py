"""Saves of whole models that SIGKILL ends at a chosen moment, one forked child each: ``killed_exports.py FOLDER`` prints JSON.

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

from torch import Tensor

import zoo
from crosscut.distributed.mesh import make_mesh
from crosscut.models import save


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def half(path: Path, entries: Any, tensors: Iterator[Tensor], *rest: Any) -> None:
    def some() -> Iterator[Tensor]:
        for index, tensor in enumerate(tensors):
            if index == len(entries) // 2:
                die()
            yield tensor

    honest_stream(path, entries, some(), *rest)


def then_die(action: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (action(*args), die())


honest_stream = save.write_stream
MOMENTS: dict[str, tuple[str, Callable[..., Any], int]] = {
    "half of a file written": ("write_stream", half, 0),
    "all files written": ("_write_configs", die, 0),
    "before the exchange": ("_replace", die, 0),
    "after the exchange": ("_exchange", then_die(save._exchange), 1),
}
"""Which function of ``save`` dies, how, and which of the two models is there afterwards."""


def contents(folder: Path) -> dict[str, int]:
    return {path.name: hash(path.read_bytes()) for path in folder.iterdir()}


def main(folder: Path) -> None:
    mesh, found = make_mesh(device="cpu"), {}
    models = [zoo.model("llama-6q3kv", seed=seed) for seed in (0, 1)]
    for seed, model in enumerate(models):
        save.save_pretrained(model, folder / str(seed), mesh, max_shard_size="60KB")
    whole = [contents(folder / str(seed)) for seed in (0, 1)]
    for moment, (name, replacement, left) in MOMENTS.items():
        save.save_pretrained(models[0], folder / "model", mesh, max_shard_size="60KB")
        child = os.fork()
        if child == 0:
            setattr(save, name, replacement)
            save.save_pretrained(models[1], folder / "model", mesh, max_shard_size="60KB")
            os._exit(0)  # it was to be killed
        _, status = os.waitpid(child, 0)
        killed, equal = os.WTERMSIG(status) == signal.SIGKILL, contents(folder / "model") == whole[left]
        save.save_pretrained(models[1], folder / "model", mesh, max_shard_size="60KB")  # what is left is in nobody's way
        again = contents(folder / "model") == whole[1]
        found[moment] = [killed, equal, again, sorted(path.name for path in folder.iterdir())]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
