"""Peak figures of GPUs and links, from the makers' data sheets. A limit to compare with, never a measurement.

Sources: NVIDIA data sheets of each GPU (dense figures, SXM where a form is not named); NVLink generations from the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU model. Rates are peaks: TFLOP/s dense bf16, GB/s (1e9) of memory, GB/s of NVLink in one direction."""

    key: str
    match: str
    memory_gb: float
    memory_gbps: float
    bf16_tflops: float
    nvlink_gbps: float
    pcie_gbps: float


# key, a part of the name that the driver reports, memory GB, memory GB/s, dense bf16 TFLOP/s, NVLink and PCIe GB/s one way
GPUS: tuple[Gpu, ...] = (
    Gpu("b200", "B200", 180, 8000, 2250, 900, 64),
    Gpu("h200", "H200", 141, 4800, 989, 450, 64),
    Gpu("h100-pcie", "H100 PCIe", 80, 2000, 756, 0, 64),
    Gpu("h100-80", "H100", 80, 3350, 989, 450, 64),
    Gpu("a100-80", "A100-SXM4-80GB", 80, 2039, 312, 300, 32),
    Gpu("a100-40", "A100-SXM4-40GB", 40, 1555, 312, 300, 32),
    Gpu("a10", "A10", 24, 600, 125, 0, 32),
    Gpu("l40s", "L40S", 48, 864, 362, 0, 32),
    Gpu("l4", "L4", 24, 300, 121, 0, 32),
    Gpu("4090", "RTX 4090", 24, 1008, 165, 0, 32),
    Gpu("3090", "RTX 3090", 24, 936, 71, 56, 32),
)


def find_gpu(name: str) -> Gpu | None:
    """The entry for a device name as the driver reports it (``'NVIDIA H200'``), None when it is not in the table."""
    words = name.replace("-", " ")
    for gpu in GPUS:
        if f" {gpu.match.replace('-', ' ')} " in f" {words} ":
            return gpu
    return None
