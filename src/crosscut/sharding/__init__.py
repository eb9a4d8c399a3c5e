"""Where each parameter is cut, as data: pure, torch-free, read by the loader, the splitter, the saver and the planner."""

from crosscut.sharding.cut import Column, Cut, Packed, Piece, Replicated, Row, shard_range, shard_sizes
from crosscut.sharding.heads import Heads, KVHeads, PackedQKV, QueryHeads

__all__ = [
    "Column",
    "Cut",
    "Heads",
    "KVHeads",
    "Packed",
    "PackedQKV",
    "Piece",
    "QueryHeads",
    "Replicated",
    "Row",
    "shard_range",
    "shard_sizes",
]
