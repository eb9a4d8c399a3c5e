"""Unsplit layers, and one training step of their splits on the ranks of a mesh, with results in the unsplit shapes.

Used on rank threads, on gloo processes and on GPUs alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosscut as cc
from crosscut import collectives
from crosscut.distributed.mesh import Mesh
from crosscut.layers.shards import gather, take
from crosscut.sharding import shard_sizes
from parity import step

TOKENS = 6


def unsplit_linear(inner: int, outer: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(11)
    return nn.Linear(inner, outer, bias=bias).to(dtype)


def unsplit_mlp(gated: bool, dtype: torch.dtype, hidden: int = 10, ffn: int = 21) -> nn.Module:
    torch.manual_seed(12)
    mlp = nn.Module()
    mlp.up, mlp.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
    if gated:
        mlp.gate = nn.Linear(hidden, ffn)
    return mlp.to(dtype)


def call_mlp(mlp: nn.Module, gated: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: mlp.down(F.silu(mlp.gate(x)) * mlp.up(x) if gated else F.gelu(mlp.up(x)))


def inputs(width_in: int, width_out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(13)
    return torch.randn(TOKENS, width_in, generator=generator).to(dtype), torch.randn(TOKENS, width_out, generator=generator).to(
        dtype
    )


def whole(out: dict[str, Tensor], layer: nn.Module, group: Any) -> dict[str, Tensor]:
    """Gradients and stepped parameters of the shards, joined to the shapes of the unsplit layer."""
    return {
        key: gather(value, layer.cuts[key.split()[-1]], layer.shapes[key.split()[-1]], group) if " of " in key else value
        for key, value in out.items()
    }


def split_step(mesh: Mesh, kind: str, linear: nn.Linear, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """One training step of the split layer; results in the unsplit shapes."""
    group = mesh.tp
    column = kind.startswith("column")
    if kind == "column sharded":
        layer = cc.ColumnParallelLinear.from_linear(linear, mesh)
        mine = take(upstream.t(), layer.cuts["weight"], group.size, group.rank).t()
        out = step(layer, x, mine, layer)
        out["y"] = collectives.all_gather(out["y"], group, 1, shard_sizes(linear.out_features, group.size))
    elif kind == "column gathered":
        layer = cc.ColumnParallelLinear.from_linear(linear, mesh, gather_output=True)
        out = step(layer, x, upstream, layer)
    elif kind == "column sequence":
        layer = cc.ColumnParallelLinear.from_linear(linear, mesh, gather_output=True, sequence_parallel=True)
        # the gathered output is whole on each rank, and each rank's gradient of it counts: the sum over ranks is upstream
        layer.gather_output = False
        rows = shard_sizes(TOKENS, group.size)
        mine = take(upstream.t(), layer.cuts["weight"], group.size, group.rank).t()
        out = step(layer, x.split(rows)[group.rank], mine, lambda part: layer(part, TOKENS))
        out["y"] = collectives.all_gather(out["y"], group, 1, shard_sizes(linear.out_features, group.size))
        out["dx"] = collectives.all_gather(out["dx"], group, 0, rows)
    elif kind == "row sharded":
        layer = cc.RowParallelLinear.from_linear(linear, mesh)
        widths = shard_sizes(linear.in_features, group.size)
        out = step(layer, x.split(widths, 1)[group.rank].contiguous(), upstream, layer)
        out["dx"] = collectives.all_gather(out["dx"], group, 1, widths)
    elif kind == "row full":
        layer = cc.RowParallelLinear.from_linear(linear, mesh, input_is_parallel=False)
        out = step(layer, x, upstream, layer)
    else:
        assert kind == "row sequence"
        layer = cc.RowParallelLinear.from_linear(linear, mesh, input_is_parallel=False, sequence_parallel=True)
        rows = shard_sizes(TOKENS, group.size)
        out = step(layer, x, upstream.split(rows)[group.rank], layer)
        out["y"] = collectives.all_gather(out["y"], group, 0, rows)
    assert column == isinstance(layer, cc.ColumnParallelLinear)
    return whole(out, layer, group)


KINDS = ["column sharded", "column gathered", "column sequence", "row sharded", "row full", "row sequence"]


def mlp_step(mesh: Mesh, mlp: nn.Module, gated: bool, sequence: bool, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    split = cc.ParallelMLP.from_linears(
        mlp.up, mlp.down, mesh, gate=mlp.gate if gated else None, activation="silu" if gated else "gelu",
        sequence_parallel=sequence,
    )  # fmt: skip
    rows = shard_sizes(TOKENS, mesh.tp.size)
    if not sequence:
        out = step(split, x, upstream, split)
    else:
        part = mesh.rank
        out = step(split, x.split(rows)[part], upstream.split(rows)[part], lambda mine: split(mine, TOKENS))
        out["y"], out["dx"] = (collectives.all_gather(out[key], mesh.tp, 0, rows) for key in ("y", "dx"))
    joined: dict[str, Tensor] = {}
    for key, value in out.items():
        if " of " not in key:
            joined[key] = value
            continue
        what, path = key.rsplit(" ", 1)
        layer, name = path.split(".")
        parallel = split.get_submodule(layer)
        full = gather(value, parallel.cuts[name], parallel.shapes[name], mesh.tp)
        if layer == "up" and gated:
            joined[f"{what} gate.{name}"], joined[f"{what} up.{name}"] = full.chunk(2)
        else:
            joined[f"{what} {path}"] = full
    return joined
