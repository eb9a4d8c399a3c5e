"""A small split model with every kind of cut, and its training: for tests of checkpoints and of training features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import crosscut as cc
from crosscut.distributed.mesh import Group, Mesh
from crosscut.layers.placed import placed_parameters

VOCAB, HIDDEN = 19, 12


class Net(nn.Module):
    """Vocabulary, packed heads with KV heads to replicate, packed MLP, row, replicated; no size divides by 2, 3 and 4."""

    def __init__(self, mesh: Mesh, seed: int, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.mesh = mesh
        self.embedding = cc.VocabParallelEmbedding(VOCAB, hidden, mesh=mesh, seed=seed)
        self.block = cc.ParallelBlock(
            hidden, 4, 10, mesh=mesh, norm="layer", attention={"kv_heads": 2}, dropout=dropout, seed=seed + 9
        )
        self.head = cc.ColumnParallelLinear(hidden, VOCAB, mesh=mesh, seed=seed + 99)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of ``ids [B, S]`` against themselves."""
        logits = self.head(self.block(self.embedding(ids)))
        return cc.vocab_parallel_cross_entropy(logits.float(), ids, self.mesh.tp, VOCAB)

    def loss(self, step: int, sequences: int = 2) -> Tensor:
        """The loss of the step's own sequences."""
        return self(batch(step, sequences))


def batch(step: int, sequences: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (sequences, 5), generator=torch.Generator().manual_seed(step))


def trained(mesh: Mesh, steps: int, seed: int = 1) -> tuple[Net, torch.optim.AdamW]:
    model = Net(mesh, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    advance(model, optimizer, range(steps))
    return model, optimizer


def advance(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


def wholes(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    return {placed.name: placed.whole(mesh.tp) for placed in placed_parameters(model)}


def alone(device: str = "cpu") -> Mesh:
    """The mesh of one rank, also on a rank that has peers."""
    where = torch.device(device)
    return Mesh(*(Group(axis, 0, 1, (0,), "none", where) for axis in ("tp", "dp")), device=where)
