"""From a group to its schedules: what the rule is told of this machine, and who carries the pieces.

Built once for each group and kept in its cache, so that a call on a CPU, or with few tokens, costs a dictionary look-up.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from crosscut.collectives import all_agree, all_reduce
from crosscut.collectives.fast import fast
from crosscut.distributed.mesh import Group
from crosscut.distributed.topology import topology
from crosscut.env import settings
from crosscut.hardware import wire
from crosscut.kernels.copies import Copies, shared_copies
from crosscut.layers.carry import Carrier, Library
from crosscut.layers.engines import Engines
from crosscut.layers.schedule import (
    LEAST_PIECE,
    PLAIN,
    Case,
    Machine,
    Schedule,
    choose,
    forced_pieces,
    machine,
    plain,
    room_bytes,
)

_KEY, _COPIES = "schedules", "copies"
_FEW = plain(f"fewer than {LEAST_PIECE} tokens")
MOST_HALF = 256 << 20


@dataclass(frozen=True)
class _Known:
    """What the rule is told, equal on all ranks of a group: a rank that chose otherwise would wait for ever.

    ``forced``: the number of pieces asked for; ``machine``: or why it is not known; ``half``: bytes of a half of the memory
    that copies pass through, 0 where there are no copies.
    """

    forced: int | None
    machine: Machine | str
    half: int = 0


def scheduled(group: Group, op: str, x: Tensor, tokens: int, inner: int, outer: int) -> Schedule:
    """The schedule of one multiply with its exchange, the same on every rank.

    ``tokens``: of all ranks; ``inner``, ``outer``: input and output features of the largest rank's multiply.
    Plain under autocast, where casts would be by hand.
    """
    if group.size == 1:
        return PLAIN
    known: _Known | None = group.cache.get(_KEY)
    if known is None or known.forced is None:  # the usual case: settled without a look at the rule
        if tokens < LEAST_PIECE and known is not None:
            return _FEW
        known = known or _known(group)
    if torch.is_autocast_enabled(x.device.type):
        return plain("autocast is on")
    case = Case(op, tokens, inner, outer, group.size, x.element_size())
    return choose(case, known.machine, known.forced, _carriers(group, case, known.half))


def too_few(group: Group, x: Tensor) -> bool:
    """Whether ``x [T, K]`` has so few tokens that :func:`scheduled` is known to say plain. Spares small layers time."""
    known: _Known | None = group.cache.get(_KEY)
    return known is not None and known.forced is None and x.numel() < LEAST_PIECE * x.shape[-1]


def carrier(group: Group, schedule: Schedule) -> Carrier:
    """Who moves the pieces of one call."""
    copies = _copies(group) if schedule.carrier == "copies" else None
    return Library(group) if copies is None else Engines(copies, group)


def _known(group: Group) -> _Known:
    forced = forced_pieces(settings().schedule)
    if group.device.type != "cuda":
        known = _Known(forced, "on a CPU the exchange needs the cores that multiply")
    elif torch.cuda.is_current_stream_capturing():
        return _Known(None, "the first call is being captured")  # the ranks cannot agree now; the next eager call asks again
    elif fast(group) is None:
        known = _Known(forced, f"the ranks share no memory ({group.cache['why']}), and nothing is known of their link")
    else:
        known = _agreed(group, forced)
    group.cache[_KEY] = known
    return known


def _agreed(group: Group, forced: int | None) -> _Known:
    """A collective call."""
    device = torch.cuda.get_device_properties(group.device)
    known = _Known(forced, machine(device.name, wire(device.name, topology().matrix(), group.size)), _half(device.total_memory))
    mine = zlib.crc32(repr((known.forced, known.machine)).encode())
    vote = torch.tensor([mine, -mine, known.half], dtype=torch.int64, device=group.device)
    low, high, half = all_reduce(vote, group, "min").tolist()
    if low != -high:
        return _Known(0 if forced is not None else None, "the ranks have other GPUs, links or settings than each other")
    return replace(known, half=half)


def _half(memory: int) -> int:
    return min(MOST_HALF, memory // 128) >> 20 << 20


def _carriers(group: Group, case: Case, half: int) -> tuple[str, ...]:
    """The library, and copy engines where the GPUs share memory, the pieces have room and sums go between two."""
    if group.cache.get(_COPIES, True) is None or (case.op == "multiply_reduce" and group.size > 2):
        return ("library",)
    return ("library", "copies") if room_bytes(case) <= half else ("library",)


def _copies(group: Group) -> Copies | None:
    """The group's copy engines, made at the first call that wants them, which all ranks make; None where they cannot be."""
    if _COPIES not in group.cache:
        if torch.cuda.is_current_stream_capturing():
            return None  # nothing can be allocated now
        assert group.process_group is not None
        known: _Known = group.cache[_KEY]
        index = group.device.index if group.device.index is not None else torch.cuda.current_device()
        agree = partial(all_agree, group)
        group.cache[_COPIES] = shared_copies(
            group.axis, group.process_group, torch.device("cuda", index), settings().timeout, known.half, agree
        )
    found: Copies | None = group.cache[_COPIES]
    return found
