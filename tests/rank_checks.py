"""Checks that real ranks run, over gloo processes and over NCCL: the same functions, whatever the device.

Each is called as ``fn(ctx, ...)`` by crosscut's launcher and raises on the rank that sees a wrong value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from crosscut import collectives as cc
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.sharding import shard_sizes
from layer_cases import KINDS, call_mlp, inputs, mlp_step, split_step, unsplit_linear, unsplit_mlp
from parity import assert_equal_to_rounding, relative_error, step


def values(mesh: Mesh, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers that depend on the rank, so that every sum is exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(mesh.device, dtype)


def expect(what: str, got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got, expected.to(got.dtype)), f"{what}: {got.flatten()[:8]} instead of {expected.flatten()[:8]}"


def check_collectives(ctx: Any) -> int:
    """Every raw collective in every dtype that the backend has; returns how many results were compared."""
    mesh = make_mesh(device=ctx.device)
    compared = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for name, got, expected in _results(mesh, dtype):
            expect(f"{name} {dtype} rank {mesh.rank}", got, expected)
            compared += 1
    _check_moved(mesh)
    cc.barrier(mesh.tp)
    return compared


def _check_moved(mesh: Mesh) -> None:
    """Whatever the dtype, and whether or not the library knows it."""
    group, world, rank = mesh.tp, mesh.tp.size, mesh.tp.rank
    every = torch.stack([values(mesh, r, 3, 2 * world, dtype=torch.int16) for r in range(world)])
    mine = every[rank]
    expect("int16 gathered", cc.all_gather(mine, group, 1), torch.cat([*every], 1))
    expect("int16 broadcast", cc.broadcast(mine, group, world - 1), every[-1])
    expect("int16 exchanged", cc.all_to_all(mine, group, 1, 0), torch.cat([e.chunk(world, 1)[rank] for e in every]))
    expect("a scalar", cc.broadcast(mine[0, 0], group), every[0, 0, 0])
    sizes = [0, *[1] * (world - 1)]
    expect("rows of some", cc.all_gather(mine[: sizes[rank]], group, 0, sizes), every[1:, 0])
    if world > 1:
        sent = cc.send.start(mine, group, (rank + 1) % world)
        expect("int16 received", cc.recv(torch.empty_like(mine), group, (rank - 1) % world), every[rank - 1])
        sent.wait()


def _results(mesh: Mesh, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    group, world, rank = mesh.tp, mesh.tp.size, mesh.tp.rank
    sizes = shard_sizes(2 * world + 1, world)
    every = torch.stack([values(mesh, r, 3, sum(sizes), dtype=dtype) for r in range(world)])
    mine, even = every[rank], every[:, :, : 2 * world]
    column = [part.contiguous() for part in every[0].split(sizes, 1)]
    out = [
        ("all_reduce", cc.all_reduce(mine, group), every.sum(0)),
        ("all_reduce max", cc.all_reduce(mine, group, "max"), every.amax(0)),
        ("all_reduce min", cc.all_reduce(mine, group, "min"), every.amin(0)),
        ("all_reduce started", cc.all_reduce.start(mine, group).wait(), every.sum(0)),
        ("all_gather dim 0", cc.all_gather(mine, group), every.flatten(0, 1)),
        ("all_gather uneven", cc.all_gather(column[rank], group, 1, sizes), every[0]),
        ("reduce_scatter uneven", cc.reduce_scatter(mine, group, 1, sizes=sizes), every.sum(0).split(sizes, 1)[rank]),
        ("reduce_scatter", cc.reduce_scatter(even[rank], group, 1), even.sum(0).chunk(world, 1)[rank]),
        ("broadcast", cc.broadcast(mine, group, world - 1), every[-1]),
        ("all_to_all", cc.all_to_all(even[rank], group, 1, 0), torch.cat([e.chunk(world, 1)[rank] for e in even])),
    ]
    if dtype.is_floating_point:
        out.append(("all_reduce avg", cc.all_reduce(mine, group, "avg") * world, every.sum(0)))
    transposed = mine.t().contiguous().t()
    cc.all_reduce(transposed, group, out=transposed)
    out.append(("all_reduce in place, transposed", transposed, every.sum(0)))
    if world > 1:
        following, before = (rank + 1) % world, (rank - 1) % world
        sent = cc.send.start(mine, group, following)
        out.append(("send and recv", cc.recv(torch.empty_like(mine), group, before), every[before]))
        sent.wait()
    return out


def check_layers(ctx: Any, dtype: torch.dtype) -> int:
    """Every linear and MLP against its unsplit self on this rank's device; returns how many tensors were compared."""
    mesh = make_mesh(device=ctx.device)
    compared = 0
    for kind in KINDS:
        for size in ((16, 24), (17, 21)):
            linear = unsplit_linear(*size, True, dtype).to(mesh.device)
            x, upstream = (t.to(mesh.device) for t in inputs(*size, dtype))
            got = split_step(mesh, kind, linear, x, upstream)
            compared += _compare(f"{kind} {size}", got, linear, lambda module: module, x, upstream, mesh)
    for gated in (False, True):
        for sequence in (False, True):
            mlp = unsplit_mlp(gated, dtype).to(mesh.device)
            x, upstream = (t.to(mesh.device) for t in inputs(10, 10, dtype))
            got = mlp_step(mesh, mlp, gated, sequence, x, upstream)
            compared += _compare("mlp", got, mlp, lambda module, gated=gated: call_mlp(module, gated), x, upstream, mesh)
    return compared


def _compare(what: str, got: dict[str, Tensor], module: nn.Module, call: Any, x: Tensor, upstream: Tensor, mesh: Mesh) -> int:
    import copy

    unsplit, precise = copy.deepcopy(module), copy.deepcopy(module).double()
    exact = step(precise, x.double(), upstream.double(), call(precise))
    plain = step(unsplit, x, upstream, call(unsplit))
    for key in plain:
        where = f"{what}, rank {mesh.rank}: {key}"
        assert_equal_to_rounding(where, got[key], plain[key], exact[key], mesh.tp.size**0.5)
    return len(plain)


def check_graph(ctx: Any) -> int:
    """Layers under CUDA-graph capture: replays with new inputs give what eager calls give."""
    import crosscut

    mesh = make_mesh(device=ctx.device)
    mlp = crosscut.ParallelMLP(256, 512, mesh=mesh, dtype=torch.bfloat16, seed=1).requires_grad_(False)
    column = crosscut.ColumnParallelLinear(256, 384, mesh=mesh, gather_output=True, dtype=torch.bfloat16, seed=2)
    column.requires_grad_(False)
    x = torch.randn(4, 256, dtype=torch.bfloat16, device=mesh.device)

    def both() -> tuple[Tensor, Tensor]:
        return mlp(x), column(x)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    generator = torch.Generator(mesh.device).manual_seed(3)
    for _ in range(20):
        x.normal_(generator=generator)
        for output in captured:
            output.fill_(float("nan"))
        graph.replay()
        for output, eager in zip(captured, both(), strict=True):
            assert torch.equal(output, eager)
    return 20


def eager_overhead(ctx: Any, tokens: int, hidden: int, ffn: int) -> dict[str, float]:
    """Microseconds a call from plain Python: crosscut's MLP, the same written by hand with NCCL calls, one GPU."""
    from crosscut.bench.linear import LinearConfig, run

    record = run(ctx, LinearConfig(ctx.world_size, (f"{tokens}x{hidden}->{ffn}->{hidden}",), modes=("eager",), seconds=1.0))
    return {row.impl: row.us.p50 for row in record.rows if row.us is not None and row.shape is not None}


def check_norm(ctx: Any) -> int:
    """all_reduce_norm, fused or not, against its parts in float64; returns how many cases were compared."""
    mesh = make_mesh(device=ctx.device)
    group, cases = mesh.tp, 0
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, hidden in ((1, 4096), (5, 576), (3, 20)):  # 20 bf16 are no whole vectors: the plain way
            for layer_norm in (False, True):
                generator = torch.Generator().manual_seed(tokens)
                draw = [torch.randn(tokens, hidden, generator=generator).to(mesh.device, dtype) for _ in range(group.size)]
                residual = torch.randn(tokens, hidden, generator=generator).to(mesh.device, dtype)
                weight, bias, shift = (torch.randn(hidden, generator=generator).to(mesh.device, dtype) for _ in range(3))
                normed, z = cc.all_reduce_norm(
                    draw[group.rank], residual, weight, group, 1e-5, bias, shift if layer_norm else None, layer_norm
                )
                whole = residual.double() + torch.stack(draw).double().sum(0) + bias.double()
                exact = (
                    nn.functional.layer_norm(whole, (hidden,), weight.double(), shift.double(), 1e-5)
                    if layer_norm
                    else nn.functional.rms_norm(whole, (hidden,), weight.double(), 1e-5)
                )
                for got, expected in ((z, whole), (normed, exact)):
                    assert relative_error(got, expected) < 3 * torch.finfo(dtype).eps
                cases += 1
    return cases
