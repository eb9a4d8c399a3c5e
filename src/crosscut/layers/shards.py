"""Tensors and cuts: take a rank's shard of a whole tensor, join the shards again, draw a shard's initial values.

Also several linear layers stored as one and taken apart again, whole, on the way in and out of a packed layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crosscut.collectives import all_gather, broadcast
from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError
from crosscut.sharding import Cut

_BLOCK = 64  # rows that share one random stream, so that a rank draws little more than its own rows


def refuse_empty(**sizes: int) -> None:
    """Raise UsageError (``bad-size``) naming the first of ``sizes`` that is no whole number or below 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"{name}={size}", code="bad-size", fix="give a size of at least 1")


def take(full: Tensor, cut: Cut, tp: int, rank: int) -> Tensor:
    """The shard of ``full`` that rank ``rank`` of ``tp`` holds: a copy, contiguous."""
    if cut.dim is None:
        return full.clone(memory_format=torch.contiguous_format)
    runs = [full.narrow(cut.dim, p.full.start, p.full.stop - p.full.start) for p in cut.pieces(full.shape, tp, rank)]
    return torch.cat(runs, cut.dim) if len(runs) > 1 else runs[0].clone(memory_format=torch.contiguous_format)


def join(shards: list[Tensor], cut: Cut, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor of ``shape`` from the shards of all ranks, bit for bit. Of what several ranks hold, the last one's."""
    if cut.dim is None:
        return shards[0].clone()
    full = shards[0].new_empty(shape)
    for rank, shard in enumerate(shards):
        for piece in cut.pieces(shape, len(shards), rank):
            size = piece.full.stop - piece.full.start
            full.narrow(cut.dim, piece.full.start, size).copy_(shard.narrow(cut.dim, piece.local.start, size))
    return full


def gather(shard: Tensor, cut: Cut, shape: tuple[int, ...], group: Group) -> Tensor:
    """The whole tensor of ``shape`` on every rank, from this rank's ``shard``. All ranks of the group must call it."""
    shard = shard.detach()
    if cut.dim is None or group.size == 1:
        return shard.clone()
    sizes = [cut.shard_shape(shape, group.size, rank)[cut.dim] for rank in range(group.size)]
    return join(list(all_gather(shard, group, cut.dim, sizes).split(sizes, cut.dim)), cut, shape)


def shared_seed(group: Group) -> int:
    """A seed drawn from torch's default CPU generator on the group's first rank, the same on every rank of the group."""
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device="cpu")
    return int(broadcast(seed.to(group.device), group).item())


def uniform_(shard: Tensor, cut: Cut, shape: tuple[int, ...], bound: float, seed: int, group: Group) -> None:
    """Fill ``shard`` with its part of a whole tensor of ``shape`` that is uniform in [-bound, bound).

    The whole is a function of ``seed`` and ``shape`` alone, whatever the tp: blocks of rows have random streams of
    their own, drawn on the CPU in float32, so CPU and GPU ranks start equal too.
    """
    pieces = cut.pieces(shape, group.size, group.rank) if cut.dim is not None else []
    wanted = [p.full for p in pieces] if cut.dim == 0 else [slice(0, shape[0])]
    into = 0
    with torch.no_grad():
        for rows in wanted:
            for block in range(rows.start // _BLOCK, -(-rows.stop // _BLOCK)):
                first = block * _BLOCK
                values = _block(shape, first, bound, seed)
                values = values[max(rows.start - first, 0) : rows.stop - first]
                if cut.dim is not None and cut.dim > 0:
                    values = take(values, cut, group.size, group.rank)
                shard[into : into + len(values)].copy_(values)
                into += len(values)


def _block(shape: tuple[int, ...], first: int, bound: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + first) % 2**63)
    count = min(_BLOCK, shape[0] - first)
    return torch.empty((count, *shape[1:]), dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)


def pack(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer whose output features are those of ``linears`` one after the other.

    Raises UsageError (``bad-size``) unless they are alike in all but these.
    """
    traits = [
        (linear.in_features, linear.weight.dtype, [(n, p.requires_grad) for n, p in linear.named_parameters()])
        for linear in linears
    ]
    if any(each != traits[0] for each in traits):
        frozen = [[name for name, trained in parameters if not trained] for _, _, parameters in traits]
        found = "; ".join(
            f"{linear} in {dtype}, frozen: {names}"
            for linear, (_, dtype, _), names in zip(linears, traits, frozen, strict=True)
        )
        raise UsageError(
            f"these layers cannot be stored as one: {found}",
            code="bad-size",
            fix="give all the same input features, dtype, bias and requires_grad",
        )
    packed = _linear_like(linears[0], sum(linear.out_features for linear in linears))
    with torch.no_grad():
        for name, parameter in packed.named_parameters():
            parameter.copy_(torch.cat([linear.get_parameter(name) for linear in linears]))
            parameter.requires_grad_(linears[0].get_parameter(name).requires_grad)
    return packed


def unpack(packed: nn.Linear, sizes: Sequence[int]) -> list[nn.Linear]:
    """Inverse of :func:`pack`: linear layers with ``sizes`` output features."""
    linears = [_linear_like(packed, size) for size in sizes]
    with torch.no_grad():
        for name, whole in packed.named_parameters():
            for linear, values in zip(linears, whole.split(list(sizes)), strict=True):
                linear.get_parameter(name).requires_grad_(whole.requires_grad).copy_(values)
    return linears


def _linear_like(linear: nn.Linear, out_features: int) -> nn.Linear:
    weight = linear.weight
    options = {"bias": linear.bias is not None, "device": weight.device, "dtype": weight.dtype}
    return nn.utils.skip_init(nn.Linear, linear.in_features, out_features, **options)
