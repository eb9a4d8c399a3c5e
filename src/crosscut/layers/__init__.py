"""Parallel layers: each equal to its unsplit self in output, gradients and initial weights, at any tp."""

from crosscut.layers.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.layers.mlp import ParallelMLP

__all__ = ["ColumnParallelLinear", "ParallelMLP", "RowParallelLinear"]
