"""What the ranks of the process tests do with split models. Module-level functions, because started ranks find them by name."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import crosscut as cc
import zoo
from crosscut.collectives import all_gather
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import make_mesh


def greedy(
    ctx: RankContext, directory: Path, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int, split: bool
) -> torch.Tensor:
    """Greedy text of the model in ``directory`` for the prompts ``ids [B, S]``, the same on every rank: ``[B, new_tokens]``."""
    mesh = make_mesh(device=ctx.device)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = cc.parallelize(model, mesh) if split else model
    text = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    text = text[:, ids.shape[1] :]
    if mesh.tp.size > 1:
        first, *others = all_gather(text, mesh.tp, 0).chunk(mesh.tp.size)
        assert all(torch.equal(first, other) for other in others), "the ranks wrote different texts"
    return text


def sample(ctx: RankContext, name: str) -> list[list[int]]:
    """What a model of the zoo samples when only the first rank has the seed 0."""
    mesh = make_mesh(device=ctx.device)
    model = zoo.model(name)
    if mesh.tp.size > 1:
        cc.parallelize(model, mesh)
    torch.manual_seed(mesh.rank)
    text = model.generate(zoo.prompt(name), do_sample=True, max_new_tokens=12)
    if mesh.tp.size > 1:
        first, *others = all_gather(text, mesh.tp, 0).chunk(mesh.tp.size)
        assert all(torch.equal(first, other) for other in others), "the ranks drew different tokens"
    return text.tolist()
