"""Whole models on real processes: SmolLM2-135M (9 query heads, 3 KV heads, tied) writes the same text at every tp."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import split_ranks
from crosscut.distributed.launch import LaunchConfig, run

ROOT = Path(__file__).resolve().parents[2]


@cache
def unsplit(smollm2: Path, new_tokens: int) -> torch.Tensor:
    text = run(split_ranks.greedy, (smollm2, new_tokens, False), LaunchConfig(1, "gloo", "cpu"))
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("tp", "new_tokens"), [(2, 16), *(pytest.param(tp, 64, marks=pytest.mark.slow) for tp in (1, 2, 3, 4))]
)
def test_greedy_text_is_that_of_transformers(smollm2: Path, tp: int, new_tokens: int) -> None:
    expected = unsplit(smollm2, new_tokens)
    assert expected.shape == (split_ranks.PROMPTS, new_tokens)
    text = run(split_ranks.greedy, (smollm2, new_tokens, True), LaunchConfig(tp, "gloo", "cpu"))
    assert text is not None
    different = [row for row in range(split_ranks.PROMPTS) if not torch.equal(text[row], expected[row])]
    assert not different, f"prompts {different} go on differently"


def test_samples_are_the_first_ranks_on_every_rank() -> None:
    """Also where the ranks' own random states differ (openai/gpt-oss issue 270: each rank sampled for itself)."""
    one, two = (run(split_ranks.sample, ("llama-10q2kv",), LaunchConfig(ranks, "gloo", "cpu")) for ranks in (1, 2))
    assert one == two
