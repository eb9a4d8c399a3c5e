"""``crosscut bench mlp``: a Transformer's MLP, the column-row pair, on one device and split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosscut.bench.layers import LayerConfig, measured
from crosscut.bench.shapes import parse_sizes
from crosscut.bench.split import random_problem
from crosscut.distributed.launch import RankContext
from crosscut.distributed.mesh import make_mesh
from crosscut.records import RunRecord

GPU_SHAPES = (
    "1x4096x14336", "32x4096x14336", "512x4096x14336", "4096x4096x14336", "1x8192x28672", "8192x8192x28672",
)  # fmt: skip
CPU_SHAPES = ("1x1024x4096", "64x1024x4096")


@dataclass(frozen=True)
class MLPConfig(LayerConfig):
    """What to measure. ``shapes``: ``TOKENSxHIDDENxFFN``, empty for the defaults."""

    shapes: tuple[str, ...] = ()
    gated: bool = False
    activation: str = "gelu_tanh"


def run(ctx: RankContext, config: MLPConfig) -> RunRecord:
    """Measure on the ranks of ``ctx`` and return the record; rank 0's holds every row.

    Raises UsageError on a config that cannot work on these ranks.
    """
    mesh = make_mesh(tp=config.tp, device=ctx.device)
    dtype = config.torch_dtype(mesh.device)
    problems = [
        partial(
            random_problem, "pair", parse_sizes(text), dtype, mesh.device, config.seed,
            gated=config.gated, activation=config.activation,
        )
        for text in config.shapes or (GPU_SHAPES if mesh.device.type == "cuda" else CPU_SHAPES)
    ]  # fmt: skip
    return measured(ctx, mesh, config, "bench mlp", problems)
