"""What follows from where parameters are: broadcast at start, partial gradients summed, norms counted once, drift found.

``placed.py`` says which ranks hold what, from the layers' declarations alone, so nothing here depends on a name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crosscut.collectives import all_gather, all_reduce, broadcast
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import MismatchError, UsageError
from crosscut.layers.placed import Placed, gradients, placed_parameters
from crosscut.layers.shards import take

__all__ = [
    "Placed",
    "broadcast_parameters",
    "check_replicas",
    "clip_grad_norm_",
    "grad_norm",
    "placed_parameters",
    "sum_partial_gradients",
]


def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Make all copies equal at start, the first rank's: over tp what is replicated, over dp what FSDP2 does not spread."""
    for placed in placed_parameters(model, mesh):
        own = placed.own
        if placed.replicated:
            broadcast(own, mesh.tp, out=own)
        elif placed.shares_rows(mesh.tp):
            placed.fill(take(placed.whole(mesh.tp), placed.cut, mesh.tp.size, mesh.tp.rank))
        if not placed.spread:
            broadcast(own, mesh.dp, out=own)


def sum_partial_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Sum over tp the gradients that a module leaves to its caller: ``partial_gradients = {"weight": "caller"}``.

    A collective call, once a step, after the last backward and before clipping. crosscut's own layers need none. Raises
    UsageError (``bad-option``) when a cut parameter is declared so: what cuts it has to sum the rows that ranks share.
    """
    for grad in gradients(model, mesh):
        if grad.summed_by != "caller":
            continue
        if not grad.replicated:
            raise UsageError(
                f"the gradient of {grad.name!r}, which is cut, is declared partial",
                code="bad-option",
                fix="declare parameters that every rank holds whole; a layer that cuts one sums its gradient itself",
            )
        own = grad.own
        all_reduce(own, mesh.tp, out=own)


def grad_norm(model: nn.Module, mesh: Mesh) -> Tensor:
    """The 2-norm of the unsplit model's gradient, float32, equal on every rank: each element counted once.

    A replica's gradient is on every rank; counting it tp times is a known fault (norms 1.4 times too large). Gradients that
    FSDP2 spreads over dp are summed over dp as well. A collective call.
    """
    total, spread = torch.zeros(2, dtype=torch.float32, device=mesh.device).unbind()
    for grad in gradients(model, mesh):
        part = spread if grad.spread else total
        part += _squares(grad, mesh.tp)
    if any(placed.spread for placed in placed_parameters(model)):
        total += all_reduce(spread, mesh.dp)
    return all_reduce(total, mesh.tp).sqrt()


def _squares(grad: Placed, group: Group) -> Tensor:
    """The sum of this rank's squares, each over the number of ranks of tp that hold it."""
    squares = grad.own.float().square()
    if grad.cut.dim is None:
        return squares.sum() / group.size
    if not grad.shares_rows(group):
        return squares.sum()
    counts = grad.counts(group)
    holders = torch.tensor([counts[row] for row in grad.own_rows(group)], device=squares.device)
    return (squares.movedim(grad.cut.dim, 0).unsqueeze(-1).flatten(1).sum(1) / holders).sum()


def clip_grad_norm_(model: nn.Module, max_norm: float, mesh: Mesh) -> Tensor:
    """Scale all gradients so that their norm (:func:`grad_norm`) is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsplit model. A collective call.
    Raises UsageError (``bad-option``) unless max_norm is positive.
    """
    if max_norm is None or not max_norm > 0:
        raise UsageError(f"max_norm={max_norm}", code="bad-option", fix="give a positive number")
    norm = grad_norm(model, mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in gradients(model, mesh):
        grad.own.mul_(scale.to(grad.own.dtype))
    return norm


def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Raise MismatchError (``result-differs``) naming the parameters whose copies are not equal bit for bit.

    Copies are the replicated parameters and the shared rows (KV heads fewer than ranks) over tp, and over dp all parameters
    that FSDP2 does not spread. Exchanges 8 bytes a parameter and axis, and twice 8 bytes a row of a parameter with shared
    rows (which is gathered over dp first where it is spread).
    """
    everything = list(placed_parameters(model, mesh))
    for placed in everything:
        if placed.shares_rows(mesh.tp) and not _rows_agree(placed, mesh.tp):
            raise _drift(placed.name, "ranks of tp that share its rows")
    for axis, group, chosen in (
        ("tp", mesh.tp, [placed for placed in everything if placed.replicated]),
        ("dp", mesh.dp, [placed for placed in everything if not placed.spread]),
    ):
        if group.size == 1 or not chosen:
            continue
        sums = torch.stack([_fingerprint(placed.own.flatten()) for placed in chosen])
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
    placed = placed.like(placed.shard())
    assert placed.cut.dim is not None
    own = _fingerprint(placed.own.movedim(placed.cut.dim, 0).unsqueeze(-1).flatten(1))
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
    places = (2 * torch.arange(bits.shape[-1], device=x.device) + 1) * 0x5851F42D4C957F2D
    return (bits * places).sum(-1)
