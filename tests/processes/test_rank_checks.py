"""The collectives and the layers on real processes over gloo: what rank threads cannot show (other code below, real wires)."""

from __future__ import annotations

import torch

import rank_checks
from crosscut.distributed.launch import LaunchConfig, run


def test_collectives_over_gloo() -> None:
    assert run(rank_checks.check_collectives, (), LaunchConfig(2, "gloo", "cpu")) == 64


def test_layers_over_gloo() -> None:
    compared = run(rank_checks.check_layers, (torch.float32,), LaunchConfig(3, "gloo", "cpu"))
    assert compared is not None
    assert compared > 80


def test_all_reduce_norm_over_gloo() -> None:
    assert run(rank_checks.check_norm, (), LaunchConfig(2, "gloo", "cpu")) == 12
