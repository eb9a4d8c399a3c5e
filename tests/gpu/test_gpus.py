"""On NVIDIA GPUs: the checks of the CPU tiers over NCCL, CUDA graphs, and the cost of Python.

Run with ``pytest -m gpu``. Tests of a split need two GPUs or more and are skipped on one.
"""

from __future__ import annotations

import pytest
import torch

import rank_checks
from crosscut.bench.linear import LinearConfig, run
from crosscut.distributed.launch import LaunchConfig
from crosscut.distributed.launch import run as on_ranks
from crosscut.distributed.topology import topology

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU")]
several = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@several
def test_collectives_over_nccl() -> None:
    assert on_ranks(rank_checks.check_collectives, (), LaunchConfig(GPUS)) == 64


@several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layers_over_nccl(dtype: torch.dtype) -> None:
    compared = on_ranks(rank_checks.check_layers, (dtype,), LaunchConfig(GPUS))
    assert compared is not None
    assert compared > 80


@pytest.mark.parametrize("world", [1, pytest.param(GPUS, marks=several)])
def test_layers_in_cuda_graphs(world: int) -> None:
    assert on_ranks(rank_checks.check_graph, (), LaunchConfig(world)) == 20


@pytest.mark.parametrize("world", [1, pytest.param(GPUS, marks=several)])
def test_bench_linear_measures_and_checks(world: int) -> None:
    shapes = ("1x256->512", "5x256->510", "3x256->512->256")
    record = on_ranks(
        run, (LinearConfig(world, shapes, against=("nccl",) if world > 1 else (), seconds=0.02),), LaunchConfig(world)
    )
    assert record is not None
    assert record.config["correct"] is True
    assert {row.mode for row in record.rows} == {"eager", "graph"}
    assert "H200" not in record.hardware.device or record.hardware.driver
    for row in record.rows:
        assert row.us is not None
        assert 0.5 < row.us.p50 < 1e5
        assert row.error is not None or row.shape is None or row.impl == "no_comm"


@several
def test_an_eager_mlp_costs_no_more_python_than_by_hand() -> None:
    times = on_ranks(rank_checks.eager_overhead, (1, 4096, 14336), LaunchConfig(GPUS))
    assert times is not None
    assert times["crosscut"] <= 1.1 * times["nccl"], times


def test_topology_sees_every_gpu() -> None:
    found = topology()
    assert len(found.devices) >= GPUS
    assert found.driver
    assert all(found.links[i][i].kind == "self" for i in range(len(found.devices)))
