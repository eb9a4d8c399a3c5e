"""Which attention heads a rank holds, and the cuts of the weights that follow from it: a head is never cut in two.

With grouped heads (GQA, arXiv 2305.13245; multi-query, arXiv 1911.02150) ``heads / kv_heads`` query heads in a row share one
KV head. Up to one rank per KV head, whole groups are dealt, and every KV head is on one rank. With more ranks than KV heads
the query heads are dealt, and a KV head is replicated on the ranks whose query heads need it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from crosscut.errors import UsageError
from crosscut.sharding.cut import Cut, shard_range


@dataclass(frozen=True)
class Heads:
    """The heads of one attention layer: N query heads, K KV heads (N for multi-head, 1 for multi-query), D features each.

    Raises UsageError (``bad-size``) for a size below 1 or query heads that are not a multiple of the KV heads.
    """

    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}", code="bad-size", fix="give a size of at least 1")
        if self.heads % self.kv_heads:
            legal = ", ".join(str(k) for k in range(1, self.heads + 1) if self.heads % k == 0)
            raise UsageError(
                f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly",
                code="bad-size",
                fix=f"with {self.heads} query heads kv_heads can be {legal}",
            )

    @property
    def group_size(self) -> int:
        """How many query heads share one KV head."""
        return self.heads // self.kv_heads

    def query_range(self, tp: int, rank: int) -> slice:
        """The query heads of rank ``rank``: ``Heads(9, 3, D).query_range(2, 0) == slice(0, 6)``.

        Raises UsageError (``bad-size``) when some rank would have none (tp > N), or rank is not one of tp.
        """
        if tp > self.heads:
            raise UsageError(
                f"{self.heads} query heads cannot be dealt to {tp} ranks: {tp - self.heads} of them would have none",
                code="bad-size",
                fix=f"use a tp from 1 to {self.heads}",
            )
        if self.kv_replicated(tp):
            return shard_range(self.heads, tp, rank)
        groups = shard_range(self.kv_heads, tp, rank)
        return slice(groups.start * self.group_size, groups.stop * self.group_size)

    def kv_range(self, tp: int, rank: int) -> slice:
        """The KV heads that rank ``rank``'s query heads need; ranges of neighbours overlap where heads are replicated."""
        queries = self.query_range(tp, rank)
        return slice(queries.start // self.group_size, (queries.stop - 1) // self.group_size + 1)

    def kv_of_query(self, tp: int, rank: int) -> list[int]:
        """For each query head of the rank, in order, which of the rank's own KV heads it uses: ``[0, 0, 0, 1, 1, 1]``."""
        queries, first = self.query_range(tp, rank), self.kv_range(tp, rank).start
        return [query // self.group_size - first for query in range(queries.start, queries.stop)]

    def kv_replicated(self, tp: int) -> bool:
        """Whether some KV head is on more than one rank, so that its gradient is a sum over ranks."""
        return tp > self.kv_heads

    def kv_owners(self, tp: int) -> list[list[int]]:
        """For each KV head the ranks that hold it: ``Heads(8, 2, D).kv_owners(4) == [[0, 1], [2, 3]]``."""
        ranges = [self.kv_range(tp, rank) for rank in range(tp)]
        return [[rank for rank, own in enumerate(ranges) if own.start <= kv < own.stop] for kv in range(self.kv_heads)]


@dataclass(frozen=True)
class HeadCut(Cut):
    """A cut between heads. ``blocks``: what lies along the cut dim, in order, each block with its heads side by side."""

    blocks: ClassVar[tuple[str, ...]]
    dim: int | None = field(default=0, kw_only=True)
    heads: Heads

    def runs(self, length: int, tp: int, rank: int) -> list[slice]:
        """As :meth:`Cut.runs`. Raises UsageError (``bad-size``) when ``length`` is not that of the heads."""
        heads = self.heads
        total = sum(heads.heads if block == "q" else heads.kv_heads for block in self.blocks)
        if length != total * heads.head_dim:
            raise UsageError(
                f"a parameter with {length} features cannot hold {total} heads of {heads.head_dim} ({'+'.join(self.blocks)})",
                code="bad-size",
                fix=f"dim {self.dim} must have {total * heads.head_dim} features; check heads, kv_heads and head_dim",
            )
        return [slice(run.start * heads.head_dim, run.stop * heads.head_dim) for run in self.head_runs(tp, rank)]

    def head_runs(self, tp: int, rank: int) -> list[slice]:
        """The heads of rank ``rank`` as runs of the heads that are stored, all blocks counted through."""
        heads, runs, start = self.heads, [], 0
        for block in self.blocks:
            mine = heads.query_range(tp, rank) if block == "q" else heads.kv_range(tp, rank)
            runs.append(slice(start + mine.start, start + mine.stop))
            start += heads.heads if block == "q" else heads.kv_heads
        return runs


@dataclass(frozen=True)
class QueryHeads(HeadCut):
    """By query heads: dim 0 of ``w_q [N*D, H]`` and its bias, or with ``dim=1`` the input features of ``w_o [H, N*D]``."""

    blocks: ClassVar[tuple[str, ...]] = ("q",)


@dataclass(frozen=True)
class KVHeads(HeadCut):
    """By KV heads, replicated where ranks share one: dim 0 of ``w_k``, ``w_v [K*D, H]`` and their biases."""

    blocks: ClassVar[tuple[str, ...]] = ("k",)


@dataclass(frozen=True)
class PackedQKV(HeadCut):
    """q, k and v stored as one, ``[(N+2K)*D, H]`` with all of q first: each is cut on its own, between its heads."""

    blocks: ClassVar[tuple[str, ...]] = ("q", "k", "v")


@dataclass(frozen=True)
class GroupedQKV(HeadCut):
    """q, k and v stored as one, by KV head: ``[K, N/K q heads and one k and one v, D]`` along the cut dim.

    GPT-NeoX's ``[N, 3, D]`` (K = N), Falcon-7b's ``[N q, k, v]`` (K = 1) and Falcon-40b's groups are all of this kind. A rank
    holds of each KV head it needs its own query heads, then the k and the v.
    """

    blocks: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def head_runs(self, tp: int, rank: int) -> list[slice]:
        heads, group = self.heads, self.heads.group_size
        queries, runs = heads.query_range(tp, rank), []
        for kv in range(*heads.kv_range(tp, rank).indices(heads.kv_heads)):
            first, start = kv * group, kv * (group + 2)
            mine = slice(max(queries.start, first) - first + start, min(queries.stop, first + group) - first + start)
            runs += [mine, slice(start + group, start + group + 2)]
        return runs
