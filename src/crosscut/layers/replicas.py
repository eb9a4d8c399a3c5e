"""Which parameters are replicas of each other, and all that follows: broadcast at start, norms counted once, drift found.

A module of this room says in ``cuts`` how each of its parameters is cut, and in ``shapes`` what the whole looks like. From
that alone follows how many ranks hold each row; a parameter of any other module is held whole by every rank. Gradients of
replicas are whole on every rank after backward (the layers sum the partial ones), so nothing here depends on a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from crosscut.collectives import all_gather, all_reduce, broadcast
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import MismatchError, UsageError
from crosscut.layers.shards import gather, take
from crosscut.sharding import Cut, Replicated


@dataclass(frozen=True)
class Placed:
    """One parameter of a model: its name, its local tensor, how it is cut and the shape of the whole."""

    name: str
    local: nn.Parameter
    cut: Cut
    shape: tuple[int, ...]

    @property
    def replicated(self) -> bool:
        """Every rank of the tp group holds all of it."""
        return self.cut.dim is None

    def counts(self, group: Group) -> tuple[int, ...]:
        """How many ranks hold each row of the whole along the cut dim; empty when it is replicated."""
        return _counts(self.cut, self.shape, group.size)

    def own_rows(self, group: Group) -> list[int]:
        """Which rows of the whole this rank's rows along the cut dim are."""
        pieces = self.cut.pieces(self.shape, group.size, group.rank)
        return [row for piece in pieces for row in range(piece.full.start, piece.full.stop)]

    def shares_rows(self, group: Group) -> bool:
        """Several ranks hold the same rows, and no rank all: KV heads fewer than ranks."""
        return _shared(self.cut, self.shape, group.size)


@cache
def _counts(cut: Cut, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if cut.dim is None:
        return ()
    counts = [0] * shape[cut.dim]
    for rank in range(tp):
        for piece in cut.pieces(shape, tp, rank):
            for row in range(piece.full.start, piece.full.stop):
                counts[row] += 1
    return tuple(counts)


@cache
def _shared(cut: Cut, shape: tuple[int, ...], tp: int) -> bool:
    return max(_counts(cut, shape, tp), default=1) > 1


def placed_parameters(model: nn.Module) -> Iterator[Placed]:
    """Every parameter of ``model`` once (a tied one under its first name), with its place."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        cuts, shapes = getattr(module, "cuts", {}), getattr(module, "shapes", {})
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{prefix}.{name}" if prefix else name
            yield Placed(full, parameter, cuts.get(name, Replicated()), tuple(shapes.get(name, parameter.shape)))


def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Make all copies equal at start: every parameter over dp, the replicated ones over tp too; the first rank's wins."""
    with torch.no_grad():
        for placed in placed_parameters(model):
            if placed.replicated:
                broadcast(placed.local, mesh.tp, out=placed.local)
            elif placed.shares_rows(mesh.tp):
                whole = gather(placed.local, placed.cut, placed.shape, mesh.tp)
                placed.local.copy_(take(whole, placed.cut, mesh.tp.size, mesh.tp.rank))
            broadcast(placed.local, mesh.dp, out=placed.local)


def grad_norm(model: nn.Module, mesh: Mesh) -> Tensor:
    """The 2-norm of the unsplit model's gradient, float32, equal on every rank: each element counted once.

    A replica's gradient is on every rank; counting it tp times is a known fault (norms 1.4 times too large).
    """
    device = mesh.device
    total = torch.zeros((), dtype=torch.float32, device=device)
    for placed in placed_parameters(model):
        grad = placed.local.grad
        if grad is None:
            continue
        squares = grad.detach().float().square()
        if placed.cut.dim is None:
            total += squares.sum() / mesh.tp.size
        elif not placed.shares_rows(mesh.tp):
            total += squares.sum()
        else:
            counts = placed.counts(mesh.tp)
            holders = torch.tensor([counts[row] for row in placed.own_rows(mesh.tp)], device=device)
            total += (squares.movedim(placed.cut.dim, 0).unsqueeze(-1).flatten(1).sum(1) / holders).sum()
    return all_reduce(total, mesh.tp).sqrt()


def clip_grad_norm_(model: nn.Module, max_norm: float, mesh: Mesh) -> Tensor:
    """Scale all gradients so that their norm (:func:`grad_norm`) is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsplit model. A collective call.
    Raises UsageError (``bad-option``) unless max_norm is positive.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm={max_norm}", code="bad-option", fix="give a positive number")
    norm = grad_norm(model, mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for placed in placed_parameters(model):
        if placed.local.grad is not None:
            placed.local.grad.mul_(scale.to(placed.local.grad.dtype))
    return norm


def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Raise MismatchError (``result-differs``) naming the parameters whose copies are not equal bit for bit.

    Copies are the replicated parameters and the shared rows (KV heads fewer than ranks) over tp, and all parameters over
    dp. Exchanges 8 bytes a parameter and axis, and twice 8 bytes a row of a parameter with shared rows.
    """
    everything = list(placed_parameters(model))
    for placed in everything:
        if placed.shares_rows(mesh.tp) and not _rows_agree(placed, mesh.tp):
            raise _drift(placed.name, "ranks of tp that share its rows")
    for axis, group, chosen in (
        ("tp", mesh.tp, [placed for placed in everything if placed.replicated]),
        ("dp", mesh.dp, everything),
    ):
        if group.size == 1 or not chosen:
            continue
        sums = torch.stack([_fingerprint(placed.local.detach().flatten()) for placed in chosen])
        first, *others = all_gather(sums, group).view(group.size, -1).unbind(0)
        for rank, other in enumerate(others, start=1):
            drifted = [placed.name for placed, same in zip(chosen, (first == other).tolist(), strict=True) if not same]
            if drifted:
                raise _drift(drifted[0], f"ranks 0 and {rank} of {axis}", len(drifted) - 1)


def _drift(name: str, who: str, others: int = 0) -> MismatchError:
    return MismatchError(
        f"the copies of {name!r}{f' and {others} more' if others else ''} differ between {who}",
        code="result-differs",
        fix="broadcast_parameters(model, mesh) makes them equal; look for a gradient that is not summed, or seeds",
    )


def _rows_agree(placed: Placed, group: Group) -> bool:
    """Whether every rank that holds a row has the same bits in it: the largest and the smallest fingerprint are one."""
    assert placed.cut.dim is not None
    own = _fingerprint(placed.local.detach().movedim(placed.cut.dim, 0).unsqueeze(-1).flatten(1))
    rows, limits = placed.own_rows(group), torch.iinfo(torch.int64)
    seen = []
    for op, nobody in (("max", limits.min), ("min", limits.max)):
        table = torch.full((placed.shape[placed.cut.dim],), nobody, dtype=torch.int64, device=own.device)
        table[rows] = own
        seen.append(all_reduce(table, group, op))
    return torch.equal(*seen)


def _fingerprint(x: Tensor) -> Tensor:
    """Eight bytes that change with any bit along the last dim of ``x`` and with the order of its elements."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().contiguous().view(whole).long()
    places = torch.arange(1, 2 * bits.shape[-1], 2, device=x.device) * 0x5851F42D4C957F2D
    return (bits * places).sum(-1)
