"""model_config: the spellings of many families read as one, defaults as transformers has them, errors that name the field."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from crosscut.errors import UsageError
from crosscut.model_config import DEFAULTS, Latent, ModelConfig
from crosscut.sharding import FAMILIES

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0}, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3 = {  # as on the hub: a multimodal config whose text part says only what differs from the class
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "sliding_window": 1024, "rope_scaling": {"factor": 8.0},
    },
}  # fmt: skip


def changed(**fields: Any) -> dict[str, Any]:
    """Llama 3's config with ``fields`` changed; Ellipsis takes one away."""
    return {key: value for key, value in {**LLAMA, **fields}.items() if value is not ...}


def sizes(config: ModelConfig, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in names)


def test_llama() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert sizes(config, "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn") == (4096, 32, 32, 8, 128, 14336)
    assert sizes(config, "vocab", "max_positions", "tied", "dtype") == (128256, 131072, False, "bfloat16")
    assert sizes(config, "experts", "latent", "window", "layer_types") == (0, None, None, ())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (changed(torch_dtype=..., dtype="float16", rope_scaling=..., rope_parameters={"rope_type": "default"}), "float16"),
        (changed(torch_dtype="torch.float32"), "float32"),
        (changed(torch_dtype=...), None),
    ],
)
def test_old_and_new_spellings_of_the_dtype(fields: dict[str, Any], wanted: str | None) -> None:
    assert ModelConfig.from_dict(fields).dtype == wanted


def test_gpt2_spells_everything_otherwise() -> None:
    raw = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_ctx": 1024, "n_positions": 1024}
    config = ModelConfig.from_dict({**raw, "vocab_size": 50257, "n_inner": None})
    assert sizes(config, "hidden", "layers", "heads", "kv_heads", "head_dim") == (1600, 48, 25, 25, 64)
    assert sizes(config, "ffn", "vocab", "max_positions", "tied") == (6400, 50257, 1024, True)


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"num_attention_heads": 71, "hidden_size": 4544, "multi_query": True, "num_kv_heads": 71}, 1),
        ({"num_attention_heads": 128, "hidden_size": 8192, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"num_attention_heads": 64, "hidden_size": 4096, "multi_query": False}, 64),
        ({"n_head": 71, "hidden_size": 4544}, 1),
    ],
)
def test_kv_heads_of_falcon(fields: dict[str, Any], kv_heads: int) -> None:
    config = ModelConfig.from_dict({"model_type": "falcon", "num_hidden_layers": 2, "vocab_size": 65024, **fields})
    assert config.kv_heads == kv_heads


def test_the_text_part_of_a_multimodal_config_stands_for_it() -> None:
    config = ModelConfig.from_dict(GEMMA3)
    assert sizes(config, "model_type", "hidden", "heads", "kv_heads", "head_dim") == ("gemma3_text", 2560, 8, 4, 256)
    assert sizes(config, "vocab", "tied", "dtype", "window") == (262208, True, "bfloat16", 1024)
    assert "quantization_config" in ModelConfig.from_dict({**GEMMA3, "quantization_config": {}}).raw
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17, 23, 29]


def test_latent_attention_and_experts() -> None:
    raw = changed(model_type="deepseek_v2", q_lora_rank=None, kv_lora_rank=512, n_shared_experts=2, moe_intermediate_size=1408)
    config = ModelConfig.from_dict(raw)
    assert config.latent == Latent(None, 512, 128, 64, 128)
    assert sizes(config, "heads", "kv_heads", "head_dim") == (32, 32, 192)
    assert sizes(config, "experts", "expert_ffn", "shared_ffn") == (64, 1408, 2816)
    mixtral = ModelConfig.from_dict(changed(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2))
    assert sizes(mixtral, "experts", "experts_per_token", "expert_ffn", "shared_ffn") == (8, 2, 14336, 0)


def test_sliding_windows() -> None:
    mistral = ModelConfig.from_dict(changed(model_type="mistral", sliding_window=4096))
    assert set(mistral.layer_types) == {"sliding_attention"}
    assert ModelConfig.from_dict(changed(model_type="mistral", sliding_window=None)).window is None
    qwen = changed(model_type="qwen2", sliding_window=4096, max_window_layers=28)
    assert ModelConfig.from_dict(qwen).layer_types == ()
    layers = ModelConfig.from_dict({**qwen, "use_sliding_window": True}).layer_types
    assert [layers.count(kind) for kind in ("full_attention", "sliding_attention")] == [28, 4]


@pytest.mark.parametrize("model_type", [name for family in FAMILIES.all() for name in family.model_types])
def test_a_silent_config_means_what_transformers_takes_it_to_mean(model_type: str) -> None:
    said = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 64, "vocab_size": 99}
    ours = ModelConfig.from_dict({"model_type": model_type, **said})
    theirs = ModelConfig.from_dict(CONFIG_MAPPING[model_type](**said, bos_token_id=1, eos_token_id=2, pad_token_id=0).to_dict())
    assert dataclasses.replace(ours, max_positions=None) == dataclasses.replace(theirs, max_positions=None)


def test_a_falcon_that_says_null_is_one_that_says_no() -> None:
    falcon = changed(model_type="falcon", num_key_value_heads=..., new_decoder_architecture=None)
    assert ModelConfig.from_dict({**falcon, "multi_query": True}).kv_heads == 1
    assert ModelConfig.from_dict({**falcon, "multi_query": None}).kv_heads == 32


def test_every_default_is_that_of_a_registered_model_type() -> None:
    assert all(FAMILIES.find(model_type) for model_type in DEFAULTS)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(hidden_size=...), r"'here' \(llama\) lacks hidden_size or n_embd or d_model"),
        (changed(vocab_size=None), "lacks vocab_size"),
        (changed(model_type=...), "has no model_type"),
        (changed(num_attention_heads="32"), "num_attention_heads='32', which must be a whole number of at least 1"),
        (changed(num_hidden_layers=0), "num_hidden_layers=0"),
        (changed(num_hidden_layers=True), "num_hidden_layers=True"),
        (changed(n_embd=2048), "contradicts itself: hidden_size=4096, n_embd=2048"),
        (changed(num_key_value_heads=5), "has 32 query heads and 5 KV heads"),
        (changed(num_attention_heads=24, num_key_value_heads=8), "24 heads do not divide the hidden size 4096"),
        (changed(layer_types=["full_attention"]), "has 32 layers and 1 layer_types"),
        (changed(model_type="deepseek_v3", v_head_dim="x"), "v_head_dim='x'"),
        (changed(model_type="deepseek_v3", kv_lora_rank=None), "lacks kv_lora_rank"),
        ([1, 2], "is not a mapping"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(raw: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        ModelConfig.from_dict(raw, "here")
    assert caught.value.code == "bad-config"


def test_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file") as caught:
        ModelConfig.from_dir(tmp_path)
    assert caught.value.code == "file-missing"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_dir(tmp_path) == ModelConfig.from_dict(LLAMA)
    for damaged in (b"{", b"\xff\xfe{}"):
        (tmp_path / "config.json").write_bytes(damaged)
        with pytest.raises(UsageError, match="is not JSON") as caught:
            ModelConfig.from_dir(tmp_path)
        assert caught.value.code == "file-unreadable"
