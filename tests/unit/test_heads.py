"""Heads: every query head on exactly one rank, next to the KV head it needs, and shards that join to the original."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crosscut.errors import UsageError
from crosscut.layers.shards import join, take
from crosscut.sharding import Column, GroupedQKV, Heads, KVHeads, PackedQKV, QueryHeads
from crosscut.sharding.heads import HeadCut


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Heads, int]:
    """Heads of any grouping, and a tp that is legal for them."""
    kv_heads, group = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    return Heads(kv_heads * group, kv_heads, draw(st.integers(1, 3))), draw(st.integers(1, min(kv_heads * group, 12)))


@given(layouts())
def test_every_query_head_is_on_exactly_one_rank(layout: tuple[Heads, int]) -> None:
    heads, tp = layout
    dealt = [list(range(heads.heads))[heads.query_range(tp, rank)] for rank in range(tp)]
    assert [head for own in dealt for head in own] == list(range(heads.heads))
    assert all(dealt)
    spread = max(map(len, dealt)) - min(map(len, dealt))
    assert spread <= (1 if heads.kv_replicated(tp) else heads.group_size)


@given(layouts())
def test_a_rank_holds_the_kv_heads_that_its_query_heads_need_and_no_others(layout: tuple[Heads, int]) -> None:
    heads, tp = layout
    for rank in range(tp):
        queries = list(range(heads.heads))[heads.query_range(tp, rank)]
        own = list(range(heads.kv_heads))[heads.kv_range(tp, rank)]
        assert sorted({query * heads.kv_heads // heads.heads for query in queries}) == own
        used = [own[local] for local in heads.kv_of_query(tp, rank)]
        assert used == [query * heads.kv_heads // heads.heads for query in queries]


@given(layouts())
def test_kv_heads_are_replicated_only_when_there_are_more_ranks_than_kv_heads(layout: tuple[Heads, int]) -> None:
    heads, tp = layout
    owners = heads.kv_owners(tp)
    assert all(owners)
    assert (max(map(len, owners)) > 1) == (tp > heads.kv_heads) == heads.kv_replicated(tp)
    for kv, ranks in enumerate(owners):
        assert all(kv in range(heads.kv_heads)[heads.kv_range(tp, rank)] for rank in ranks)
    assert sum(map(len, owners)) == sum(len(range(heads.kv_heads)[heads.kv_range(tp, rank)]) for rank in range(tp))


@given(layouts(), st.sampled_from([QueryHeads, KVHeads, PackedQKV, GroupedQKV]), st.integers(0, 1))
def test_shards_join_to_the_original(layout: tuple[Heads, int], kind: type[HeadCut], dim: int) -> None:
    heads, tp = layout
    count = {QueryHeads: heads.heads, KVHeads: heads.kv_heads}.get(kind, heads.heads + 2 * heads.kv_heads)
    cut = kind(heads, dim=dim)
    shape = (count * heads.head_dim, 2) if dim == 0 else (2, count * heads.head_dim)
    full = torch.arange(count * heads.head_dim * 2).reshape(shape)
    shards = [take(full, cut, tp, rank) for rank in range(tp)]
    assert [tuple(s.shape) for s in shards] == [cut.shard_shape(shape, tp, rank) for rank in range(tp)]
    assert torch.equal(join(shards, cut, shape), full)
    assert torch.equal(take(full.select(1 - dim, 0), kind(heads), tp, 0), shards[0].select(1 - dim, 0))  # a bias likewise


@given(layouts())
def test_packed_rows_are_the_three_weights_cut_each_on_its_own(layout: tuple[Heads, int]) -> None:
    heads, tp = layout
    q, k, v = torch.arange((heads.heads + 2 * heads.kv_heads) * heads.head_dim).split(
        [n * heads.head_dim for n in (heads.heads, heads.kv_heads, heads.kv_heads)]
    )
    for rank in range(tp):
        own = [take(q, QueryHeads(heads), tp, rank), take(k, KVHeads(heads), tp, rank), take(v, KVHeads(heads), tp, rank)]
        assert torch.equal(take(torch.cat([q, k, v]), PackedQKV(heads), tp, rank), torch.cat(own))


@given(layouts())
def test_grouped_rows_are_each_kv_heads_own_queries_then_its_k_and_its_v(layout: tuple[Heads, int]) -> None:
    """A rank's shard, read head by head, is the three weights cut each on its own and put together by group again."""
    heads, tp = layout
    group, dim = heads.group_size, heads.head_dim
    q, k, v = (
        torch.arange(n * dim).view(n, dim) + 1000 * i for i, n in enumerate((heads.heads, heads.kv_heads, heads.kv_heads))
    )
    full = torch.cat([torch.cat([q[g * group : (g + 1) * group], k[g : g + 1], v[g : g + 1]]) for g in range(heads.kv_heads)])
    for rank in range(tp):
        queries, own = heads.query_range(tp, rank), heads.kv_range(tp, rank)
        wanted = []
        for g in range(own.start, own.stop):
            mine = [q[n] for n in range(queries.start, queries.stop) if n // group == g]
            wanted += [*mine, k[g], v[g]]
        assert torch.equal(take(full.flatten(), GroupedQKV(heads), tp, rank), torch.cat(wanted))


def test_known_layouts() -> None:
    def dealt(heads: Heads, tp: int) -> list[tuple[int, int]]:
        both = [(heads.query_range(tp, rank), heads.kv_range(tp, rank)) for rank in range(tp)]
        return [(q.stop - q.start, kv.stop - kv.start) for q, kv in both]

    assert dealt(Heads(9, 3, 64), 2) == [(6, 2), (3, 1)]
    assert dealt(Heads(9, 3, 64), 4) == [(3, 1), (2, 1), (2, 2), (2, 1)]
    assert dealt(Heads(32, 8, 128), 8) == [(4, 1)] * 8
    assert Heads(8, 2, 4).kv_owners(4) == [[0, 1], [2, 3]]
    assert Heads(8, 1, 4).kv_owners(3) == [[0, 1, 2]]
    assert Heads(8, 2, 4).kv_of_query(3, 1) == [0, 1, 1]


def test_a_contiguous_cut_of_packed_rows_would_have_the_right_shape_and_the_wrong_rows() -> None:
    full, cut = torch.arange(24), PackedQKV(Heads(4, 4, 2))
    wrong, right = take(full, Column(), 2, 0), take(full, cut, 2, 0)
    assert wrong.shape == right.shape
    assert not torch.equal(wrong, right)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Heads(9, 2, 4), r"9 query heads cannot share 2 KV heads evenly[\s\S]*kv_heads can be 1, 3, 9"),
        (lambda: Heads(0, 1, 4), "heads=0"),
        (lambda: Heads(2, 0, 4), "kv_heads=0"),
        (lambda: Heads(2, 2, -1), "head_dim=-1"),
        (lambda: Heads(4, 2, 8).query_range(5, 0), r"4 query heads cannot be dealt to 5 ranks[\s\S]*a tp from 1 to 4"),
        (lambda: Heads(4, 2, 8).kv_range(2, 2), "rank 2 is not one of 2 ranks"),
        (lambda: Heads(4, 2, 8).query_range(0, 0), "is not one of 0 ranks"),
        (lambda: QueryHeads(Heads(4, 2, 8)).pieces((30, 2), 2, 0), "30 features cannot hold 4 heads of 8"),
        (lambda: PackedQKV(Heads(4, 2, 8)).pieces((32,), 2, 0), r"cannot hold 8 heads of 8 \(q\+k\+v\)"),
        (lambda: QueryHeads(Heads(4, 2, 8), dim=1).pieces((32,), 2, 0), r"shape \[32\] has no dim 1"),
    ],
)
def test_what_cannot_work_is_refused(call: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()  # type: ignore[operator]
