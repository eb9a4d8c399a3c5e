"""What every record says of the machine and the versions it ran with."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from crosscut.distributed.mesh import Mesh
from crosscut.distributed.topology import topology
from crosscut.records import Hardware, base_versions


def hardware(mesh: Mesh) -> Hardware:
    """The devices that the ranks of ``mesh`` use, with their links; on CPU, the processor and its cores."""
    if mesh.device.type == "cuda":
        links = topology()
        return Hardware(torch.cuda.get_device_name(mesh.device), mesh.world_size, links.matrix(), links.driver)
    return Hardware(f"CPU, {torch.get_num_threads() * mesh.world_size} threads, {_processor()}", mesh.world_size)


def versions(mesh: Mesh) -> dict[str, str]:
    """Versions of python, crosscut, torch and, on GPUs, CUDA and NCCL."""
    found = base_versions() | {"torch": torch.__version__}
    if mesh.device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
