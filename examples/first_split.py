"""Split an MLP over ranks, and see that nothing changed: not the output, not one gradient.

python examples/first_split.py                                   one rank
torchrun --nproc-per-node 2 examples/first_split.py              two ranks, each with half of the weights
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import crosscut as cc
from crosscut.collectives import all_reduce
from crosscut.sharding import shard_range

HIDDEN, FFN, TOKENS = 64, 256, 8


def main() -> str | None:
    # Every rank joins the world that torchrun started; without torchrun this is a world of one.
    mesh = cc.init_mesh()
    tp, rank = mesh.tp.size, mesh.tp.rank

    # The unsplit MLP. One seed, so it starts equal on every rank, and so does its input.
    torch.manual_seed(0)
    up, down = nn.Linear(HIDDEN, FFN).to(mesh.device), nn.Linear(FFN, HIDDEN).to(mesh.device)
    x = torch.randn(TOKENS, HIDDEN).to(mesh.device)
    y = down(nn.functional.gelu(up(x)))
    y.square().sum().backward()

    # The same MLP split: each rank keeps its share of the FFN features, and one all-reduce adds up the output.
    mlp = cc.ParallelMLP.from_linears(up, down, mesh, activation="gelu")
    y_split = mlp(x)
    y_split.square().sum().backward()

    # What this rank must have got: its own part of the unsplit gradients. The bias of down is whole on every rank.
    mine = shard_range(FFN, tp, rank)
    pairs = {
        "output": (y_split, y),
        "gradient of up.weight": (mlp.up.weight.grad, up.weight.grad[mine]),
        "gradient of up.bias": (mlp.up.bias.grad, up.bias.grad[mine]),
        "gradient of down.weight": (mlp.down.weight.grad, down.weight.grad[:, mine]),
        "gradient of down.bias": (mlp.down.bias.grad, down.bias.grad),
    }

    # The largest difference on any rank, relative to the largest value.
    relative = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs.values()]).detach()
    relative = all_reduce(relative, mesh.tp, "max")
    if rank == 0:
        print(f"{tp} rank(s); rank 0 holds {list(mlp.up.weight.shape)} of up's {list(up.weight.shape)}")
        print(f"largest difference: {relative.max():.1e}, in the {list(pairs)[int(relative.argmax())]}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return None if relative.max() < 1e-5 else "the split MLP differs from the unsplit one"


if __name__ == "__main__":
    sys.exit(main())
