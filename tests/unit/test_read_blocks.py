"""models.read: whatever the cut, the shape and the size of a block, a rank reads its own part and little else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError
from crosscut.layers.placed import Placed
from crosscut.layers.shards import take
from crosscut.models import read
from crosscut.models.read import Reader, blocks, run_jobs
from crosscut.models.slots import Slot
from crosscut.models.stream import NAMES
from crosscut.sharding import Column, Cut, GroupedQKV, Heads, KVHeads, Packed, PackedQKV, Replicated, Row
from crosscut.sharding.headers import Stored

CPU = torch.device("cpu")
HEADS = Heads(6, 2, 3)
CASES: dict[str, tuple[Cut, tuple[int, ...]]] = {
    "scalar": (Replicated(), ()),
    "vector": (Column(), (7,)),
    "whole": (Replicated(), (5, 4)),
    "column": (Column(), (11, 5)),
    "row": (Row(), (5, 11)),
    "packed": (Packed(0, (7, 5)), (12, 3)),
    "packed, transposed": (Packed(1, (7, 5)), (3, 12)),
    "packed experts": (Packed(1, (5, 5)), (3, 10, 2)),
    "row of experts": (Row(2), (3, 4, 9)),
    "kv heads": (KVHeads(HEADS), (6, 4)),
    "qkv": (PackedQKV(HEADS, dim=1), (4, 30)),
    "grouped qkv": (GroupedQKV(HEADS), (30, 2)),
}


def stored_file(folder: Path, values: torch.Tensor) -> Stored:
    """``values`` behind some bytes of something else."""
    path = folder / "tensors"
    path.write_bytes(b"12345678" + values.contiguous().flatten().view(torch.uint8).numpy().tobytes() + b"rest")
    return Stored("w", NAMES[values.dtype], tuple(values.shape), path, 8, 8 + values.nbytes)


def group(tp: int, rank: int) -> Group:
    return Group("tp", rank, tp, tuple(range(tp)), "none", CPU)


@pytest.mark.parametrize("short", [0, 64 << 10])
@pytest.mark.parametrize("name", CASES)
@given(tp=st.integers(1, 5), limit=st.integers(1, 200), wide=st.booleans())
@settings(max_examples=15, deadline=None)
def test_a_rank_reads_its_own_part(
    tmp_path_factory: pytest.TempPathFactory, name: str, short: int, tp: int, limit: int, wide: bool
) -> None:
    cut, shape = CASES[name]
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.bfloat16)
    stored = stored_file(tmp_path_factory.mktemp("read"), values)
    slot = Slot("w", Placed("w", values, cut, shape), cut, shape)
    before, read._SHORT = read._SHORT, short
    try:
        for rank in range(tp):
            mine = take(values, cut, tp, rank).to(torch.float32 if wide else torch.bfloat16)
            found = torch.full_like(mine, -1.0)
            with Reader(CPU) as reader:
                parts = list(blocks(stored, slot, found, group(tp, rank), limit))
                for part in parts:
                    reader.fill(part)
                assert reader.nbytes == sum(part.nbytes for part in parts)
                assert all(part.nbytes <= max(limit, 2) for part in parts)
                assert short or reader.nbytes <= 2 * values.itemsize * mine.numel()  # what lies between short runs is read too
            assert torch.equal(found, mine)
    finally:
        read._SHORT = before


def test_threads_read_into_buffers_of_their_own(tmp_path: Path) -> None:
    values = torch.arange(4000, dtype=torch.float32).reshape(40, 100)
    stored = stored_file(tmp_path, values)
    cut = Row()
    slot = Slot("w", Placed("w", values, cut, (40, 100)), cut, (40, 100))
    mine = torch.empty(40, 50)
    done: list[int] = []
    with Reader(CPU) as reader:
        parts = list(blocks(stored, slot, mine, group(2, 1), 800))
        bad = run_jobs([lambda part=part: reader.fill(part) for part in parts], True, done.append)  # type: ignore[misc]
    assert torch.equal(mine, values[:, 50:])
    assert done == list(range(len(parts)))
    assert bad == [False] * len(parts)
    assert all(one < two for one, two in pairwise(part.start for part in parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_is_seen(dtype: torch.dtype, value: float) -> None:
    """In every place of a vector register, and not where there is none."""
    largest = torch.finfo(dtype).max
    for at in (0, 1, 7, 8, 33, 1000, 4098):
        x = torch.linspace(-1, 1, 4099, dtype=torch.float64).to(dtype)
        x[5], x[6] = largest, -largest
        assert run_jobs([lambda x=x: x], True, lambda _: None) == [False]  # type: ignore[misc]
        x[at] = value
        assert run_jobs([lambda x=x: x], True, lambda _: None) == [True]  # type: ignore[misc]
        assert run_jobs([lambda x=x: x], False, lambda _: None) == [False]  # type: ignore[misc]


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    values = torch.zeros(100)
    stored = stored_file(tmp_path, values)
    stored.file.write_bytes(stored.file.read_bytes()[:100])
    slot = Slot("w", Placed("w", values, Replicated(), (100,)), Replicated(), (100,))
    (part,) = blocks(stored, slot, torch.empty(100), group(1, 0))
    with Reader(CPU) as reader, pytest.raises(UsageError, match="ended while it was read"):
        reader.fill(part)
