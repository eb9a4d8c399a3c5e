"""Parallel layers: each equal to its unsplit self in output, gradients and initial weights, at any tp."""

from crosscut.layers.attention import ParallelAttention
from crosscut.layers.block import ParallelBlock
from crosscut.layers.cross_entropy import vocab_parallel_cross_entropy
from crosscut.layers.embedding import VocabParallelEmbedding
from crosscut.layers.head import VocabParallelHead
from crosscut.layers.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.layers.mlp import ParallelMLP
from crosscut.layers.norm import LayerNorm, RMSNorm
from crosscut.layers.random import ParallelDropout, manual_seed
from crosscut.layers.replicas import broadcast_parameters, check_replicas, clip_grad_norm_, sum_partial_gradients
from crosscut.layers.scaler import GradScaler

__all__ = [
    "ColumnParallelLinear",
    "GradScaler",
    "LayerNorm",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelDropout",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "broadcast_parameters",
    "check_replicas",
    "clip_grad_norm_",
    "manual_seed",
    "sum_partial_gradients",
    "vocab_parallel_cross_entropy",
]
