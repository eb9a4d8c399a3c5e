"""The pair matrix: how fast each two ranks talk, one way and both ways, while all others are silent.

Latency is half the time of a ping-pong at a small size; bandwidth is a stream of messages at a large size. Both ways
means that the two send to each other at once, and bandwidth counts what each sends. A slow cable, a GPU behind another
switch or a host with P2P off shows as a dark row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.bench.timing import Sampling, clock, sample, slowest
from crosscut.distributed.mesh import Group
from crosscut.records import Row, Times
from crosscut.units import gbps

SMALL = 8
"""Bytes of a message whose time is latency."""


@dataclass(frozen=True)
class Pair:
    """Two ranks of the group. ``both``: they send to each other at once; otherwise ``src`` sends."""

    src: int
    dst: int
    both: bool


def pairs(world: int) -> Iterator[Pair]:
    """Every ordered pair one way, then every unordered pair both ways."""
    yield from (Pair(src, dst, False) for src, dst in permutations(range(world), 2))
    yield from (Pair(src, dst, True) for src, dst in combinations(range(world), 2))


def measure(pair: Pair, nbytes: int, group: Group, sampling: Sampling, impl: str) -> Row:
    """Time ``pair`` on messages of ``nbytes``; all ranks of ``group`` call this together.

    Raises what the backend raises where it cannot send (RuntimeError), on all ranks of the pair.
    """
    stream = nbytes > SMALL
    mine, theirs = (torch.zeros(nbytes, dtype=torch.uint8, device=group.device) for _ in range(2))
    once = _message(pair, group, mine, theirs, ping_pong=not (stream or pair.both))
    for _ in range(2):
        once()
    roughly = max(slowest([clock(once, group.device)], group)[0], 1.0)
    inner = int(min(max(sampling.sample_us / roughly, 1), 64))
    reps = sampling.reps(roughly * inner)

    def run() -> None:
        for _ in range(inner):
            once()

    each = 1 if stream or pair.both else 2  # messages of one call, one after the other
    us = Times.of([t / each for t in slowest([sample(run, inner, group) for _ in range(reps)], group)])
    extra = {"src": pair.src, "dst": pair.dst, "direction": "bi" if pair.both else "uni"}
    return Row("pair", impl, "eager", group.size, "uint8", bytes=nbytes, us=us, n=inner * reps * each,
               algbw_gbps=gbps(nbytes, us.p50), extra=extra)  # fmt: skip


def _message(pair: Pair, group: Group, mine: Tensor, theirs: Tensor, ping_pong: bool) -> Callable[[], None]:
    """What this rank does for one message (one way, both ways at once, or there and back); nothing for the others."""
    if group.rank not in (pair.src, pair.dst):
        return lambda: None
    sends, other = group.rank == pair.src, group.ranks[pair.dst if group.rank == pair.src else pair.src]
    out = dist.P2POp(dist.isend, mine, other, group.process_group)
    back = dist.P2POp(dist.irecv, theirs, other, group.process_group)

    def do(*operations: dist.P2POp) -> None:
        for work in dist.batch_isend_irecv(list(operations)):
            work.wait()

    def once() -> None:
        if pair.both:
            do(out, back)
            return
        do(out if sends else back)
        if ping_pong:
            do(back if sends else out)

    return once
