"""The mesh of ranks: axes ``dp`` and ``tp`` over torch's DeviceMesh, always passed as an argument, never a global.

Neighbouring ranks form a tp group (they talk most, so they should be nearest); equal tp ranks of all groups form a dp group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import Self

from crosscut.distributed.observer import Observer
from crosscut.errors import UsageError

_NUMBERS = count()
_LIVE: WeakValueDictionary[str, Group] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of one line of the mesh, seen from this rank. ``rank`` is the position in the group, ``ranks`` are global.

    ``process_group`` is None for a group of one, which needs no communication.
    """

    axis: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str
    device: torch.device
    process_group: dist.ProcessGroup | None = None
    observer: Observer | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    """What the rooms above build once for this group (its kernels' workspace), shared by every copy of it."""
    handle: str = field(init=False)
    """This object's own name in this process, for operators of torch.library, which take no Python objects."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", f"{self.axis}.{next(_NUMBERS)}")
        _LIVE[self.handle] = self

    def observed_by(self, observer: Observer | None) -> Group:
        """The same group with ``observer`` told of each collective."""
        return replace(self, observer=observer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: a copy of a layer talks to the same ranks, and what connects them cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "what is split over ranks cannot be pickled: each rank holds a part, and connections to the others",
            code="bad-option",
            fix="save its state_dict(), or crosscut.save_pretrained(model, directory, mesh), crosscut.models.dcp.save",
        )

    def __repr__(self) -> str:
        return f"Group({self.axis} {self.rank}/{self.size}, {self.backend}, {self.device})"


def live_group(handle: str) -> Group:
    """The group whose ``handle`` this is.

    The registry behind it is no rank state. A handle is given once and never again, so it means one object, whoever asks:
    rank threads of one process each hold groups, and so handles, of their own. There is no "current" group to get wrong. It
    holds its groups weakly: a group lives as long as the mesh or layer that it belongs to. (torch's functional collectives
    find process groups by name in the same way.)
    Raises UsageError (``bad-option``) when that group is gone, as when a compiled function outlives its mesh.
    """
    group = _LIVE.get(handle)
    if group is None:
        raise UsageError(
            f"no group {handle!r} is alive",
            code="bad-option",
            fix="keep the mesh or the layer for as long as what was compiled from it",
        )
    return group


@dataclass(frozen=True, eq=False)
class Mesh:
    """This rank's view of all ranks. ``device_mesh`` is torch's own mesh of the same axes (None in a world of one)."""

    tp: Group
    dp: Group
    device: torch.device
    device_mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as a :class:`Group`."""
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks: dp x tp."""
        return self.tp.size * self.dp.size

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.tp.ranks[self.tp.rank]


def make_mesh(tp: int | None = None, dp: int | None = None, device: torch.device | str | None = None) -> Mesh:
    """The mesh over the current default process group, or of one rank when there is none.

    ``tp`` and ``dp``: group sizes; the one left out takes what remains of the world (both left out: tp takes all).
    Raises UsageError (``tp-mismatch``) unless tp x dp is the number of ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    tp, dp = _sizes(world, tp, dp)
    if world == 1:
        where = _place(device, "none")
        return Mesh(tp=_alone("tp", where), dp=_alone("dp", where), device=where)
    backend = dist.get_backend()
    where = _place(device, backend)
    device_mesh = init_device_mesh(where.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    groups = {axis: _line(device_mesh, axis, backend, where) for axis in ("tp", "dp")}
    return Mesh(tp=groups["tp"], dp=groups["dp"], device=where, device_mesh=device_mesh)


def _sizes(world: int, tp: int | None, dp: int | None) -> tuple[int, int]:
    for name, size in (("tp", tp), ("dp", dp)):
        if size is not None and (not hasattr(size, "__index__") or size < 1):
            raise UsageError(
                f"{name}={size!r} is not a group size", code="tp-mismatch", fix="give a whole number of at least 1"
            )
    known = (tp or 1) * (dp or 1)
    if world % known or (tp is not None and dp is not None and known != world):
        asked = " x ".join(f"{name}={size}" for name, size in (("tp", tp), ("dp", dp)) if size is not None)
        divisors = ", ".join(str(d) for d in range(1, world + 1) if world % d == 0)
        raise UsageError(
            f"{asked} does not divide the {world} rank{'s' if world > 1 else ''} of this run",
            code="tp-mismatch",
            fix=f"start {known} ranks, or choose tp x dp = {world} (tp can be {divisors})",
        )
    if tp is None:
        return world // known, dp or 1
    return tp, world // tp


def _alone(axis: str, device: torch.device) -> Group:
    return Group(axis=axis, rank=0, size=1, ranks=(0,), backend="none", device=device)


def _line(device_mesh: DeviceMesh, axis: str, backend: str, device: torch.device) -> Group:
    process_group = device_mesh.get_group(axis)
    ranks = tuple(dist.get_process_group_ranks(process_group))
    size = len(ranks)
    return Group(
        axis=axis,
        rank=device_mesh.get_local_rank(axis),
        size=size,
        ranks=ranks,
        backend=backend,
        device=device,
        process_group=process_group if size > 1 else None,
    )


def _place(device: torch.device | str | None, backend: str) -> torch.device:
    """The device that this rank works on: ``device``, with the current GPU's number where it names none."""
    if device is not None:
        named = torch.device(device)
        return torch.device("cuda", torch.cuda.current_device()) if named.type == "cuda" and named.index is None else named
    if backend in ("nccl", "none") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
