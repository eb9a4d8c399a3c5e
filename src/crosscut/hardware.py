"""Peak figures of GPUs and links, from the makers' data sheets, and what NCCL was measured to reach on some of them.

A peak is a limit to compare with, never a measurement. Sources: NVIDIA data sheets of each GPU (dense figures, SXM where a
form is not named); NVLink generations from the same. Memory is the total that nvidia-smi prints, which no data sheet says:
github.com/modal-labs/modal-client/pull/2797 for H100, A100, A10, L40S and L4, printed listings in public issues for the
others (RLinf/RLinf#255 for the 4090). A :class:`Reference` is a measurement, and names who made it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosscut.errors import choose


@dataclass(frozen=True)
class Gpu:
    """One GPU model. Rates are peaks: TFLOP/s dense bf16, GB/s (1e9) of memory, GB/s of NVLink in one direction."""

    key: str
    match: str
    memory_mib: int
    """MiB (2**20 bytes) in all, of which the driver and CUDA take some."""
    memory_gbps: float
    bf16_tflops: float
    nvlink_gbps: float
    pcie_gbps: float


# key, a part of the name that the driver reports, memory MiB, memory GB/s, dense bf16 TFLOP/s, NVLink and PCIe GB/s one way
GPUS: tuple[Gpu, ...] = (
    Gpu("b200", "B200", 183359, 8000, 2250, 900, 64),
    Gpu("h200", "H200", 143771, 4800, 989, 450, 64),
    Gpu("h100-pcie", "H100 PCIe", 81559, 2000, 756, 0, 64),
    Gpu("h100-80", "H100", 81559, 3350, 989, 450, 64),
    Gpu("a100-80", "A100-SXM4-80GB", 81920, 2039, 312, 300, 32),
    Gpu("a100-40", "A100-SXM4-40GB", 40960, 1555, 312, 300, 32),
    Gpu("a10", "A10", 23028, 600, 125, 0, 32),
    Gpu("l40s", "L40S", 46068, 864, 362, 0, 32),
    Gpu("l4", "L4", 23034, 300, 121, 0, 32),
    Gpu("4090", "RTX 4090", 24564, 1008, 165, 0, 32),
    Gpu("3090", "RTX 3090", 24576, 936, 71, 56, 32),
)


def named_gpu(key: str) -> Gpu:
    """The entry with that key. Raises UsageError (``bad-option``) naming the keys when there is none."""
    keys = [entry.key for entry in GPUS]
    return GPUS[keys.index(choose("GPU", key.lower(), keys))]


def find_gpu(name: str) -> Gpu | None:
    """The entry for a device name as the driver reports it (``'NVIDIA H200'``), None when it is not in the table."""
    words = name.replace("-", " ")
    for gpu in GPUS:
        if f" {gpu.match.replace('-', ' ')} " in f" {words} ":
            return gpu
    return None


@dataclass(frozen=True)
class Wire:
    """What joins the GPUs of one host."""

    kind: str
    """nvlink, pcie (GPUs reach each other over PCIe), host (P2P is off: through the CPU's memory), mixed, or unknown."""
    gbps: float | None
    """Peak in one direction, GB/s (1e9): of one GPU's NVLinks, or of its PCIe slot. None when it is not known."""
    name: str
    """The link's word in the record (``'NV18'``, ``'SYS'``); of mixed links, all of them."""


def wire(device: str, links: Sequence[Sequence[Any]], world: int) -> Wire:
    """What joins ``world`` GPUs named ``device``, read from a record's ``links`` matrix (distributed/topology.py).

    The matrix lists every GPU of the host. When the links differ and not all its GPUs took part, nobody knows which
    links were used: ``mixed``. When all took part, the weakest link counts.
    """
    words = sorted({str(link) for i, row in enumerate(links) for j, link in enumerate(row) if i != j})
    wires = [_wire(device, word) for word in words]
    if not wires:
        return Wire("unknown", None, "")
    if len(wires) > 1 and len(links) != world:
        return Wire("mixed", None, ", ".join(words))
    order = ("unknown", "host", "pcie", "nvlink")
    return min(wires, key=lambda link: (order.index(link.kind), link.gbps or 0.0))


def _wire(device: str, word: str) -> Wire:
    """One link from its word: ``'NV18 450 GB/s'``, ``'PIX'``, ``'SYS no P2P'``."""
    match = re.fullmatch(r"(NV\d+|PIX|PXB|PHB|NODE|SYS|PCIe)(?: (\d+) GB/s)?( no P2P)?", word)
    gpu = find_gpu(device)
    if match is None:
        return Wire("unknown", None, word)
    name, rate, no_p2p = match.groups()
    if no_p2p:
        return Wire("host", gpu.pcie_gbps if gpu else None, name)
    if name.startswith("NV"):
        return Wire("nvlink", float(rate) if rate else gpu.nvlink_gbps if gpu else None, name)
    return Wire("pcie", gpu.pcie_gbps if gpu else None, name)


@dataclass(frozen=True)
class Reference:
    """What NCCL reached: bus bandwidth from ``low`` to ``high`` GB/s (nccl-tests' definition) at ``nbytes`` and above."""

    gpus: tuple[str, ...]
    op: str
    world: int
    nbytes: int
    low: float
    high: float
    machine: str
    source: str


_HOPPER = ("h200", "h100-80")
_OURS = "measured for crosscut with NCCL 2.28.9 in a CUDA graph"
_BENCH = "nccl-collectives-bench, NCCL 2.18.3 and 2.29.2"
_MIB, _GIB = 1 << 20, 1 << 30


def _two_h200(op: str, **at: float) -> list[Reference]:
    """References for two H200 from GB/s at 16, 64 and 256 MiB (``m16``...) and at 1 GiB (``g1``)."""
    sizes = {"m16": 16 * _MIB, "m64": 64 * _MIB, "m256": 256 * _MIB, "g1": _GIB}
    return [Reference(_HOPPER, op, 2, sizes[size], rate, rate, "two H200", _OURS) for size, rate in at.items()]


# All on one host with all its NVLinks (18 a GPU). Where a source says "peak" and no size, it is asked of 1 GiB only; on 8
# GPUs the peak needs more than 256 MiB (nccl-tests#212). all_reduce is Ring on 2 and 4 GPUs, NVLS (summed in the switch)
# from 6 on, where busbw may exceed the link's rate.
REFERENCES: tuple[Reference, ...] = (
    *_two_h200("all_reduce", m16=221.0, m64=270.2, m256=299.8),
    Reference(_HOPPER, "all_reduce", 2, _GIB, 331.8, 348, "two H100 or H200", f"{_OURS}; {_BENCH}"),
    *_two_h200("all_gather", m16=142.5, m64=201.4, m256=242.8, g1=265.9),
    *_two_h200("reduce_scatter", m16=151.2, m64=197.0, m256=225.2, g1=265.4),
    *_two_h200("broadcast", m16=277.2, m64=320.7, m256=357.1, g1=367.4),
    *_two_h200("all_to_all", m16=142.8, m64=220.2, m256=275.0, g1=327.4),
    Reference(_HOPPER, "all_reduce", 4, 256 * _MIB, 341, 341, "four H100", f"{_BENCH}, protocol Simple"),
    Reference(_HOPPER, "all_reduce", 4, _GIB, 365, 376, "four H100", _BENCH),
    Reference(_HOPPER, "all_gather", 4, _GIB, 344, 355, "four H100", _BENCH),
    Reference(_HOPPER, "reduce_scatter", 4, _GIB, 351, 351, "four H100", _BENCH),
    Reference(_HOPPER, "all_reduce", 6, _GIB, 443, 443, "six H100", _BENCH),
    Reference(_HOPPER, "all_reduce", 8, 512 * _MIB, 475, 485, "eight H100 or H200", "nccl-tests#272, NCCL Inspector"),
    Reference(_HOPPER, "all_gather", 8, _GIB, 360, 360, "eight H100", "nccl-tests#326"),
    Reference(_HOPPER, "reduce_scatter", 8, _GIB, 366, 366, "eight H100", "NCCL Inspector"),
)


def references(device: str, link: Wire, op: str, world: int) -> list[Reference]:
    """The references for ``op`` on ``world`` GPUs named ``device`` joined by ``link``, by size; empty when there is none.

    They hold for GPUs that have all their NVLinks: two cards of another form with fewer of them get none.
    """
    gpu = find_gpu(device)
    if gpu is None or link.kind != "nvlink" or (link.gbps or 0.0) < gpu.nvlink_gbps:
        return []
    found = [ref for ref in REFERENCES if gpu.key in ref.gpus and (ref.op, ref.world) == (op, world)]
    return sorted(found, key=lambda ref: ref.nbytes)
