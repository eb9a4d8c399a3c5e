"""Training with dp x tp on real ranks: torch's own data parallelism around crosscut's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import crosscut as cc
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.layers import RMSNorm, broadcast_parameters, check_replicas, clip_grad_norm_
from crosscut.layers.replicas import placed_parameters
from crosscut.layers.shards import gather

STEPS, BATCH, HIDDEN, FFN = 4, 8, 12, 18


class Net(nn.Module):
    """A norm and an MLP; ``forward`` is the same for the split and the unsplit one."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def unsplit() -> Net:
    torch.manual_seed(21)
    return Net(nn.RMSNorm(HIDDEN, 1e-5), nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(), nn.Linear(FFN, HIDDEN)))


def split(mesh: Mesh) -> Net:
    whole = unsplit().to(mesh.device)
    return Net(RMSNorm(HIDDEN, mesh=mesh), cc.ParallelMLP.from_linears(whole.mlp[0], whole.mlp[2], mesh)).to(mesh.device)


def data(device: torch.device, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(BATCH, HIDDEN, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


def reference(clip: bool) -> list[Tensor]:
    """The unsplit model after STEPS steps on whole batches."""
    model = unsplit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = data(torch.device("cpu"), step)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in (model.norm.weight, *model.mlp[0].parameters(), *model.mlp[2].parameters())]


def train(ctx: Any, how: str) -> float:
    """Train with tp 2 and the rest dp, by DistributedDataParallel or FSDP2; the largest difference from the unsplit model."""
    mesh = make_mesh(tp=2, device=ctx.device)
    model = split(mesh)
    broadcast_parameters(model, mesh)
    run: nn.Module = model
    if how == "ddp":
        run = nn.parallel.DistributedDataParallel(model, process_group=mesh.dp.process_group)
    else:
        from torch.distributed.fsdp import fully_shard

        assert mesh.device_mesh is not None
        fully_shard(model.mlp, mesh=mesh.device_mesh["dp"])
        fully_shard(model, mesh=mesh.device_mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = (t.chunk(mesh.dp.size)[mesh.dp.rank] for t in data(mesh.device, step))
        optimizer.zero_grad()
        ((run(x) - y) ** 2).mean().backward()
        if how == "ddp":
            clip_grad_norm_(model, 0.5, mesh)
        optimizer.step()
    if how == "ddp":
        check_replicas(model, mesh)
    return _difference(model, mesh, reference(clip=how == "ddp"))


def _difference(model: Net, mesh: Mesh, expected: list[Tensor]) -> float:
    worst = 0.0
    for placed, whole in zip(placed_parameters(model), expected, strict=True):
        local = placed.local.detach()
        local = local.full_tensor() if hasattr(local, "full_tensor") else local  # FSDP2 holds a shard of our shard
        got = gather(local, placed.cut, placed.shape, mesh.tp).cpu()
        worst = max(worst, float((got - whole).abs().max()))
    return worst
