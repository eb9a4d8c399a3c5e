"""What the GPUs' clocks do meanwhile, from NVML: a throttled GPU makes every number small, and nothing else says so.

Quiet where there is nothing to ask: no GPU, no driver, no NVML.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crosscut.collectives import all_gather
from crosscut.distributed.mesh import Group

# nvmlClocksEventReasons of NVML's API reference; idle (1) and clocks set by the user (2, 0x10, 0x100) are no throttling
_REASONS = {
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}


@dataclass(frozen=True)
class Clock:
    """One look at one GPU: the SM clock in MHz, the degrees Celsius, and NVML's reasons for a lower clock, as bits."""

    mhz: int
    celsius: int
    reasons: int


def read(device: torch.device, nvml: Any = None) -> Clock | None:
    """The clock of ``device`` now; None where it cannot be asked. ``nvml``: a module with pynvml's interface."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return Clock(
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
    except (nvml.NVMLError, AttributeError):
        return None


def notes(before: Clock | None, after: Clock | None, group: Group) -> list[str]:
    """A sentence on the clocks of all ranks, and one for each throttled GPU; empty without NVML. All ranks call this."""
    mine = [-1] * 4
    if before is not None and after is not None:
        mine = [before.mhz, after.mhz, after.celsius, before.reasons | after.reasons]
    told = all_gather(torch.tensor([mine], dtype=torch.int64, device=group.device), group).tolist()
    return sentences(told)


def sentences(told: Sequence[Sequence[int]]) -> list[str]:
    """From (MHz before, MHz after, degrees, reasons) of each rank, -1 for a rank that cannot tell, to sentences."""
    known = [(rank, *values) for rank, values in enumerate(told) if values[0] >= 0]
    if not known:
        return []
    found = "; ".join(f"rank {rank} {before} to {after} MHz, {degrees} C" for rank, before, after, degrees, _ in known)
    lines = [f"SM clocks before and after: {found}."]
    for rank, *_, reasons in known:
        why = [words for bit, words in _REASONS.items() if reasons & bit]
        if why:
            lines.append(f"The GPU of rank {rank} was throttled by {' and '.join(why)}: its numbers are lower than it can do.")
    return lines
