"""Parallel layers: each equal to its unsplit self in output, gradients and initial weights, at any tp."""

from crosscut.layers.cross_entropy import vocab_parallel_cross_entropy
from crosscut.layers.embedding import VocabParallelEmbedding
from crosscut.layers.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.layers.mlp import ParallelMLP

__all__ = [
    "ColumnParallelLinear",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
