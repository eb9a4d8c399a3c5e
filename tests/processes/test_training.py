"""dp x tp training on real processes equals one process on the whole batch, and is saved and loaded on any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import training_checks
from crosscut.distributed.launch import LaunchConfig, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, float]:
    """What all checks found, on one start of four ranks."""
    result = run(training_checks.check_all, (str(folder),), LaunchConfig(4, "gloo", "cpu"))
    assert result is not None
    return result


@pytest.mark.parametrize("how", ["ddp", "ddp accumulated", "fsdp"])
def test_data_parallel_around_split_layers(found: dict[str, float], how: str) -> None:
    assert found[how] < 2e-6


def test_fsdp_around_every_kind_of_cut(found: dict[str, float]) -> None:
    """torchtune 2420, pytorch 121020: clipping fails on mixed tensors and meshes."""
    assert found["fsdp parameters"] < 2e-6
    assert found["fsdp norms"] < 2e-6
    assert found["fsdp norm, replicas counted on every rank"] > 1.001  # so the line above can fail
    assert found["fsdp drift found"] == 1


@pytest.mark.parametrize("name", ["w.safetensors", "dcp"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_checkpoint_of_fsdp_loads_at_another_tp_and_dp(found: dict[str, float], name: str, tp: int) -> None:
    """pytorch 129229: FSDP2 with TP inside gave whole tensors in the wrong order. The optimizer's state comes too."""
    assert found[f"{name} at tp {tp}"] == 0
    assert found[f"{name} at tp {tp}, trained on"] < 5e-6


def test_torchs_own_tool_reads_what_fsdp_ranks_saved(found: dict[str, float], folder: Path) -> None:
    """pytorch 156002: DCP kept one shard of a split parameter."""
    assert found["dcp at tp 1"] == 0
    dcp_to_torch_save(folder / "dcp", folder / "whole.pt")
    whole, stored = torch.load(folder / "whole.pt"), load_file(folder / "w.safetensors")
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, stored[name])
        for key, value in whole["optimizer"]["state"][name].items():
            assert torch.equal(value, stored[f"optimizer.{key}.{name}"])


def test_recomputed_activations_draw_the_same_masks(found: dict[str, float]) -> None:
    assert found["recomputed dropout"] == 0


@pytest.mark.parametrize("how", ["scaler", "scaler fsdp"])
def test_an_inf_on_one_rank_skips_the_step_on_all(found: dict[str, float], how: str) -> None:
    assert found[how] == 1
