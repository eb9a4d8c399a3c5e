"""bench collectives on real GPUs: every implementation is exact in every mode, and none is silently missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crosscut.bench import collectives
from crosscut.distributed.launch import LaunchConfig, RankContext, run
from crosscut.records import RunRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
IMPLS = ("nccl", "nccl_symmetric", "torch_one_shot", "torch_two_shot", "crosscut", "gloo")


def measure(ctx: RankContext, config: dict[str, Any]) -> RunRecord:
    return collectives.run(ctx, collectives.CollectivesConfig(ctx.world_size, **config))


def measured(**config: Any) -> RunRecord:
    record = run(measure, ({"seconds": 0.002} | config,), LaunchConfig(2, "nccl", "cuda"))
    assert record is not None
    assert record.config["correct"] is True, record.notes
    return record


def test_every_implementation_is_exact_in_every_mode() -> None:
    record = measured(sizes=(4096, 1 << 20, 16 << 20), impls=IMPLS, modes=("eager", "graph", "host"))
    modes: dict[str, set[str]] = {}
    for row in record.rows:
        if row.us is not None:
            modes.setdefault(row.impl, set()).add(row.mode)
    on_gpus = {impl: {"eager", "graph", "host"} for impl in IMPLS if impl != "gloo"}
    assert modes == on_gpus | {"gloo": {"eager", "host"}}, record.notes
    assert any(note.startswith("SM clocks before and after: rank 0 ") for note in record.notes)


def test_pairs_cold_caches_and_odd_sizes() -> None:
    record = measured(sizes=(6, 4098, 100_002), pairs=True, cold=True, root=1, dtype="float16")
    assert sum(row.subject == "pair" for row in record.rows) == 6
    assert {row.impl for row in record.rows if row.subject == "broadcast"} == {"nccl", "crosscut"}
