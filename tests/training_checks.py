"""Training with tp 2 x dp 2 on real ranks, against one process on whole batches. All of it in one start of the ranks.

Each check returns how far it was off (0: bit for bit), or a number whose meaning its test states.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import crosscut as cc
from crosscut.collectives import all_reduce
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import MismatchError
from crosscut.layers import GradScaler, RMSNorm, broadcast_parameters, check_replicas, clip_grad_norm_, manual_seed
from crosscut.layers.placed import placed_parameters
from crosscut.models import dcp, weights
from split_net import HIDDEN, Net, alone, batch, wholes

STEPS, SEQUENCES, FFN, MAX_NORM = 4, 4, 18, 0.5


class PlainNet(nn.Module):
    """A norm and an MLP; ``forward`` is the same for crosscut's layers and for torch's."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def torchs_own() -> PlainNet:
    torch.manual_seed(21)
    mlp = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(), nn.Linear(FFN, HIDDEN))
    return PlainNet(nn.RMSNorm(HIDDEN, 1e-5), mlp)


def crosscuts(mesh: Mesh) -> PlainNet:
    whole = torchs_own().to(mesh.device)
    return PlainNet(RMSNorm(HIDDEN, mesh=mesh), cc.ParallelMLP.from_linears(whole.mlp[0], whole.mlp[2], mesh)).to(mesh.device)


def own_half(x: Tensor, mesh: Mesh) -> Tensor:
    return x.chunk(mesh.dp.size)[mesh.dp.rank]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def spread(model: nn.Module, inner: nn.Module, mesh: Mesh) -> None:
    assert mesh.device_mesh is not None
    for module in (inner, model):
        fully_shard(module, mesh=mesh.device_mesh["dp"])


def check_plain(mesh: Mesh, how: str) -> float:
    """DDP (small buckets, so that their hooks overlap; with ``no_sync`` two micro-batches a step) and FSDP2, clipped."""
    reference, model = torchs_own(), crosscuts(mesh)
    broadcast_parameters(model, mesh)
    run: nn.Module = model
    if how == "fsdp":
        spread(model, model.mlp, mesh)
    else:
        run = nn.parallel.DistributedDataParallel(model, process_group=mesh.dp.process_group, bucket_cap_mb=0.0005)
    optimizers = adamw(reference), adamw(model)
    worst = 0.0
    for step in range(STEPS):
        x, y = torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(step))
        ((reference(x) - y) ** 2).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        mine, target = own_half(x, mesh), own_half(y, mesh)
        if how == "accumulated":
            with run.no_sync():
                ((run(mine[:2]) - target[:2]) ** 2).mean().div(2).backward()
            ((run(mine[2:]) - target[2:]) ** 2).mean().div(2).backward()
        else:
            ((run(mine) - target) ** 2).mean().backward()
        worst = max(worst, float((clip_grad_norm_(model, MAX_NORM, mesh) - norm).abs()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_replicas(model, mesh)
    expected = (reference.norm.weight, *reference.mlp[0].parameters(), *reference.mlp[2].parameters())
    pairs = zip(placed_parameters(model), expected, strict=True)
    return max(worst, *(float((placed.whole(mesh.tp) - whole).detach().abs().max()) for placed, whole in pairs))


def train(model: Net, optimizer: torch.optim.Optimizer, mesh: Mesh, steps: range) -> list[float]:
    """The gradient norms of ``steps``, with FSDP2 or (the mesh of one rank) alone."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        model(own_half(batch(step, SEQUENCES), mesh)).backward()
        norms.append(float(clip_grad_norm_(model, MAX_NORM, mesh)))
        optimizer.step()
    return norms


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name] - expected[name]).abs().max()) for name in got)


def check_fsdp(mesh: Mesh, folder: str) -> dict[str, float]:
    """FSDP2 over dp around every kind of cut: norms, replicas, and both kinds of checkpoint on other arrangements."""
    single = alone()
    reference = Net(single, 1)
    reference_optimizer = adamw(reference)
    expected_norms = train(reference, reference_optimizer, single, range(STEPS))
    model = Net(mesh, 1)
    spread(model, model.block, mesh)
    optimizer = adamw(model)
    broadcast_parameters(model, mesh)
    norms = train(model, optimizer, mesh, range(STEPS))
    check_replicas(model, mesh)
    trained = wholes(model, mesh)
    found = {
        "fsdp parameters": difference(trained, wholes(reference, single)),
        "fsdp norms": max(abs(a - b) for a, b in zip(norms, expected_norms, strict=True)),
        "fsdp norm, replicas counted on every rank": careless_norm(model, mesh) / MAX_NORM,
        "fsdp drift found": float(drift_is_found(model, mesh)),
    }
    weights.save(model, Path(folder) / "w.safetensors", mesh, optimizer, {"step": str(STEPS)})
    dcp.save(model, Path(folder) / "dcp", mesh, optimizer, {"step": str(STEPS)})
    train(reference, reference_optimizer, single, range(STEPS, STEPS + 2))
    for tp in (1, 4):
        other = make_mesh(tp=tp, device=mesh.device)
        for how, name in ((weights, "w.safetensors"), (dcp, "dcp")):
            again = Net(other, 7)
            if tp == 1:
                spread(again, again.block, other)
            other_optimizer = adamw(again)
            assert how.load(again, Path(folder) / name, other, other_optimizer) == {"step": str(STEPS)}
            found[f"{name} at tp {tp}"] = difference(wholes(again, other), trained)
            train(again, other_optimizer, other, range(STEPS, STEPS + 2))
            found[f"{name} at tp {tp}, trained on"] = difference(wholes(again, other), wholes(reference, single))
    return found


def careless_norm(model: Net, mesh: Mesh) -> float:
    """The norm, MAX_NORM after clipping, with the gradients of all ranks simply added up: what the check must tell from it."""
    squares = sum(float(placed.like(placed.local.grad).own.square().sum()) for placed in placed_parameters(model))
    total = torch.tensor(squares)
    return float(all_reduce(all_reduce(total, mesh.tp), mesh.dp).sqrt())


def drift_is_found(model: Net, mesh: Mesh) -> bool:
    """Whether a change of one rank's part of a norm's weight, then of a KV head that all ranks of tp hold, is named."""
    found = []
    for name, rank in (("block.mlp_norm.weight", 1), ("block.attention.qkv.weight", 2)):
        placed = next(placed for placed in placed_parameters(model) if placed.name == name)
        before = placed.own.clone()
        if mesh.rank == rank:
            placed.own[-1] += 1e-3
        try:
            check_replicas(model, mesh)
            found.append(name.endswith("qkv.weight") and not placed.shares_rows(mesh.tp))
        except MismatchError as error:
            found.append(name in str(error))
        placed.own.copy_(before)
    return all(found)


def check_recomputed_dropout(mesh: Mesh) -> float:
    """A block with dropout, kept and recomputed in the backward: the same masks, so the same gradients bit for bit."""
    found: list[list[Tensor]] = []
    for reentrant in (None, False, True):
        block = Net(mesh, 1, dropout=0.5).block
        manual_seed(3, mesh)
        x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(mesh.dp.rank)).requires_grad_()
        y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        y.square().sum().backward()
        found.append([p.grad for p in (x, *block.parameters())])
    return max(float((a - b).abs().max()) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def check_scaler(mesh: Mesh, spreading: bool) -> float:
    """An inf in one rank's shard of one gradient: the share of ranks that skip the step and halve their scale."""
    model = Net(mesh, 1)
    if spreading:
        spread(model, model.block, mesh)
    optimizer = adamw(model)
    scaler = GradScaler(mesh, init_scale=1024.0)
    skipped, bad = [], {1: 3, 3: 0}  # the step -> the rank whose gradient overflows
    for step in range(5):
        before = wholes(model, mesh)
        optimizer.zero_grad()
        sequences = batch(step, SEQUENCES)  # without FSDP2 nothing sums over dp here: then all see the same
        scaler.scale(model(own_half(sequences, mesh) if spreading else sequences)).backward()
        if bad.get(step) == mesh.rank:
            first = next(placed_parameters(model))
            first.like(first.local.grad).own.view(-1)[:1] = float("inf")
        if step < 3:  # with a fused optimizer step() looks for infs itself when unscale_ was not called
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, MAX_NORM, mesh)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(difference(before, wholes(model, mesh)) == 0)
    right = skipped == [step in bad for step in range(5)] and scaler.get_scale() == 256.0
    check_replicas(model, mesh)
    votes = all_reduce(all_reduce(torch.tensor(float(right)), mesh.tp), mesh.dp)
    return float(votes) / mesh.world_size


def check_all(ctx: Any, folder: str) -> dict[str, float]:
    """Every check by name."""
    mesh = make_mesh(tp=2, device=ctx.device)
    checks: dict[str, Callable[[], float]] = {
        "ddp": lambda: check_plain(mesh, "ddp"),
        "ddp accumulated": lambda: check_plain(mesh, "accumulated"),
        "fsdp": lambda: check_plain(mesh, "fsdp"),
        "recomputed dropout": lambda: check_recomputed_dropout(mesh),
        "scaler": lambda: check_scaler(mesh, False),
        "scaler fsdp": lambda: check_scaler(mesh, True),
    }
    return {name: check() for name, check in checks.items()} | check_fsdp(mesh, folder)
