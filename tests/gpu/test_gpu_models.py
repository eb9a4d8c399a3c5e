"""Whole models on GPUs: SmolLM2's text split as unsplit, and small models of several families.

Two ranks on GPUs of their own over NCCL where there are two, else as two processes that share one GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.distributed.launch import LaunchConfig, run

pytest.importorskip("transformers", reason="the models are transformers'")
import split_ranks
import zoo
from crosscut import parallelize
from crosscut.distributed.mesh import make_mesh

MODEL = Path(__file__).resolve().parents[2] / ".cache" / "SmolLM2-135M-Instruct"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU")]
TWO = LaunchConfig(2) if GPUS > 1 else LaunchConfig(2, "gloo", "cuda")
fetched = pytest.mark.skipif(not MODEL.is_dir(), reason="scripts/fetch_smollm2 has not been run")
FAMILIES = ("llama-10q2kv", "gpt2", "phi3", "mixtral", "gemma3", "deepseek_v3", "olmo2", "falcon-mha")


@fetched
def test_text_in_fp32_is_that_of_one_gpu() -> None:
    one, two = (run(split_ranks.greedy, (MODEL, 64, config is TWO), config) for config in (LaunchConfig(1), TWO))
    assert one is not None
    assert two is not None
    assert [row for row in range(split_ranks.PROMPTS) if not torch.equal(one[row], two[row])] == []


@fetched
def test_text_in_bf16_leaves_that_of_one_gpu_only_at_near_ties() -> None:
    apart = run(split_ranks.first_differences, (MODEL, 64, torch.bfloat16), TWO)
    assert apart is not None
    assert max(apart, default=0.0) <= 4, apart


def outputs(ctx: Any, name: str) -> float:
    """The largest difference of logits and of the loss's gradients by the embedding, relative to the unsplit model's."""
    mesh = make_mesh(device=ctx.device)
    model, ids = zoo.model(name).to(mesh.device), zoo.prompt(name).to(mesh.device)
    found = []
    for split in (False, True):
        model = parallelize(model, mesh) if split else model
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        out = model(inputs_embeds=x, labels=ids, use_cache=False)
        out.loss.backward()
        assert x.grad is not None
        found.append((out.logits.detach(), x.grad))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found[1], found[0], strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_split_model_equals_the_unsplit_one(name: str) -> None:
    difference = run(outputs, (name,), TWO)
    assert difference is not None
    assert difference < 1e-4
