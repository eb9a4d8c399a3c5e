"""The families' tables against transformers' own models: every parameter has one rule, the right shape, and joins again."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import zoo
from crosscut.errors import UsageError
from crosscut.layers.shards import join, take
from crosscut.model_config import ModelConfig
from crosscut.sharding import FAMILIES, Family, Role, Rule, cut_of
from crosscut.sharding.describe import describe, nbytes
from crosscut.sharding.family import Registry, matches
from crosscut.sharding.guess import guess
from crosscut.sharding.plan import split
from crosscut.sharding.shapes import parameters

NAMES = list(zoo.ZOO)
KNOWN = FAMILIES.all()
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe-dense": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "deepseek_v3-direct": ("deepseek_v3", {"q_lora_rank": None}),
    "opt-post-norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 48, "enable_bias": False}),
    "falcon-one-norm": ("falcon-40b", {"num_ln_in_parallel_attn": 1}),
    "gpt_neox-plain": ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    "cohere-plain": ("cohere", {"use_qk_norm": False, "attention_bias": True}),
}
"""Models of the zoo with other switches, so that every rule of every table is used."""
GUESSABLE = ("llama-6q3kv", "qwen2", "phi", "qwen3", "gemma", "starcoder2")


@cache
def meta(name: str) -> Any:
    """The model without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(name))


def hf_config(name: str) -> Any:
    base, sizes = VARIANTS.get(name, (name, {}))
    animal = zoo.ZOO[base]
    return AutoConfig.for_model(animal.model_type, **{**animal.sizes, **sizes})


@cache
def known(name: str) -> tuple[ModelConfig, Family, dict[str, tuple[int, ...]]]:
    """Config, table and the shapes of transformers' own parameters."""
    config = ModelConfig.from_dict(hf_config(name).to_dict())
    return config, FAMILIES.of(config), {key: tuple(value.shape) for key, value in meta(name).named_parameters()}


def applying(family: Family, name: str) -> list[Rule]:
    """All rules that match a parameter."""
    return [r for r in family.rules if matches(r.path, name) or matches(r.path, name.rpartition(".")[0])]


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_every_parameter_has_one_rule(name: str) -> None:
    _, family, shapes = known(name)
    assert {key: len(applying(family, key)) for key in shapes} == dict.fromkeys(shapes, 1)


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_the_table_alone_gives_every_parameter_and_its_shape(name: str) -> None:
    config, family, shapes = known(name)
    assert family.exact
    assert dict(parameters(config, family)) == shapes


def test_no_rule_is_idle() -> None:
    """A rule that matches no parameter of any model of the zoo, nor a name on disk, is a slip."""
    idle = {(family.name, rule.path) for family in KNOWN for rule in family.rules}
    for name in (*NAMES, *VARIANTS):
        _, family, shapes = known(name)
        stored = {part for key in shapes for expert in family.stored_parts(key, 2) or () for part in expert}
        found = [rule for key in (*shapes, *stored, "lm_head.weight") for rule in applying(family, key)]
        idle -= {(family.name, rule.path) for rule in found}
    assert not idle


@pytest.mark.parametrize("name", NAMES)
def test_local_attributes_are_there(name: str) -> None:
    _, family, _ = known(name)
    for local in family.local:
        modules = [module for path, module in meta(name).named_modules() if matches(local.path, path)]
        assert modules, local
        for module in modules:
            for word in local.attribute.split("."):
                module = getattr(module, word)


@pytest.mark.parametrize("name", NAMES)
def test_buffers_that_are_saved_are_known(name: str) -> None:
    _, family, shapes = known(name)
    assert all(family.is_buffer(key) for key in meta(name).state_dict() if key not in shapes and key != "lm_head.weight")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_shards_of_any_tp_join_to_the_parameter(name: str, data: st.DataObject) -> None:
    config, family, shapes = known(name)
    key = data.draw(st.sampled_from(sorted(shapes)))
    tp = data.draw(st.integers(1, config.heads))
    full = torch.arange(torch.Size(shapes[key]).numel()).reshape(shapes[key])
    cut = cut_of(config, family, key, shapes[key]).cut
    shards = [take(full, cut, tp, rank) for rank in range(tp)]
    assert torch.equal(join(shards, cut, shapes[key]), full)
    assert cut.dim is None or sum(shard.numel() for shard in shards) >= full.numel()


def test_experts_are_cut_inside_as_their_parts_on_disk() -> None:
    config, family, shapes = known("mixtral")
    packed, key = torch.randn(4, 2 * 88, 48), "model.layers.1.mlp.experts.gate_up_proj"
    assert shapes[key] == tuple(packed.shape)
    whole = take(packed, cut_of(config, family, key, shapes[key]).cut, 3, 1)
    for expert, parts in enumerate(family.stored_parts(key, config.experts) or ()):
        assert parts == [f"model.layers.1.mlp.experts.{expert}.{word}.weight" for word in ("w1", "w3")]
        own = [
            take(packed[expert, i * 88 : (i + 1) * 88], cut_of(config, family, parts[i], (88, 48)).cut, 3, 1) for i in (0, 1)
        ]
        assert torch.equal(whole[expert], torch.cat(own))
    assert family.stored_parts("model.norm.weight", 4) is None


@pytest.mark.parametrize(
    ("name", "stored", "wanted"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("gpt2", "transformer.wte.weight", "transformer.wte.weight"),
        ("gpt2", "lm_head.weight", "lm_head.weight"),
        ("llama-6q3kv", "layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("opt", "decoder.layers.0.fc1.bias", "model.decoder.layers.0.fc1.bias"),
        ("gpt_neox", "embed_out.weight", "lm_head.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("gemma3", "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gemma3", "model.language_model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_on_disk(name: str, stored: str, wanted: str) -> None:
    _, family, _ = known(name)
    assert family.name_in_model(stored) == wanted
    assert len(applying(family, wanted)) == 1


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("gpt2", "h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("llama-6q3kv", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gemma3", "vision_tower.vision_model.embeddings.patch_embedding.weight"),
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
    ],
)
def test_tensors_on_disk_that_no_model_has(name: str, stored: str) -> None:
    config, family, _ = known(name)
    assert family.is_ignored(stored, config.layers)
    assert not family.is_ignored("model.layers.0.mlp.up_proj.weight", config.layers)


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_saves_is_described_whole(name: str, tmp_path: Path) -> None:
    """From config.json and headers: nothing missing or unmatched, and the bytes of a rank are those of its shards."""
    model = zoo.model(name)
    model.save_pretrained(tmp_path)
    found = describe(tmp_path)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    total += sum(b.numel() * b.element_size() for key, b in model.named_buffers() if found.family.is_buffer(key))
    cut = split(found, 2)
    assert cut.total == total == split(found, 1).weights[0]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shards = [take(file.get_tensor(t.stored.name), t.place.cut, 2, 1) for t in found.tensors if t.stored]
    assert cut.weights[1] == sum(shard.numel() * shard.element_size() for shard in shards)
    assert cut.total <= sum(cut.weights) < 2 * cut.total


@pytest.mark.parametrize("name", GUESSABLE)
def test_a_guess_cuts_what_the_table_cuts(name: str) -> None:
    config, family, shapes = known(name)
    guessed = guess(config, shapes)
    assert guessed.guessed
    roles = {key: (rule.role if (rule := guessed.find(key)) else None) for key in shapes}
    assert roles == {key: applying(family, key)[0].role for key in shapes}
    assert {local.attribute for local in guessed.local} > {local.attribute for local in family.local}


@pytest.mark.parametrize(
    ("name", "whole", "cut"),
    [
        (
            "gpt_neox",
            ("attention.query_key_value", "attention.dense"),
            {"mlp.dense_h_to_4h": Role.COLUMN, "mlp.dense_4h_to_h": Role.ROW},
        ),
        ("olmo2", ("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_norm"), {"mlp.up_proj": Role.COLUMN}),
        ("phi3", ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"), {}),
        ("mixtral", ("mlp.experts.gate_up_proj", "mlp.gate"), {"self_attn.q_proj": Role.QUERY}),
        ("deepseek_v3", ("self_attn.q_b_proj", "self_attn.o_proj"), {"mlp.shared_experts.down_proj": Role.ROW}),
        ("gpt2", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), {}),
        ("opt", (), {"self_attn.q_proj": Role.QUERY, "fc1": Role.COLUMN, "fc2": Role.ROW}),
    ],
)
def test_a_guess_leaves_whole_what_it_cannot_read(name: str, whole: tuple[str, ...], cut: dict[str, Role]) -> None:
    config, _, shapes = known(name)
    guessed = guess(config, shapes)
    for key in shapes:
        rule = guessed.find(key)
        assert rule is not None, key
        if any(key.endswith((f".{word}", f".{word}.weight", f".{word}.bias")) for word in whole):
            assert rule.role is Role.REPLICATED, key
        for word, role in cut.items():
            if key.endswith(f".{word}.weight"):
                assert rule.role is role, key
    for path in ("model.decoder.project_in", "model.decoder.project_out"):
        assert guessed.find_module(path) in (None, Rule(path, Role.REPLICATED))


@pytest.mark.parametrize(
    ("biases", "role"),
    [({}, Role.ROW), ({"out": (8,)}, Role.ROW), ({"out": (24,)}, Role.REPLICATED), ({"wide": (8,)}, Role.REPLICATED)],
)
def test_a_guess_reads_biases_to_tell_a_transposed_weight(biases: dict[str, tuple[int, ...]], role: Role) -> None:
    raw = {"model_type": "x", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    shapes: dict[str, tuple[int, ...]] = {"h.0.mlp.wide.weight": (24, 8), "h.0.mlp.out.weight": (8, 24)}
    shapes |= {f"h.0.mlp.{name}.bias": shape for name, shape in biases.items()}
    rule = guess(ModelConfig.from_dict(raw), shapes).find("h.0.mlp.out.weight")
    assert rule is not None
    assert rule.role is role


def test_tables_of_ones_own() -> None:
    registry, llama = Registry(), FAMILIES.find("llama")
    assert llama is not None
    registry.register(llama)
    mine = Family("mine", ("llama", "granite"), (Rule("model.embed_tokens", Role.EMBEDDING),))
    registry.register(mine)
    assert registry.find("llama") is registry.find("granite") is mine
    assert registry.all() == [mine]
    config, _, _ = known("llama-6q3kv")
    with pytest.raises(UsageError, match=r"no rule of the family 'mine' matches the parameter 'lm_head\.weight'") as caught:
        cut_of(config, mine, "lm_head.weight", (101, 48))
    assert caught.value.code == "parameter-missing"


def test_an_unknown_model_type_is_refused_and_the_nearest_named() -> None:
    raw = {"model_type": "llana", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    with pytest.raises(UsageError, match="no table for model_type 'llana'; did you mean 'llama'") as caught:
        FAMILIES.of(ModelConfig.from_dict(raw))
    assert caught.value.code == "unknown-model"


def test_sizes_of_elements() -> None:
    assert nbytes((3, 5), "BF16") == 30
    assert nbytes((), "F32") == 4
    assert nbytes((4, 2), "F4") == 4


def test_a_wrong_rule_has_the_right_shape_and_the_wrong_rows() -> None:
    config, family, _ = known("phi3")
    key, full = "model.layers.0.mlp.gate_up_proj.weight", torch.arange(24).reshape(12, 2)
    right = take(full, cut_of(config, family, key, (12, 2)).cut, 2, 0)
    wrong_family = Family("wrong", ("phi3",), (Rule("model.layers.*.mlp.gate_up_proj", Role.COLUMN),))
    wrong = take(full, cut_of(config, wrong_family, key, (12, 2)).cut, 2, 0)
    assert right.shape == wrong.shape
    assert not torch.equal(right, wrong)
