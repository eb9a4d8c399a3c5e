"""Links between GPUs, read from a stand-in for NVML."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from crosscut.distributed.topology import Link, Topology, topology


class _NvmlError(Exception):
    pass


@dataclass
class _FakeNvml:
    """Answers as pynvml does. ``nvlinks[i]`` lists where GPU i's links lead: another GPU's index, 'switch' or None (down)."""

    count: int
    nvlinks: dict[int, list[int | str | None]] = field(default_factory=dict)
    p2p: bool = True
    level: int = 50
    capability: tuple[int, int] = (9, 0)
    reported_mbps: int = 0
    broken: str = ""
    shutdowns: int = 0

    NVMLError = _NvmlError
    NVML_SUCCESS = 0
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_WRITE = 0, 1
    NVML_P2P_STATUS_OK = 0
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def _check(self, call: str) -> None:
        if call == self.broken:
            raise _NvmlError(call)

    def _end(self, handle: int, link: int) -> int | str:
        ends = self.nvlinks.get(handle, [])
        end = ends[link] if link < len(ends) else None
        if end is None:
            raise _NvmlError("no such link")
        return end

    def nvmlInit(self) -> None:
        self._check("nvmlInit")

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._check("nvmlDeviceGetHandleByIndex")
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86"

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:A{handle}:00.0")

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        self._end(handle, link)
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self._end(handle, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        end = self._end(handle, link)
        return SimpleNamespace(busId=f"00000000:{'C0' if end == 'switch' else f'a{end}'}:00.0".encode())

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.capability

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        self._check("nvmlDeviceGetFieldValues")
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.reported_mbps)) for _ in fields]

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, capability: int) -> int:
        self._check("nvmlDeviceGetP2PStatus")
        return 0 if self.p2p else 4

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        self._check("nvmlDeviceGetTopologyCommonAncestor")
        return self.level


def test_two_gpus_joined_by_18_links() -> None:
    nvml = _FakeNvml(2, {0: [1] * 18, 1: [0] * 18})
    found = topology(nvml)
    assert found.devices == ("NVIDIA H200", "NVIDIA H200")
    assert found.driver == "570.86"
    assert found.links[0][1] == Link("nvlink", 18, 450.0, True, "SYS")
    assert found.matrix() == [["-", "NV18 450 GB/s"], ["NV18 450 GB/s", "-"]]
    assert nvml.shutdowns == 1


def test_eight_gpus_through_nvswitch() -> None:
    found = topology(_FakeNvml(8, {gpu: ["switch"] * 18 for gpu in range(8)}))
    for a in range(8):
        for b in range(8):
            assert found.matrix()[a][b] == ("-" if a == b else "NV18 450 GB/s")


def test_gpu_with_links_down_limits_the_pair() -> None:
    ends: dict[int, list[int | str | None]] = {0: ["switch"] * 18, 1: ["switch", None] * 9}
    assert topology(_FakeNvml(2, ends)).links[0][1].nvlinks == 9


def test_mesh_of_direct_links_counts_each_pair_alone() -> None:
    ends: dict[int, list[int | str | None]] = {0: [1, 1, 2], 1: [0, 0], 2: [0]}
    found = topology(_FakeNvml(3, ends, capability=(8, 0), level=10))
    assert found.matrix() == [["-", "NV2 50 GB/s", "NV1 25 GB/s"], ["NV2 50 GB/s", "-", "PIX"], ["NV1 25 GB/s", "PIX", "-"]]


@pytest.mark.parametrize(("level", "path"), [(10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS")])
def test_pcie_without_p2p(level: int, path: str) -> None:
    found = topology(_FakeNvml(2, p2p=False, level=level))
    assert found.links[0][1] == Link("pcie", 0, 0.0, False, path)
    assert found.matrix()[0][1] == f"{path} no P2P"


@pytest.mark.parametrize(
    ("capability", "mbps", "gbps"),
    [((10, 0), 53125, 50.0), ((9, 0), 26562, 25.0), ((8, 6), 14062, 14.062), ((12, 0), 60000, 60.0)],
)
def test_rate_of_a_link(capability: tuple[int, int], mbps: int, gbps: float) -> None:
    nvml = _FakeNvml(2, {0: [1], 1: [0]}, capability=capability, reported_mbps=mbps)
    assert topology(nvml).links[0][1].gbps == gbps


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_broken_nvml_is_quiet(broken: str) -> None:
    assert topology(_FakeNvml(2, broken=broken)) == Topology()


def test_calls_that_a_gpu_does_not_answer_cost_only_their_answer() -> None:
    nvml: Any = _FakeNvml(2, {0: [1] * 4, 1: [0] * 4}, broken="nvmlDeviceGetTopologyCommonAncestor")
    assert topology(nvml).links[0][1] == Link("nvlink", 4, 100.0, True, "")
    nvml = _FakeNvml(2, broken="nvmlDeviceGetP2PStatus")
    assert topology(nvml).matrix()[0][1] == "SYS no P2P"


def test_no_torch_and_quiet_on_this_host() -> None:
    code = "import sys; from crosscut.distributed.topology import topology; topology(); sys.exit('torch' in sys.modules)"
    environ = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
