"""models.inputs: text to ids, ids to embeddings and to the real input of a submodule, on a tiny random Llama."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from crosscut.errors import UsageError
from crosscut.models.checkpoint import SINGLE, Checkpoint
from crosscut.models.inputs import embed, hidden_states, sample_text, token_ids

WINDOW, VOCAB = 16, 256


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with WINDOW positions, and a tokenizer of single bytes."""
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(10) * 25


def test_sample_text_is_prose_without_its_header() -> None:
    text = sample_text()
    assert text.startswith("Alice was beginning")
    assert 6000 < len(text) < 10000
    assert "Public domain" not in text


def test_token_ids_repeat_a_short_text(llama: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    a, b, c = (alphabet.index(letter) for letter in "abc")
    assert token_ids(llama, "abc", 7).tolist() == [a, b, c, a, b, c, a]
    assert token_ids(llama, "abc", 2).tolist() == [a, b]
    assert token_ids(llama, "abc", 2).dtype == torch.int64


def test_token_ids_refuses(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for directory, text, count, code in (
        (llama, "abc", 0, "bad-size"),
        (llama, "", 5, "bad-option"),
        (llama / "absent", "abc", 5, "file-missing"),
        (tmp_path, "abc", 5, "file-unreadable"),
    ):
        with pytest.raises(UsageError) as caught:
            token_ids(directory, text, count)
        assert caught.value.code == code


def test_embed_reads_the_rows(llama: Path, ids: torch.Tensor) -> None:
    weight = load_file(llama / SINGLE)["model.embed_tokens.weight"]
    assert torch.equal(embed(Checkpoint.open(llama), ids), weight[ids])


@pytest.mark.parametrize(
    "names", [["transformer.wte.weight", "x.embed.weight"], ["gpt_neox.embed_in.weight"], ["d.word_embeddings.weight"]]
)
def test_embed_finds_the_embedding(tmp_path: Path, names: list[str]) -> None:
    tensors = {name: torch.rand(8, 4) for name in names}
    others = {"d.embed_positions.weight": torch.rand(9, 4), "d.embed_norm.weight": torch.rand(4), "h": torch.rand(8, 4)}
    save_file(tensors | others, tmp_path / SINGLE)
    assert torch.equal(embed(Checkpoint.open(tmp_path), torch.tensor([5, 1])), tensors[names[0]][[5, 1]])


@pytest.mark.parametrize("names", [["a.embed.weight", "b.embed.weight"], ["h.weight"]])
def test_embed_refuses_to_guess(tmp_path: Path, names: list[str]) -> None:
    save_file({name: torch.rand(8, 4) for name in names}, tmp_path / SINGLE)
    with pytest.raises(UsageError, match="could be the embedding") as caught:
        embed(Checkpoint.open(tmp_path), torch.tensor([1]))
    assert caught.value.code == "parameter-missing"


def test_hidden_states_are_those_of_the_model(llama: Path, ids: torch.Tensor) -> None:
    model = LlamaForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states  # inputs of the layers, then the normed end
        assert torch.equal(hidden_states(llama, "model.layers.1", ids), states[1][0])
        assert torch.equal(hidden_states(llama, "lm_head.weight", ids), states[2][0])
        normed = model.model.layers[1].input_layernorm(states[1])[0]
    assert torch.equal(hidden_states(llama, "model.layers.1.self_attn.q_proj.weight", ids), normed)
    assert torch.equal(hidden_states(llama, "model.layers.1.self_attn", ids), normed), "given by keyword"


def test_the_forward_pass_stops_at_the_module(llama: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    ruined = {k: v * torch.nan if "layers.1" in k else v for k, v in load_file(llama / SINGLE).items()}
    save_file(ruined, tmp_path / SINGLE, {"format": "pt"})
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert hidden_states(tmp_path, "model.layers.1", ids).isfinite().all()
    assert hidden_states(tmp_path, "lm_head", ids).isnan().all()


def test_more_tokens_than_positions_are_read_in_windows(llama: Path) -> None:
    ids = token_ids(llama, sample_text(), 2 * WINDOW + 3)
    found = hidden_states(llama, "model.layers.1.mlp.up_proj", ids)
    assert found.shape == (2 * WINDOW + 3, 32)
    assert torch.equal(found[WINDOW : 2 * WINDOW], hidden_states(llama, "model.layers.1.mlp.up_proj", ids[WINDOW : 2 * WINDOW]))


@pytest.mark.parametrize(
    ("module", "code", "words"),
    [
        ("model.layers.1.mpl.up_proj", "parameter-missing", "did you mean 'model.layers.1.mlp.up_proj'"),
        ("up_proj", "parameter-missing", "2 modules"),
        ("model.layers", "bad-option", "never called"),
        ("model.embed_tokens", "bad-option", "not given activations"),
    ],
)
def test_hidden_states_refuses_modules(llama: Path, ids: torch.Tensor, module: str, code: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        hidden_states(llama, module, ids)
    assert caught.value.code == code


@pytest.mark.parametrize("bad", [[VOCAB], [-1], []])
def test_hidden_states_refuses_ids(llama: Path, bad: list[int]) -> None:
    with pytest.raises(UsageError, match="token ids 0 to 255") as caught:
        hidden_states(llama, "lm_head", torch.tensor(bad, dtype=torch.int64))
    assert caught.value.code == "bad-shape"


def test_hidden_states_refuses_directories(llama: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    def refused(code: str, words: str) -> None:
        with pytest.raises(UsageError, match=words) as caught:
            hidden_states(tmp_path, "lm_head", ids)
        assert caught.value.code == code

    refused("file-missing", "config.json")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("file-missing", "neither")
    save_file(dict(list(load_file(llama / SINGLE).items())[:-1]), tmp_path / SINGLE, {"format": "pt"})
    refused("file-unreadable", "lacks the weights")
    (tmp_path / "config.json").write_text("{")
    refused("file-unreadable", "transformers cannot load it")


def gpt2_without_prefix(directory: Path) -> PreTrainedModel:
    """GPT-2 as the hub has it: its parameters are called h.0..., those of the causal model transformer.h.0..."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=WINDOW))
    model.transformer.save_pretrained(directory)
    return model.eval()


def test_names_without_the_prefix_of_the_model(tmp_path: Path) -> None:
    model = gpt2_without_prefix(tmp_path)
    assert "h.1.mlp.c_fc.weight" in Checkpoint.open(tmp_path).names()
    ids = torch.arange(12)
    assert torch.equal(embed(Checkpoint.open(tmp_path), ids), model.transformer.wte.weight[ids])
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
    assert torch.equal(hidden_states(tmp_path, "h.1", ids), states[1][0])


def test_a_missing_library_says_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    for call in (lambda: token_ids(llama, "abc", 3), lambda: hidden_states(llama, "lm_head", torch.tensor([1]))):
        with pytest.raises(UsageError, match=r"pip install 'crosscut\[models\]'") as caught:
            call()
        assert caught.value.code == "extra-missing"
