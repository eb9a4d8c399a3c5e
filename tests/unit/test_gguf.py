"""models.gguf: a tiny Llama written as GGUF comes back tensor by tensor; what cannot be converted exactly is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

import crosscut as cc
from crosscut.distributed.mesh import make_mesh
from crosscut.errors import UsageError
from crosscut.models.gguf import convert

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
SPECIAL = ["<|end|>", "<|user|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "4 2"]  # "4 2" must never be used
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
KINDS = [3, 3, *[1] * (len(TOKENS) - 3), 4]
Q8_0, Q4_1, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F16", "F32"))

METADATA: dict[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 50000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


def known_weights(tied: bool) -> dict[str, np.ndarray]:
    """Random parameters under their Hugging Face names; no two are alike."""
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of a query or key projection."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    types: Callable[[str], gguf.GGMLQuantizationType] = lambda name: F32,
    architecture: str = "llama",
    **changes: Any,
) -> Path:
    """A GGUF file of METADATA with ``changes`` (None takes a key away; '__' stands for '.')."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | {key.replace("__", "."): value for key, value in changes.items()}).items():
        if value is not None:
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, weight in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        stored = permuted(weight, heads) if heads else weight
        writer.add_tensor(gguf_name(name), gguf.quantize(stored, types(name)), raw_dtype=types(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tied.gguf", known_weights(tied=True))


@pytest.mark.parametrize("is_tied", [True, False])
def test_every_tensor_comes_back(tmp_path: Path, is_tied: bool) -> None:
    weights = known_weights(is_tied)
    out = convert(write_gguf(tmp_path / "m.gguf", weights), tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], torch.from_numpy(weight)), name
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is is_tied


def test_the_permutation_of_this_test_changes_the_rows() -> None:
    weight = known_weights(tied=True)["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(permuted(weight, HEADS)[:4], weight[[0, 8, 1, 9]])


def test_quantised_tensors_are_decoded_exactly(tmp_path: Path) -> None:
    def types(name: str) -> gguf.GGMLQuantizationType:
        return F32 if "norm" in name else Q8_0 if "embed" in name else F16 if "down" in name else Q4_1

    weights = known_weights(tied=True)
    out = convert(write_gguf(tmp_path / "m.gguf", weights, types), tmp_path / "out")
    found = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        decoded = gguf.dequantize(gguf.quantize(weight, types(name)), types(name)).astype(np.float32)
        assert torch.equal(found[name], torch.from_numpy(decoded)), name
    name = "model.layers.0.self_attn.k_proj.weight"
    assert not torch.equal(found[name], torch.from_numpy(weights[name])), "Q4_1 must have rounded"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(tmp_path: Path, tied: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    out = convert(tied, tmp_path / "out", name)
    for key, value in load_file(out / "model.safetensors").items():
        assert torch.equal(value, torch.from_numpy(known_weights(tied=True)[key]).to(dtype)), key
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == name


def test_config_and_progress(tmp_path: Path, tied: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    out = convert(tied, tmp_path / "out", on_progress=lambda *call: calls.append(call))
    config = json.loads((out / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    assert {key: config[key] for key in expected} == expected
    assert [call[0] for call in calls] == list(range(1, len(known_weights(tied=True)) + 1))
    assert calls[0] == (1, len(calls), "model.embed_tokens.weight")


def test_tokenizer(tmp_path: Path, tied: Path) -> None:
    out = convert(tied, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "hello world 42<|user|><tool>日🙂"
    encoded = tokenizer.encode(text)
    space = "Ġ"
    assert encoded.tokens[:9] == ["hello", "Ġw", "o", "r", "l", "d", space, "4", "2"]
    assert encoded.ids[9:11] == [1, len(TOKENS) - 1]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert "<|user|>" not in tokenizer.decode(encoded.ids), "special"
    assert "<tool>" in tokenizer.decode(encoded.ids), "user-defined, not special"
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|end|>"
    assert config["chat_template"] == "{{ messages }}"
    assert "bos_token" not in config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "qwen2"}, ("'qwen2'", "'llama'")),
        ({"tokenizer__ggml__pre": "llama-bpe"}, ("'llama-bpe'", "'smollm'")),
        ({"tokenizer__ggml__model": "llama"}, ("'llama'", "'gpt2'")),
        ({"tokenizer__ggml__add_bos_token": True}, ("add_bos_token",)),
        ({"tokenizer__ggml__merges": ["x yz"]}, ("merges do not fit",)),
        ({"tokenizer__ggml__token_type": [1]}, ("kinds of 1",)),
        ({"tokenizer__ggml__eos_token_id": 9999}, ("eos_token_id", "9999")),
        ({"llama__rope__scaling__type": "yarn"}, ("'yarn'",)),
        ({"llama__rope__dimension_count": 8}, ("rotary width",)),
        ({"llama__attention__head_count_kv": 3}, ("4 query heads", "3")),
        ({"llama__attention__head_count": 0}, ("head_count", "at least 1")),
        ({"llama__feed_forward_length": 128}, ("blk.0.ffn_gate.weight", "[96, 64]", "[128, 64]")),
        ({"llama__block_count": 3}, ("blk.2.attn_norm.weight", "missing")),
        ({"llama__block_count": 1}, ("blk.1.", "not part of a plain Llama")),
        ({"llama__context_length": None}, ("llama.context_length", "missing")),
        ({"llama__context_length": "long"}, ("llama.context_length", "'long'")),
    ],
)
def test_refuses_what_it_cannot_convert_exactly(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    path = write_gguf(tmp_path / "m.gguf", known_weights(tied=True), **changes)
    with pytest.raises(UsageError) as caught:
        convert(path, tmp_path / "out")
    assert caught.value.code == "file-unreadable"
    for word in words:
        assert word in caught.value.message
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, tied: Path) -> None:
    whole = tied.read_bytes()
    cut = tmp_path / "cut.gguf"
    for end in [0, 3, 4, 8, 20, 100, *range(0, len(whole), len(whole) // 37), len(whole) - 1]:
        cut.write_bytes(whole[:end])
        with pytest.raises(UsageError) as caught:
            convert(cut, tmp_path / "out")
        assert caught.value.code == "file-unreadable", end
    assert sorted(tmp_path.iterdir()) == [cut, tied]


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("hello, this is a text")
    with pytest.raises(UsageError, match="not a GGUF file") as caught:
        convert(path, tmp_path / "out")
    assert caught.value.code == "file-unreadable"
    with pytest.raises(UsageError) as caught:
        convert(tmp_path / "absent.gguf", tmp_path / "out")
    assert caught.value.code == "file-missing"


def test_unknown_dtype(tmp_path: Path, tied: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'float32'") as caught:
        convert(tied, tmp_path / "out", "flaot32")
    assert caught.value.code == "bad-dtype"


def test_where_it_writes(tmp_path: Path, tied: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine.txt").write_text("keep me")
    for target, code in ((used, "bad-option"), (tied, "bad-option"), (tmp_path / "no" / "out", "file-missing")):
        with pytest.raises(UsageError) as caught:
            convert(tied, target)
        assert caught.value.code == code
    assert (used / "mine.txt").read_text() == "keep me"
    (tmp_path / "empty").mkdir()
    assert (convert(tied, tmp_path / "empty") / "config.json").is_file()


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, tied: Path) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        assert len(list(tmp_path.iterdir())) == 2, "it writes next to its target"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tied, tmp_path / "out", on_progress=interrupt)
    assert list(tmp_path.iterdir()) == [tied]


def test_without_the_gguf_library(tmp_path: Path, tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"pip install 'crosscut\[models\]'") as caught:
        convert(tied, tmp_path / "out")
    assert caught.value.code == "extra-missing"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_is_loaded_as_it_is(tmp_path: Path, is_tied: bool) -> None:
    """cc.from_pretrained of the file is the model that it converts to; in another dtype when that is said."""
    path = write_gguf(tmp_path / "model.gguf", known_weights(is_tied))
    mesh = make_mesh(device="cpu")
    found = cc.from_pretrained(path, mesh)
    expected = cc.from_pretrained(convert(path, tmp_path / "model"), mesh)
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())
    assert next(cc.from_pretrained(path, mesh, dtype="bfloat16").parameters()).dtype == torch.bfloat16
