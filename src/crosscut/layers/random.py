"""Randomness under tensor parallelism: equal masks on replicated activations, different ones on sharded activations.

With torch's own dropout and equal seeds on all ranks, a sharded activation gets the same mask on every shard, so hidden
unit j and unit j + F/tp drop together; with different seeds a replicated activation gets different masks and the ranks
compute different things. Here every dropout draws one number from a generator that runs alike on all ranks of a tp group
and seeds its mask with it, with the rank mixed in where the activation is sharded. Because that number comes from torch's
default CPU generator, activation checkpointing, which restores it, recomputes the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers.checks import check_dropout
from crosscut.sharding import shard_sizes

_SPREAD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbouring ranks get seeds that share no pattern


def manual_seed(seed: int, mesh: Mesh) -> None:
    """Seed torch on every rank: alike within a tp group, differently along dp, whose ranks see different data."""
    torch.manual_seed((seed + mesh.dp.rank * _SPREAD) % 2**63)


class ParallelDropout(nn.Module):
    """Dropout (Srivastava et al., 2014) of an activation that is ``sharded`` over the tp group, or whole on every rank.

    ``x [...]`` -> the same shape. ``sharded``: ``x`` is this rank's part along ``dim``. ``invariant``: draw the mask of the
    whole activation on every rank and use this rank's part, so that any tp gives the mask that one device would: for
    comparing runs, at the price of a whole mask. ``generator``: a CPU generator that runs alike on all ranks, in place of
    torch's default one (seed that with :func:`manual_seed`); not with activation checkpointing, which restores the default one
    alone, and would recompute with another mask. Raises UsageError (``bad-option``) unless 0 <= p < 1.
    """

    def __init__(
        self,
        p: float,
        *,
        mesh: Mesh,
        sharded: bool,
        dim: int = -1,
        invariant: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_dropout(p)
        self.p, self.group, self.sharded, self.dim = p, mesh.tp, sharded, dim
        self.invariant, self.generator = invariant, generator

    def forward(self, x: Tensor, total: int | None = None) -> Tensor:
        """``x`` with elements dropped and the others scaled by 1/(1-p).

        ``total``: size of the whole ``dim`` when it does not divide.
        """
        if not self.training or self.p == 0:
            return x
        seed = _draw(self.generator)
        if self.sharded and self.invariant:
            kept = self._part_of_whole(x, seed, total)
        else:
            kept = self._mask(x.shape, x.device, _mixed(seed, self.group.rank if self.sharded else 0))
        return x * kept.to(x.dtype) / (1 - self.p)

    def _mask(self, shape: torch.Size, device: torch.device, seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.empty(shape, device=device).bernoulli_(1 - self.p, generator=generator)

    def _part_of_whole(self, x: Tensor, seed: int, total: int | None) -> Tensor:
        sizes = shard_sizes(x.shape[self.dim] * self.group.size if total is None else total, self.group.size)
        if sizes[self.group.rank] != x.shape[self.dim]:
            raise UsageError(
                f"rank {self.group.rank} holds {x.shape[self.dim]} of {sum(sizes)} along dim {self.dim}, "
                f"not {sizes[self.group.rank]}",
                code="bad-shape",
                fix="give total, the size of the whole dim",
            )
        whole = list(x.shape)
        whole[self.dim] = sum(sizes)
        return self._mask(torch.Size(whole), x.device, seed).split(sizes, self.dim)[self.group.rank]

    def extra_repr(self) -> str:
        """For ``print(module)``."""
        return f"p={self.p}, sharded={self.sharded}, invariant={self.invariant}"


class HeadDropout(nn.Module):
    """Dropout of the attention weights of this rank's query heads, ``[B, N/tp, S, S]``: no two heads share a mask.

    ``heads``: which of the N heads the rank holds. ``invariant``: each head's mask depends on its number alone, so that any tp
    gives the masks that one device would; that needs the weights written out, which fused attention avoids (``4 B N/tp S^2``
    bytes and more for the backward). Otherwise a GPU's fused kernel draws the masks, from a seed of each rank's own. On CPUs,
    where no fused kernel has dropout, masks are always invariant. ``generator``: as in :class:`ParallelDropout`.
    Raises UsageError (``bad-option``) unless 0 <= p < 1.
    """

    def __init__(
        self, p: float, heads: slice, *, mesh: Mesh, invariant: bool = False, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_dropout(p)
        self.p, self.heads, self.group, self.invariant, self.generator = p, heads, mesh.tp, invariant, generator

    def drops(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self.p > 0

    @contextmanager
    def drawn(self, device: torch.device) -> Iterator[float | Callable[[Tensor], Tensor]]:
        """Within: a function that drops weights ``[B, N/tp, ...]``, or p for a kernel that draws from torch's own generator.

        Ask :meth:`drops` first: it always draws. The same number of draws on each rank, whatever heads it holds.
        """
        seed = _draw(self.generator)
        if self.invariant or device.type != "cuda":
            heads = range(self.heads.start, self.heads.stop)
            yield _Masks(self.p, [torch.Generator(device).manual_seed(_mixed(seed, head + 1)) for head in heads])
            return
        with torch.random.fork_rng([device], device_type="cuda"), torch.cuda.device(device):
            torch.cuda.manual_seed(_mixed(seed, self.group.rank))
            yield self.p

    def extra_repr(self) -> str:
        """For ``print(module)``."""
        return f"p={self.p}, invariant={self.invariant}"


class _Masks:
    """Drops elements of ``[B, N/tp, ...]``, each head from its own generator; each call draws on."""

    def __init__(self, p: float, generators: list[torch.Generator]) -> None:
        self.p, self.generators = p, generators

    def __call__(self, weights: Tensor) -> Tensor:
        shape = (weights.shape[0], *weights.shape[2:])
        drawn = [torch.empty(shape, device=weights.device).bernoulli_(1 - self.p, generator=g) for g in self.generators]
        return weights * torch.stack(drawn, 1).to(weights.dtype) / (1 - self.p)


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.randint(0, 2**62, (), generator=generator, device="cpu"))


def _mixed(seed: int, place: int) -> int:
    return (seed + place * _SPREAD) % 2**63
