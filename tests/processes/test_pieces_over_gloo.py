"""Schedules in pieces on real processes over gloo: asynchronous calls that really run beside the multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rank_checks
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.distributed.mesh import make_mesh
from crosscut.layers.carry import Library
from pieces_soak import soak


def check(ctx: Any) -> tuple[int, int]:
    """(tensors compared in layers that are forced into pieces, wrong elements in a soak)."""
    group = make_mesh(device=ctx.device).tp
    return rank_checks.check_layers(ctx, torch.bfloat16), soak(group, lambda: Library(group), 300, 7)


def test_layers_in_pieces_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSCUT_SCHEDULE", "pieces:2")
    found = run(check, (), LaunchConfig(2, "gloo", "cpu"))
    assert found is not None
    compared, wrong = found
    assert compared > 80
    assert wrong == 0
