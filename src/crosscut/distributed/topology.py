"""Which GPUs of this host are linked to which, by what and how fast: read from NVML, the driver's own account.

NVML needs no CUDA context and no torch, so a doctor, a record or a planner can ask while the GPUs are busy. Everything
here is quiet: without GPUs, driver or NVML the topology is empty.

Rates are the data sheets', without line coding: `nvidia-smi nvlink -s` says 26.56 GB/s for a link of an H200, whose 18
links are sold as 450 GB/s in each direction, 25 GB/s each.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_NVLINK_GBPS = {6: 20.0, 7: 25.0, 8: 25.0, 9: 25.0, 10: 50.0}
"""GB/s (1e9) of one NVLink in one direction by the GPU's major compute capability: P100, V100, A100, H100/H200, B200.
Source: NVIDIA's GPU data sheets (160, 300, 600, 900, 1800 GB/s over 4, 6, 12, 18, 18 links in both directions)."""

# NVML's distance between two GPUs over PCIe, named as `nvidia-smi topo -m` names it.
_PCIE_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True)
class Link:
    """How two GPUs of this host reach each other."""

    kind: str
    """nvlink, pcie, or self on the diagonal."""
    nvlinks: int = 0
    """NVLinks between the two; through NVSwitch, the links of the GPU that has fewer."""
    gbps: float = 0.0
    """GB/s (1e9) of those NVLinks together, in one direction; 0 without NVLink (see hardware.py for PCIe)."""
    p2p: bool = False
    """Whether the driver lets each read and write the other's memory."""
    pcie_path: str = ""
    """PIX (one switch), PXB (several), PHB (host bridge), NODE (one NUMA node), SYS (across sockets); '' unknown."""

    def __str__(self) -> str:
        if self.kind == "self":
            return "-"
        name = f"NV{self.nvlinks} {self.gbps:.0f} GB/s" if self.kind == "nvlink" else self.pcie_path or "PCIe"
        return name if self.p2p else f"{name} no P2P"


@dataclass(frozen=True)
class Topology:
    """The GPUs of this host in NVML's order, and the link between each two of them."""

    devices: tuple[str, ...] = ()
    driver: str | None = None
    links: tuple[tuple[Link, ...], ...] = ()

    def matrix(self) -> list[list[str]]:
        """The links as words, as a record holds them: ``'NV18 450 GB/s'``, ``'PIX'``, ``'SYS no P2P'``, ``'-'``."""
        return [[str(link) for link in row] for row in self.links]


def topology(nvml: Any = None) -> Topology:
    """The topology of this host; empty without GPUs, driver or NVML.

    ``nvml`` is a module with pynvml's interface (default: pynvml itself). All GPUs of the host are listed, whatever
    CUDA_VISIBLE_DEVICES says.
    """
    try:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
    except ImportError:
        return Topology()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return Topology()
    try:
        return _read(nvml)
    except nvml.NVMLError:
        return Topology()
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    ends = [_Ends.of(nvml, handle) for handle in handles]
    links = tuple(
        tuple(_link(nvml, handles, ends, a, b) if a != b else Link("self", p2p=True) for b in range(len(handles)))
        for a in range(len(handles))
    )
    names = tuple(_text(nvml.nvmlDeviceGetName(handle)) for handle in handles)
    return Topology(devices=names, driver=_text(nvml.nvmlSystemGetDriverVersion()), links=links)


@dataclass(frozen=True)
class _Ends:
    """The active NVLinks of one GPU: how many lead to a switch, and to which PCI bus the others lead."""

    bus: str
    to_switch: int
    to_gpu: tuple[str, ...]
    link_gbps: float

    @classmethod
    def of(cls, nvml: Any, handle: Any) -> _Ends:
        to_switch, to_gpu = 0, []
        active = list(_active_links(nvml, handle))
        for link in active:
            kind = _ask(nvml, None, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            remote = _ask(nvml, None, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                to_switch += 1
            elif remote is not None:
                to_gpu.append(_bus(remote))
        gbps = _link_gbps(nvml, handle) if active else 0.0
        return cls(_bus(nvml.nvmlDeviceGetPciInfo(handle)), to_switch, tuple(to_gpu), gbps)


def _link(nvml: Any, handles: list[Any], ends: list[_Ends], a: int, b: int) -> Link:
    nvlinks = ends[a].to_gpu.count(ends[b].bus) + min(ends[a].to_switch, ends[b].to_switch)
    level = _ask(nvml, None, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
    return Link(
        kind="nvlink" if nvlinks else "pcie",
        nvlinks=nvlinks,
        gbps=nvlinks * min(ends[a].link_gbps, ends[b].link_gbps),
        p2p=_p2p(nvml, handles[a], handles[b]),
        pcie_path=_PCIE_PATHS.get(level, ""),
    )


def _p2p(nvml: Any, a: Any, b: Any) -> bool:
    """Reading and writing both, in either direction."""
    wanted = (nvml.NVML_P2P_CAPS_INDEX_READ, nvml.NVML_P2P_CAPS_INDEX_WRITE)
    answers = [_ask(nvml, None, nvml.nvmlDeviceGetP2PStatus, x, y, cap) for x, y in ((a, b), (b, a)) for cap in wanted]
    return all(answer == nvml.NVML_P2P_STATUS_OK for answer in answers)


def _active_links(nvml: Any, handle: Any) -> Iterator[int]:
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _ask(nvml, 0, nvml.nvmlDeviceGetNvLinkState, handle, link):
            yield link


def _link_gbps(nvml: Any, handle: Any) -> float:
    """GB/s of one link in one direction: the data sheet's where it is known, else what the driver reports."""
    major, minor = _ask(nvml, (0, 0), nvml.nvmlDeviceGetCudaComputeCapability, handle)
    if major in _NVLINK_GBPS and (major, minor) != (8, 6):  # 8.6 (RTX 3090, A40) has slower links than A100
        return _NVLINK_GBPS[major]
    values = _ask(nvml, (), nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    return next((value.value.uiVal / 1e3 for value in values if value.nvmlReturn == nvml.NVML_SUCCESS), 0.0)


def _ask(nvml: Any, otherwise: Any, call: Any, *args: Any) -> Any:
    """One NVML call; ``otherwise`` when this GPU or driver does not answer it."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return otherwise


def _bus(pci: Any) -> str:
    return _text(pci.busId).lower()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
