"""What parallelize and gather refuse, each before anything is changed, in words that say what to do."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GenerationConfig

import crosscut as cc
import zoo
from crosscut.distributed.mesh import Mesh
from crosscut.errors import MismatchError, UsageError
from crosscut.sharding import FAMILIES, Role, Rule

OnRanks = Callable[..., list[Any]]


def refused(on_ranks: OnRanks, model: Callable[[], Any], words: str, code: str, tp: int = 1, **options: Any) -> None:
    """``parallelize`` refuses the model, and leaves it as it was."""

    def body(mesh: Mesh) -> None:
        built = model()
        before = {path: (type(module), set(module.__dict__)) for path, module in built.named_modules()}
        with pytest.raises(UsageError, match=words) as error:
            cc.parallelize(built, mesh, **options)
        assert error.value.code == code
        assert {path: (type(module), set(module.__dict__)) for path, module in built.named_modules()} == before

    on_ranks(tp, body)


def test_unknown_architecture(on_ranks: OnRanks) -> None:
    refused(on_ranks, lambda: zoo.model("granite"), "no table for model_type 'granite'", "unknown-model")


def test_more_ranks_than_heads(on_ranks: OnRanks) -> None:
    refused(on_ranks, lambda: zoo.model("mistral-mqa"), r"5 query heads .* fewer than 8 ranks\n.*tp 1, 5", "bad-size", tp=8)


def test_alibi(on_ranks: OnRanks) -> None:
    def model() -> Any:
        built = zoo.model("falcon-mha")
        built.config.alibi = True
        return built

    refused(on_ranks, model, "ALiBi", "unknown-model")


def test_quantized_weights(on_ranks: OnRanks) -> None:
    def model() -> Any:
        built = zoo.model("gpt2")
        packed = torch.zeros(48, 90, dtype=torch.int8)
        built.transformer.h[1].mlp.c_fc.weight = nn.Parameter(packed, requires_grad=False)
        return built

    refused(on_ranks, model, r"quantized \(transformer.h.1.mlp.c_fc.weight\)", "bad-dtype")


def test_spread_over_devices(on_ranks: OnRanks) -> None:
    def model() -> Any:
        built = zoo.model("gpt2")
        built.hf_device_map = {"transformer": 0, "lm_head": "cpu"}
        return built

    refused(on_ranks, model, "spread over devices", "bad-option")


def test_a_module_of_ones_own(on_ranks: OnRanks) -> None:
    refused(on_ranks, lambda: nn.Linear(4, 4), "Linear is not a model of transformers", "bad-option")


def test_a_parameter_that_no_rule_names(on_ranks: OnRanks) -> None:
    def model() -> Any:
        built = zoo.model("llama-6q3kv")
        built.model.layers[1].mlp.extra = nn.Linear(4, 4)
        return built

    words = "no rule of the family .* matches the parameter 'model.layers.1.mlp.extra.weight'"
    refused(on_ranks, model, words, "parameter-missing")


@pytest.mark.parametrize(
    ("name", "path", "role", "words"),
    [
        ("llama-6q3kv", "model.norm", Role.COLUMN, r"'model.norm' is a 'column'.* weight is \[48\]"),
        ("llama-6q3kv", "lm_head", Role.EMBEDDING, r"'lm_head' is a 'embedding'.* Linear"),
        ("gpt2", "transformer.h.*.mlp.c_fc", Role.COLUMN, r"c_fc' is a 'column'; it is a Conv1D"),
        ("gpt_neox", "gpt_neox.final_layer_norm", Role.WIDE_QUERY_NORM, r"'wide_query_norm'; it is a LayerNorm"),
    ],
)
def test_a_table_that_does_not_fit(on_ranks: OnRanks, name: str, path: str, role: Role, words: str) -> None:
    family = FAMILIES.find(zoo.ZOO[name].model_type)
    assert family is not None
    wrong = replace(family, rules=(Rule(path, role), *family.rules))
    refused(on_ranks, lambda: zoo.model(name), words, "bad-option", family=wrong)


def test_twice_and_never(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> None:
        model = zoo.model("gpt2")
        with pytest.raises(UsageError, match="the model is not split"):
            cc.gather(model)
        cc.parallelize(model, mesh)
        with pytest.raises(UsageError, match="split already"):
            cc.parallelize(model, mesh)
        cc.parallelize(cc.gather(model), mesh)

    on_ranks(2, body)


def test_what_would_take_a_part_for_the_whole(on_ranks: OnRanks, tmp_path: Path) -> None:
    def body(mesh: Mesh) -> None:
        model = cc.parallelize(zoo.model("gpt2"), mesh)
        with pytest.raises(UsageError, match=r"would write this rank's part .*\n.*gather"):
            model.save_pretrained(tmp_path)
        with pytest.raises(UsageError, match="cannot be resized"):
            model.resize_token_embeddings(140)
        assert not list(tmp_path.iterdir())
        cc.gather(model)
        if mesh.rank == 0:
            model.save_pretrained(tmp_path)

    on_ranks(2, body)
    stored = zoo.load(tmp_path).state_dict()
    assert all(torch.equal(stored[key], value) for key, value in zoo.model("gpt2").state_dict().items())


def test_ranks_with_different_weights(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> None:
        with pytest.raises(MismatchError, match="do not have the same weights in 'transformer"):
            cc.parallelize(zoo.model("gpt2", seed=mesh.rank), mesh)

    on_ranks(2, body)


def test_dropout_that_would_draw_unequally(on_ranks: OnRanks) -> None:
    """Five heads on two ranks: after the attention dropout the ranks' random states would differ, and all later masks."""

    def model() -> Any:
        built = zoo.model("gpt2-5heads")
        built.config.attn_pdrop = 0.1
        return built

    refused(on_ranks, lambda: model().train(), "training with attention dropout", "bad-option", tp=2)

    def body(mesh: Mesh) -> None:
        split = cc.parallelize(model(), mesh)
        with pytest.raises(UsageError, match="training with attention dropout"):
            split.train()
        assert not split.eval().training

    on_ranks(2, body)
    on_ranks(5, lambda mesh: cc.parallelize(model().train(), mesh))


def test_a_multimodal_model(on_ranks: OnRanks) -> None:
    def model() -> Any:
        text = {**zoo.ZOO["gemma3"].sizes, "model_type": "gemma3_text"}
        vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes = {**vision, "image_size": 28, "patch_size": 14}
        with torch.device("meta"):
            return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=sizes, mm_tokens_per_image=1))

    refused(on_ranks, model, r"more than a language model.*\n.*from_pretrained\(directory, mesh\)", "unknown-model")


def test_clocks_of_ranks_do_not_end_a_text(on_ranks: OnRanks) -> None:
    """One rank that stopped before the others would leave them waiting for its part of the next token."""

    def body(mesh: Mesh) -> None:
        model = cc.parallelize(zoo.model("gpt2"), mesh)
        ids = zoo.prompt("gpt2")
        timed = GenerationConfig(max_time=1.0, max_new_tokens=2, pad_token_id=0)
        for args, options in (((ids,), {"max_time": 1.0}), ((ids, timed), {}), ((ids,), {"generation_config": timed})):
            with pytest.raises(UsageError, match=r"max_time.*\n.*max_new_tokens"):
                model.generate(*args, **options)
        model.generation_config.max_time = 1.0
        with pytest.raises(UsageError, match="max_time"):
            model.generate(ids)
        assert model.generate(ids, max_time=None, max_new_tokens=2).shape == (2, 11)

    on_ranks(2, body)
    alone = on_ranks(1, lambda mesh: cc.parallelize(zoo.model("gpt2"), mesh))[0]
    assert alone.generate(zoo.prompt("gpt2"), max_time=60.0, max_new_tokens=2).shape == (2, 11)


@pytest.mark.parametrize("name", ["llama-6q3kv", "gemma3", "mixtral"])
def test_a_split_model_is_not_pickled(on_ranks: OnRanks, name: str) -> None:
    """Nor a part of it; gathered it is, and its state on a rank is."""

    def body(mesh: Mesh) -> None:
        model = cc.parallelize(zoo.model(name), mesh)
        for part in (model, model.get_input_embeddings(), model.model.layers[0].self_attn, model.model.layers[0].mlp, mesh):
            with pytest.raises(UsageError, match=r"cannot be pickled.*\n.*or crosscut.save_pretrained") as error:
                torch.save(part, io.BytesIO())
            assert error.value.code == "bad-option"
        assert type(copy(model)) is type(model)
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(cc.gather(model), io.BytesIO())

    on_ranks(2, body)
