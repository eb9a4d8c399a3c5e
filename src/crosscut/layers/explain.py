"""Why a layer runs as it does: its schedules in words, for ``--explain``."""

from __future__ import annotations

from torch import nn

from crosscut.layers.block import ParallelBlock
from crosscut.layers.head import VocabParallelHead
from crosscut.layers.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.layers.planning import scheduled
from crosscut.layers.qkv import QKVParallelLinear


def explain(layer: nn.Module, tokens: int) -> str:
    """One line for each split multiply in ``layer``: which schedule it takes for ``tokens`` (of all ranks), and why.

    ``layer``: a linear layer, an MLP, attention, a block, a model. A collective call where kernels are not built yet.
    """
    lines, shared = [], set[nn.Module]()
    for name, module in layer.named_modules():
        if isinstance(module, ParallelBlock) and module.parallel_residual:
            shared |= {module.attention.qkv, module.mlp.up}
        found = "plain: one exchange serves both branches" if module in shared else _schedule(module, tokens)
        if found:
            lines.append(f"{name}: {found}" if name else found)
    return "\n".join(lines)


def _schedule(module: nn.Module, tokens: int) -> str:
    if isinstance(module, RowParallelLinear):
        if not module.reduce_output:
            return "plain: the caller sums"
        op = "multiply_scatter" if module.sequence_parallel else "multiply_reduce"
        inner, outer = -(-module.in_features // module.group.size), module.out_features
    elif isinstance(module, ColumnParallelLinear | QKVParallelLinear):
        sequence = module.sequence_dim is not None if isinstance(module, QKVParallelLinear) else module.sequence_parallel
        if not sequence and not getattr(module, "gather_output", False):
            return "plain: nothing to communicate forward"
        op = "gather_multiply" if sequence else "multiply_gather"
        inner, outer = module.in_features, -(-module.out_features // module.group.size)
    else:
        return "plain: a head is never cut into pieces" if isinstance(module, VocabParallelHead) else ""
    return str(scheduled(module.group, op, module.weight, tokens, inner, outer))
