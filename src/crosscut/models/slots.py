"""Which tensor of a checkpoint is which part of which parameter of a split model: one table to load by and to save by.

Most are one parameter each. The experts of a layer are one parameter ``[E, ...]`` in the model and lie one by one on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError
from crosscut.layers.placed import Placed, placed_parameters
from crosscut.sharding import Column, Cut, Family, Replicated, Row


@dataclass(frozen=True)
class Slot:
    """The tensor ``stored`` of a checkpoint, whole of ``shape`` and cut by ``cut``, and its place in a tensor of the model."""

    stored: str
    target: Placed
    cut: Cut
    shape: tuple[int, ...]
    expert: int | None = None
    rows: slice | None = None
    """Of an expert's shard, where that packs several stored tensors (gate and up)."""

    def own(self, shard: Tensor) -> Tensor:
        """The part of this rank's ``shard`` of the target that holds the stored tensor: a view."""
        return shard if self.expert is None else shard[self.expert, self.rows or slice(None)]


def tensors_of(model: nn.Module) -> Iterator[Placed]:
    """What a checkpoint of ``model`` holds: every parameter once, and the buffers that are not computed."""
    yield from placed_parameters(model)
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                name = f"{prefix}.{leaf}" if prefix else leaf
                yield Placed(name, buffer, Replicated(), tuple(buffer.shape))


def slots_of(
    targets: Iterable[Placed], names: Mapping[str, str], family: Family | None, group: Group, where: str
) -> list[Slot]:
    """The slots of all ``targets``. ``names``: stored names by the names that they have in the model's spelling.

    Raises UsageError (``parameter-missing``) when something in ``names`` has no place, or a target has nothing in ``names``.
    """
    slots: list[Slot] = []
    missing: list[str] = []
    used: set[str] = set()
    for target in targets:
        parts = [[target.name]]
        if target.name not in names and family is not None and len(target.shape) == 3:
            parts = family.stored_parts(target.name, target.shape[0]) or parts
        flat = {name for expert in parts for name in expert}
        missing += [target.name] * (not flat <= names.keys())
        used |= flat
        if not missing:
            slots += _slots(target, parts, names, group)
    extra = sorted(names[name] for name in names.keys() - used)
    for what, which in (("lacks", missing), ("holds", extra)):
        if which:
            more = f" and {len(which) - 1} more" if len(which) > 1 else ""
            raise UsageError(
                f"{where!r} {what} {which[0]}{more}, which the model {'has' if which is missing else 'has not'}",
                code="parameter-missing",
                fix="check that all files are there, and that config.json belongs to the weights",
            )
    return slots


def _slots(target: Placed, parts: list[list[str]], names: Mapping[str, str], group: Group) -> Iterator[Slot]:
    if parts == [[target.name]]:
        yield Slot(names[target.name], target, target.cut, target.shape)
        return
    count = len(parts[0])
    shape = (target.shape[1] // count, *target.shape[2:])
    cut: Cut = {None: Replicated(), 1: Column(), 2: Row()}[target.cut.dim]
    own = cut.shard_shape(shape, group.size, group.rank)[0]
    for expert, stored in enumerate(parts):
        for part, name in enumerate(stored):
            yield Slot(names[name], target, cut, shape, expert, slice(part * own, (part + 1) * own))
