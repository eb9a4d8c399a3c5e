"""Which implementation carries a collective, and why. Every choice can be asked: :func:`explain`.

A table maps each operation to size classes: up to so many bytes, this algorithm of crosscut's kernels; beyond the last
one, NCCL. Shipped tables are for NVLink hosts; ``crosscut tune`` measures a machine's own and keeps it in the cache
folder, where it takes precedence. Sizes are bytes of the whole tensor, as in a record.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosscut.env import cache_folder, settings
from crosscut.errors import UsageError
from crosscut.units import format_size
from crosscut.version import __version__

Classes = tuple[tuple[int, str], ...]
"""Ascending (largest size in bytes, algorithm)."""

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ALGORITHMS = dict.fromkeys(OPS, ("lanes", "blocks")) | {"all_reduce": ("lanes", "lanes_two_shot", "blocks", "blocks_two_shot")}
"""What the kernels have for each operation (kernels/exchange.py)."""

_ANY_SIZE = 1 << 62


@dataclass(frozen=True)
class Choice:
    """An implementation, ``nccl`` or ``crosscut`` with its algorithm, and the reason in words."""

    impl: str
    algorithm: str | None
    reason: str

    def __str__(self) -> str:
        return self.impl if self.algorithm is None else f"{self.impl}:{self.algorithm}"


@dataclass(frozen=True)
class Table:
    """Size classes of each operation, and where they come from."""

    classes: Mapping[str, Classes]
    origin: str

    def algorithm(self, op: str, nbytes: int) -> str | None:
        """The kernels' algorithm for ``nbytes``, None for NCCL."""
        classes = self.classes.get(op, ())
        place = bisect_left(classes, (nbytes, ""))
        return classes[place][1] if place < len(classes) else None


def shipped(world: int) -> Table:
    """The table for ``world`` ranks on NVLink where nothing has been measured.

    One-shot sends (n-1) S through a port in one crossing, two-shot 2 (n-1)/n S in two. With a crossing of d us and B GB/s
    they meet at S = d B / ((n-1) - 2 (n-1)/n): never for two ranks, about 380 KB for four and 110 KB for eight (d 1.9 us,
    B 330 GB/s on NVLink 4). The upper ends are where a mailbox is full or where NCCL's rate is known to be close.
    """
    kib = 1 << 10
    one_shot = {2: 1024, 3: 512, 4: 384, 5: 256, 6: 192, 7: 128}.get(world, 128) * kib
    two_shot: Classes = () if one_shot >= 512 * kib else ((512 * kib, "lanes_two_shot"),)
    moved = 256 * kib
    classes: dict[str, Classes] = {"all_reduce": ((one_shot, "lanes"), *two_shot)}
    classes |= dict.fromkeys(("all_gather", "reduce_scatter", "broadcast", "all_to_all"), ((moved, "lanes"),))
    return Table(classes, "shipped for NVLink, derived from its latency and rate; `crosscut tune` measures this machine")


def forced(world: int) -> Table:
    """Kernels for every size, for tests and trials (CROSSCUT_COLLECTIVES=kernels)."""
    classes = shipped(world).classes
    last = "blocks" if world == 2 else "blocks_two_shot"
    return Table(
        {op: (*found, (_ANY_SIZE, last if op == "all_reduce" else "blocks")) for op, found in classes.items()},
        "CROSSCUT_COLLECTIVES=kernels",
    )


def table_for(machine: Sequence[str], world: int) -> Table:
    """The table to use on ``machine`` (see :func:`tuned_path`): the tuned one if there is one, else the shipped one.

    Raises UsageError (``file-unreadable``) when the tuned one is damaged.
    """
    if settings().collectives == "kernels":
        return forced(world)
    path = tuned_path(machine, world)
    return _read(path) if os.path.exists(path) else shipped(world)  # Path.exists raises where it may not look


def _read(path: Path) -> Table:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        classes = {op: tuple((int(size), str(name)) for size, name in found) for op, found in data["classes"].items()}
        for op, found in classes.items():
            sizes, names = [size for size, _ in found], {name for _, name in found}
            if sizes != sorted(set(sizes)) or not names <= set(ALGORITHMS[op]):
                raise ValueError(f"classes of {op}: {found}")
        return Table(classes, f"measured on this machine on {data['measured']} ({path})")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"the table of measured sizes {str(path)!r} cannot be used: {type(error).__name__}: {error}",
            code="file-unreadable",
            fix="delete that file; then `crosscut tune` measures it anew, or without it the shipped table serves",
        ) from None


def tuned_path(machine: Sequence[str], world: int) -> Path:
    """Where the measured table of ``machine`` (device names, driver, torch and NCCL versions) lives."""
    key = hashlib.sha256("\0".join([*machine, str(world), __version__]).encode()).hexdigest()[:16]
    return cache_folder() / "tuned" / f"{key}.json"


def save_table(machine: Sequence[str], world: int, classes: Mapping[str, Classes], measured: str) -> Path:
    """Keep a measured table; ``measured`` is the date. Returns its path."""
    path = tuned_path(machine, world)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": list(machine), "world": world, "measured": measured, "classes": classes}, indent=1)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
    return path


def explain(op: str, nbytes: int, table: Table | None, backend: str, why_not: str) -> Choice:
    """The choice for ``nbytes`` of ``op`` with its reason. ``table`` None: the kernels are out, because of ``why_not``."""
    if backend == "none":
        return Choice("none", None, "a group of one does not communicate")
    if table is None:
        return Choice(backend, None, why_not)
    algorithm = table.algorithm(op, nbytes)
    classes = table.classes.get(op, ())
    if algorithm is None:
        reach = f"up to {format_size(classes[-1][0])}" if classes else "at no size"
        return Choice(backend, None, f"the kernels carry {op} {reach} here ({table.origin})")
    limit = next(size for size, name in classes if size >= nbytes)
    reach = "of any size" if limit == _ANY_SIZE else f"up to {format_size(limit)}"
    return Choice("crosscut", algorithm, f"{op} {reach} ({table.origin})")
