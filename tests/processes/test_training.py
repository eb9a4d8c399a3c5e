"""dp x tp training on real processes equals one process on the whole batch."""

from __future__ import annotations

import pytest

import training_checks
from crosscut.distributed.launch import LaunchConfig, run


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_data_parallel_around_split_layers(how: str) -> None:
    difference = run(training_checks.train, (how,), LaunchConfig(4, "gloo", "cpu"))
    assert difference is not None
    assert difference < 2e-6
