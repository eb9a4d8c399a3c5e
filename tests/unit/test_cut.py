"""Cuts: every element goes to exactly one rank, in order, and the shards join to the original."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crosscut.errors import UsageError
from crosscut.layers.shards import join, take
from crosscut.sharding import Column, Cut, Packed, Replicated, Row, shard_range, shard_sizes

sizes = st.integers(0, 40)
tps = st.integers(1, 9)


@given(sizes, tps)
def test_shard_sizes_deal_everything_as_evenly_as_possible(total: int, tp: int) -> None:
    dealt = shard_sizes(total, tp)
    assert sum(dealt) == total
    assert max(dealt) - min(dealt) <= 1
    assert dealt == [len(part) for part in torch.arange(total).tensor_split(tp)]


@given(sizes, tps)
def test_shard_ranges_follow_each_other(total: int, tp: int) -> None:
    covered = [i for rank in range(tp) for i in range(total)[shard_range(total, tp, rank)]]
    assert covered == list(range(total))


@given(st.integers(1, 20), st.integers(1, 20), tps, st.sampled_from([Column(), Row(), Replicated()]))
def test_shards_join_to_the_original(rows: int, columns: int, tp: int, cut: Cut) -> None:
    full = torch.arange(rows * columns).reshape(rows, columns)
    shards = [take(full, cut, tp, rank) for rank in range(tp)]
    assert [tuple(s.shape) for s in shards] == [cut.shard_shape(full.shape, tp, rank) for rank in range(tp)]
    assert torch.equal(join(shards, cut, (rows, columns)), full)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), tps)
def test_packed_parts_are_cut_each_on_its_own(parts: list[int], tp: int) -> None:
    full = torch.arange(sum(parts))
    cut = Packed(sizes=tuple(parts))
    shards = [take(full, cut, tp, rank) for rank in range(tp)]
    for rank, shard in enumerate(shards):
        own = torch.cat([part.tensor_split(tp)[rank] for part in full.split(parts)])
        assert torch.equal(shard, own)
    assert torch.equal(join(shards, cut, (sum(parts),)), full)


def test_a_contiguous_cut_of_packed_rows_would_be_wrong() -> None:
    gate_up = torch.arange(8)
    assert not torch.equal(take(gate_up, Column(), 2, 0), take(gate_up, Packed(sizes=(4, 4)), 2, 0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shard_sizes(4, 0), "cannot cut 4 elements for 0 ranks"),
        (lambda: shard_range(4, 2, 2), "rank 2 is not one of 2 ranks"),
        (lambda: Row().pieces((4,), 2, 0), r"shape \[4\] has no dim 1"),
        (lambda: Packed(sizes=(3, 4)).pieces((8, 2), 2, 0), "add up to 7, the parameter has 8 rows"),
    ],
)
def test_what_cannot_be_cut_is_refused(call: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()  # type: ignore[operator]
