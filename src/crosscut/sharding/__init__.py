"""Where each parameter is cut, as data: pure, torch-free, read by the loader, the splitter, the saver and the planner."""

from crosscut.sharding.cut import Column, Cut, Packed, Piece, Replicated, Row, shard_range, shard_sizes
from crosscut.sharding.families import FAMILIES
from crosscut.sharding.family import Family, Local, Place, Rule, Size, Stack, cut_of
from crosscut.sharding.heads import GroupedQKV, Heads, KVHeads, PackedQKV, QueryHeads
from crosscut.sharding.roles import Role

__all__ = [
    "FAMILIES",
    "Column",
    "Cut",
    "Family",
    "GroupedQKV",
    "Heads",
    "KVHeads",
    "Local",
    "Packed",
    "PackedQKV",
    "Piece",
    "Place",
    "QueryHeads",
    "Replicated",
    "Role",
    "Row",
    "Rule",
    "Size",
    "Stack",
    "cut_of",
    "shard_range",
    "shard_sizes",
]
