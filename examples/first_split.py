"""Split an MLP over ranks, and see that nothing changed: not the output, not one gradient.

python examples/first_split.py                                   one rank
torchrun --nproc-per-node 2 examples/first_split.py              two ranks, each with half of the weights
"""

import sys

import torch
from torch import nn

import crosscut as cc
from crosscut.collectives import all_reduce
from crosscut.sharding import shard_range

HIDDEN, FFN, TOKENS = 64, 256, 8

# Every rank joins the world that torchrun started; without torchrun it is a world of one.
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

# What this rank's gradients must be: its own part of the unsplit ones. The bias of down is whole on every rank.
mine = shard_range(FFN, tp, rank)
pairs = {
    "output": (y_split, y),
    "gradient of up.weight": (mlp.up.weight.grad, up.weight.grad[mine]),
    "gradient of up.bias": (mlp.up.bias.grad, up.bias.grad[mine]),
    "gradient of down.weight": (mlp.down.weight.grad, down.weight.grad[:, mine]),
    "gradient of down.bias": (mlp.down.bias.grad, down.bias.grad),
}

# The largest difference, relative to the largest value, of all ranks.
relative = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs.values()]).detach()
relative = all_reduce(relative, mesh.tp, "max")
if rank == 0:
    print(f"{tp} rank{'s' if tp > 1 else ''}; this one holds {tuple(mlp.up.weight.shape)} of up's {tuple(up.weight.shape)}")
    print(f"largest difference: {relative.max():.1e}, in the {list(pairs)[int(relative.argmax())]}")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
sys.exit("the split MLP differs from the unsplit one" if not relative.max() < 1e-5 else 0)
