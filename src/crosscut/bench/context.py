"""What every record says of the machine and the versions it ran with."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from crosscut.distributed.mesh import Mesh
from crosscut.distributed.topology import topology
from crosscut.records import Hardware, Row, RunRecord, base_versions, source_commit


def make_record(
    command: str, config: dict[str, Any], mesh: Mesh, rows: list[Row], started: str, notes: Sequence[str]
) -> RunRecord:
    """The record of a run on ``mesh``, with all that every record says."""
    return RunRecord(
        command=command,
        config=config,
        hardware=hardware(mesh),
        versions=versions(mesh),
        rows=rows,
        commit=source_commit(),
        started=started,
        notes=list(notes),
    )


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
