"""Whole models on real processes: SmolLM2-135M (9 query heads, 3 KV heads, tied) writes the same text at every tp."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import split_ranks
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.models.inputs import sample_text

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, NEW_TOKENS = 20, 64


@pytest.fixture(scope="module")
def directory() -> Path:
    """The model's directory, fetched and converted when it is not there; skipped where that is not possible."""
    script, environment = ROOT / "scripts" / "fetch_smollm2", {**os.environ, "PYTHON": sys.executable}
    fetched = subprocess.run([script], check=False, env=environment, text=True, capture_output=True, timeout=150)
    if fetched.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched here: {fetched.stderr.strip()[-300:]}")
    return Path(fetched.stdout.strip())


@pytest.fixture(scope="module")
def prompts(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty beginnings of 5 to 24 words from real text, padded on the left: ids and mask ``[20, S]``."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    words = sample_text().split()
    texts = [" ".join(words[50 * i : 50 * i + 5 + i]) for i in range(PROMPTS)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return encoded.input_ids, encoded.attention_mask


@pytest.fixture(scope="module")
def unsplit(directory: Path, prompts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    text = run(split_ranks.greedy, (directory, *prompts, NEW_TOKENS, False), LaunchConfig(1, "gloo", "cpu"))
    assert text is not None
    return text


@pytest.mark.parametrize("tp", [*(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 3, 4)), 2])
def test_greedy_text_is_that_of_transformers(
    directory: Path, prompts: tuple[torch.Tensor, torch.Tensor], unsplit: torch.Tensor, tp: int
) -> None:
    assert unsplit.shape == (PROMPTS, NEW_TOKENS)
    text = run(split_ranks.greedy, (directory, *prompts, NEW_TOKENS, True), LaunchConfig(tp, "gloo", "cpu"))
    assert text is not None
    different = [row for row in range(PROMPTS) if not torch.equal(text[row], unsplit[row])]
    assert not different, f"prompts {different} go on differently"


def test_samples_are_the_first_ranks_on_every_rank() -> None:
    """Also where the ranks' own random states differ (openai/gpt-oss issue 270: each rank sampled for itself)."""
    one, two = (run(split_ranks.sample, ("llama-10q2kv",), LaunchConfig(ranks, "gloo", "cpu")) for ranks in (1, 2))
    assert one == two
