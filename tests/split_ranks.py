"""What the ranks of the process tests do with split models. Module-level functions, because started ranks find them by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosscut as cc
import zoo
from crosscut.collectives import all_gather
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.models.inputs import sample_text
from crosscut.models.parallelize import SplitModel

PROMPTS = 20


@cache
def prompts(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty beginnings of 5 to 24 words from real text, padded on the left: ids and mask ``[20, S]``."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    words = sample_text().split()
    texts = [" ".join(words[50 * i : 50 * i + 5 + i]) for i in range(PROMPTS)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return encoded.input_ids, encoded.attention_mask


def greedy(ctx: RankContext, directory: Path, new_tokens: int, split: bool) -> torch.Tensor:
    """Greedy text of the model in ``directory`` for the prompts, the same on every rank: ``[PROMPTS, new_tokens]``."""
    mesh = make_mesh(device=ctx.device)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(mesh.device)
    model = cc.parallelize(model, mesh) if split else model
    return _written(model, *(t.to(mesh.device) for t in prompts(directory)), new_tokens, mesh).cpu()


def _written(model: Any, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int, mesh: Mesh) -> torch.Tensor:
    text: torch.Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )[:, ids.shape[1] :]
    if isinstance(model, SplitModel) and mesh.tp.size > 1:
        first, *others = all_gather(text, mesh.tp, 0).chunk(mesh.tp.size)
        assert all(torch.equal(first, other) for other in others), "the ranks wrote different texts"
    return text


def first_differences(ctx: RankContext, directory: Path, new_tokens: int, dtype: torch.dtype) -> list[float]:
    """For each prompt whose split text leaves the unsplit one: how far the unsplit logits of the two tokens lie apart there.

    In units of the dtype's spacing at the larger of the two; prompts whose texts are equal give nothing.
    """
    mesh = make_mesh(device=ctx.device)
    ids, mask = (t.to(mesh.device) for t in prompts(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(mesh.device)
    unsplit = _written(model, ids, mask, new_tokens, mesh)
    whole = torch.cat([ids, unsplit], 1)
    seen = torch.cat([mask, torch.ones_like(unsplit)], 1)
    with torch.no_grad():
        logits = model(whole, attention_mask=seen).logits[:, ids.shape[1] - 1 : -1].float()
    split = _written(cc.parallelize(model, mesh), ids, mask, new_tokens, mesh)
    apart = []
    for row in range(len(ids)):
        places = (split[row] != unsplit[row]).nonzero()
        if len(places):
            place = int(places[0])
            ours, theirs = (logits[row, place, text[row, place]] for text in (split, unsplit))
            apart.append(float((ours - theirs).abs() / (torch.maximum(ours.abs(), theirs.abs()) * torch.finfo(dtype).eps)))
    return apart


def sample(ctx: RankContext, name: str) -> list[list[int]]:
    """What a model of the zoo samples when only the first rank has the seed 0."""
    mesh = make_mesh(device=ctx.device)
    model = zoo.model(name)
    if mesh.tp.size > 1:
        cc.parallelize(model, mesh)
    torch.manual_seed(mesh.rank)
    text = model.generate(zoo.prompt(name).to(mesh.device), do_sample=True, max_new_tokens=12)
    if mesh.tp.size > 1:
        first, *others = all_gather(text, mesh.tp, 0).chunk(mesh.tp.size)
        assert all(torch.equal(first, other) for other in others), "the ranks drew different tokens"
    return text.tolist()
