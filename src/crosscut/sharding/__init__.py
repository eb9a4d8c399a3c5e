"""Where each parameter is cut, as data: pure, torch-free, read by the loader, the splitter, the saver and the planner."""

from crosscut.sharding.cut import Column, Cut, Packed, Piece, Replicated, Row, shard_range, shard_sizes

__all__ = ["Column", "Cut", "Packed", "Piece", "Replicated", "Row", "shard_range", "shard_sizes"]
