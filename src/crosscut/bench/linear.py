"""``crosscut bench linear``: the classic experiment. One linear layer, or an up and down, on one device and split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from crosscut.bench.layers import LayerConfig, measured
from crosscut.bench.shapes import parse_shape
from crosscut.bench.source import real_problems
from crosscut.bench.split import Problem, random_problem
from crosscut.distributed.launch import RankContext
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.records import RunRecord

GPU_SHAPES = (
    "1x1024->1024", "32x1024->1024", "1x4096->8192", "32x4096->8192", "128x4096->8192", "512x4096->8192",
    "2048x4096->8192", "32x8192->28672", "4096x8192->28672", "8192x8192->8192",
    "1x4096->14336->4096", "32x4096->14336->4096",
)  # fmt: skip
CPU_SHAPES = ("1x1024->1024", "32x1024->1024", "1x1024->4096->1024", "64x1024->4096->1024")


@dataclass(frozen=True)
class LinearConfig(LayerConfig):
    """What to measure. ``shapes``: ``TxI->O`` (one layer) or ``TxH->F->H`` (the column-row pair), empty for the defaults."""

    shapes: tuple[str, ...] = ()
    split: str = "column"
    source: str | None = None
    inputs: str = "embedding"
    text: str | None = None
    tokens: tuple[int, ...] = (1, 32)


def run(ctx: RankContext, config: LinearConfig) -> RunRecord:
    """Measure on the ranks of ``ctx`` and return the record; rank 0's holds every row.

    Raises UsageError on a config that cannot work on these ranks.
    """
    mesh = make_mesh(tp=config.tp, device=ctx.device)
    return measured(ctx, mesh, config, "bench linear", list(_problems(config, mesh)))


def _problems(config: LinearConfig, mesh: Mesh) -> Iterator[Callable[[], Problem]]:
    dtype = config.torch_dtype(mesh.device)
    if config.source is not None:
        yield from real_problems(config.source, config.split, config.inputs, config.text, config.tokens, dtype, mesh.tp)
        return
    for text in config.shapes or (GPU_SHAPES if mesh.device.type == "cuda" else CPU_SHAPES):
        shape = parse_shape(text)
        kind = "pair" if shape.pair else config.split
        yield partial(random_problem, kind, shape.sizes, dtype, mesh.device, config.seed)
