"""What a layer keeps for its backward: measured on rank threads, against the terms that docs/memory.md derives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_bench import context

from crosscut.bench import block_memory
from crosscut.bench.block import BlockConfig, run
from crosscut.bench.block_memory import GPTBlock, derived_bytes, memory_rows, paper_bytes, terms
from crosscut.bench.memory import saved_bytes
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers import ParallelBlock

OnRanks = Callable[..., list[Any]]
GPT = GPTBlock(batch=2, tokens=64, hidden=64, heads=8, number=2, statistic=2)


def measured(on_ranks: OnRanks, world: int) -> list[int]:
    """Bytes of a layer, without and with sequence parallelism."""
    rows, notes = on_ranks(world, lambda mesh: memory_rows(mesh, [GPT], torch.bfloat16, (False, True), 2, None))[0]
    assert len(notes) == 1
    return [row.bytes for row in rows]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_layer_keeps_what_its_terms_say(on_ranks: OnRanks, world: int) -> None:
    for nbytes, sequence_parallel in zip(measured(on_ranks, world), (False, True), strict=True):
        assert nbytes == pytest.approx(derived_bytes(GPT, world, sequence_parallel), rel=0.05)


def test_the_terms_are_the_papers_but_for_masks_statistics_and_log_sum_exp() -> None:
    extra = {
        "dropout mask after attention",
        "dropout mask after the MLP",
        "its mean and deviation",
        "SDPA's log-sum-exp, float32",
    }
    for tp in (1, 2, 4, 8):
        for sequence_parallel in (False, True):
            theirs = paper_bytes(GPT, tp, sequence_parallel)
            assert theirs == GPT.elements * (34 / tp if sequence_parallel else 10 + 24 / tp)
            same = sum(t.nbytes / (tp if t.by_rank or sequence_parallel else 1) for t in terms(GPT) if t.what not in extra)
            masks = 2 * GPT.elements / (tp if sequence_parallel else 1)  # of one byte in the paper
            assert same + masks == theirs


def test_this_measurement_sees_a_tensor_too_many(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that keeps one more whole activation is outside the 5 %."""
    forward = ParallelBlock.forward

    def wasteful(self: ParallelBlock, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return forward(self, x * torch.ones_like(x), *args)

    monkeypatch.setattr(ParallelBlock, "forward", wasteful)
    for nbytes, sequence_parallel in zip(measured(on_ranks, 4), (False, True), strict=True):
        assert nbytes != pytest.approx(derived_bytes(GPT, 4, sequence_parallel), rel=0.05)


def test_each_storage_counts_once_and_whole_and_weights_not_at_all() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    assert saved_bytes(lambda: x @ weight, [weight]) == 4 * 8 * 4
    assert saved_bytes(lambda: (x @ weight) * (x @ weight), [weight]) == 3 * 4 * 8 * 4, "x once, and both products"
    wide = torch.randn(4, 16)
    assert saved_bytes(lambda: x * wide[:, :8], []) == 4 * 16 * 4, "a view keeps all of its storage"


def test_the_record_of_memory(on_ranks: OnRanks) -> None:
    config = BlockConfig(2, tokens=(16,), hidden=32, heads=4, memory=True)
    record = on_ranks(2, lambda mesh: run(context(mesh), config))[0]
    assert [(row.subject, row.impl, row.dtype) for row in record.rows] == [
        ("memory", "crosscut", "bfloat16"), ("memory", "crosscut_sp", "bfloat16")
    ]  # fmt: skip
    assert record.rows[0].shape == {"tokens": 16, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 128}
    assert set(record.rows[0].extra) == {"derived_bytes", "paper_bytes", "layers"}
    with pytest.raises(UsageError, match="15 tokens and 4 heads do not divide into 2 ranks"):
        on_ranks(2, lambda mesh: run(context(mesh), BlockConfig(2, tokens=(15,), hidden=32, heads=4, memory=True)))


def test_only_running_out_of_memory_is_told_as_that(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(block_memory._Stack, "both", failing)

    def body(mesh: Mesh) -> None:
        memory_rows(mesh, [GPT], torch.bfloat16, (False,), 2, 1 << 40)

    with pytest.raises(RuntimeError, match="something else"):
        on_ranks(1, body)
