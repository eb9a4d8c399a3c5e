"""LoRA adapters of PEFT on split layers equal those on unsplit ones: output, gradients, merged, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import crosscut as cc
import zoo
from crosscut.distributed.mesh import Mesh
from crosscut.errors import RankError, UsageError
from crosscut.layers.replicas import check_replicas, placed_parameters
from crosscut.models import splitter

pytestmark = [  # what PEFT says about transformers 5, and transformers about what PEFT calls
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
OnRanks = Callable[..., list[Any]]
NEAR = 1e-5
RANK = 3
TARGETS = {
    "llama-10q2kv": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],  # column, row, gathered
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # Conv1D
    "phi3-10q2kv": ["qkv_proj", "gate_up_proj", "down_proj"],  # packed, KV heads expanded
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],  # latent: replicated, partial
    "falcon-7b": ["query_key_value", "dense", "dense_4h_to_h"],
    "olmo2-10q2kv": ["q_proj", "k_proj", "v_proj"],  # a norm behind the adapter, where KV heads are expanded
    "cohere-10q2kv": ["q_proj", "k_proj", "v_proj"],
}


def adapted(name: str, **options: Any) -> Any:
    """A PEFT model whose adapters are not zero (PEFT starts B at zero, which would hide a wrong one)."""
    how = {"r": RANK, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": TARGETS[name], **options}
    how["fan_in_fan_out"] = name == "gpt2"
    model = peft.get_peft_model(zoo.model(name), peft.LoraConfig(**how)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ".lora_" in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def outcome(model: Any, name: str) -> dict[str, Tensor]:
    ids = zoo.prompt(name)
    mask = torch.ones_like(ids)
    out = model(input_ids=ids, attention_mask=mask, labels=ids)
    out.loss.backward()
    model.merge_adapter()
    with torch.no_grad():
        merged = model(input_ids=ids, attention_mask=mask).logits
    model.unmerge_adapter()
    return {"logits": out.logits.detach(), "merged": merged}


@cache
def unsplit(name: str) -> dict[str, Tensor]:
    model = adapted(name)
    found = outcome(model, name)
    grads = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | grads | {f"final {n}": value for n, value in model.merge_and_unload().state_dict().items()}


def split(mesh: Mesh, name: str) -> dict[str, Tensor]:
    model = cc.parallelize(adapted(name), mesh)
    found = outcome(model, name)
    placed = [p for p in placed_parameters(model) if p.local.grad is not None]
    grads = {f"grad of {p.name}": p.like(p.local.grad).whole(mesh.tp) for p in placed}
    own = {f"grad of {p.name}": p.local.grad.clone() for p in placed if p.replicated}
    check_replicas(model, mesh)
    final = cc.gather(model.merge_and_unload())
    return found | grads | own | {f"final {n}": value for n, value in final.state_dict().items()}


def compare(on_ranks: OnRanks, name: str, tp: int) -> None:
    expected = unsplit(name)
    for found in on_ranks(tp, split, name):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert float((found[key] - value).norm()) <= NEAR * float(value.norm()), key


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", TARGETS)
def test_adapters_on_split_layers(on_ranks: OnRanks, name: str, tp: int) -> None:
    compare(on_ranks, name, tp)


@pytest.mark.parametrize(("layer", "narrow"), [("SplitRow", "out_features"), ("SplitColumn", "in_features")])
def test_an_adapter_that_is_not_summed_turns_it_red(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, layer: str, narrow: str
) -> None:
    """The exchange of the r numbers a token left out, as when PEFT meets a split layer unprepared (its issues 2394, 3044)."""
    whole = getattr(splitter, layer)

    class Unsummed(whole):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            if getattr(self, narrow) == RANK and not getattr(self, "gather_output", False):
                return F.linear(x, *self._own())
            return super().forward(x, *args)

    unsplit("llama-10q2kv")
    monkeypatch.setattr(splitter, layer, Unsummed)
    with pytest.raises(AssertionError, match=r"grad|logits"):
        compare(on_ranks, "llama-10q2kv", 4)


def test_a_saved_adapter_is_the_unsplit_one(on_ranks: OnRanks, tmp_path: Path) -> None:
    """The same files byte for byte but for the order of the config's target_modules, and loaded the same model."""
    name, one, two = "llama-10q2kv", tmp_path / "one", tmp_path / "two"
    options = {"target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"]}
    adapted(name, **options).save_pretrained(one)
    on_ranks(4, lambda mesh: cc.parallelize(adapted(name, **options), mesh).save_pretrained(two))
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    assert (one / "adapter_model.safetensors").read_bytes() == (two / "adapter_model.safetensors").read_bytes()
    ids = zoo.prompt(name)
    expected = adapted(name, **options)(input_ids=ids).logits

    def load(mesh: Mesh) -> Tensor:
        return cc.parallelize(peft.PeftModel.from_pretrained(zoo.model(name), two), mesh)(input_ids=ids).logits

    for found in on_ranks(2, load):
        torch.testing.assert_close(found, expected)
    assert load_file(two / "adapter_model.safetensors")


def test_gather_gives_the_adapters_back(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> None:
        model, expected = adapted("gpt2"), adapted("gpt2")
        assert cc.gather(cc.parallelize(model, mesh)) is model
        assert [type(m) for m in model.modules()] == [type(m) for m in expected.modules()]
        for key, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key

    on_ranks(4, body)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora_magnitude_vector": ("llama-10q2kv", {"use_dora": True}),
    "lora_embedding_A": ("llama-10q2kv", {"target_modules": ["embed_tokens"]}),
    "original_module": ("llama-10q2kv", {"modules_to_save": ["lm_head"]}),
    "token_adapter": ("llama-10q2kv", {"trainable_token_indices": [1, 2]}),
    "experts.lora_A": ("deepseek_v3", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    "experts.lora_[AB]": ("deepseek_v3", {"target_modules": ["down_proj"]}),  # PEFT takes the experts' for a parameter
}


@pytest.mark.parametrize("word", OTHERS)
def test_other_parts_of_peft_are_refused(on_ranks: OnRanks, word: str) -> None:
    name, options = OTHERS[word]

    def body(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=rf"{word}.* is of PEFT, .*\n.*merge the adapters") as error:
            cc.parallelize(adapted(name, **options), mesh)
        assert error.value.code == "bad-option"

    on_ranks(1, body)


def test_what_is_refused(on_ranks: OnRanks) -> None:
    """Adapters made on a model that is split already would be wrong without a word, so PEFT must not know its layers."""

    def body(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match="LoRA dropout"):
            cc.parallelize(adapted("llama-10q2kv", lora_dropout=0.1).train(), mesh)
        how = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True)
        other = peft.get_peft_model(zoo.model("gpt2"), how)
        with pytest.raises(UsageError, match=r"adapters of type .*IA3.* cannot be split"):
            cc.parallelize(other, mesh)
        model = cc.parallelize(zoo.model("llama-10q2kv"), mesh)
        with pytest.raises(ValueError, match="not supported"):
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model = cc.parallelize(adapted("llama-10q2kv"), mesh)
        with pytest.raises(UsageError, match="'another' cannot be added to a model that is split already"):
            model.add_adapter("another", peft.LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(UsageError, match="'another' cannot be added"):
            model.load_adapter("folder", adapter_name="another")

    on_ranks(4, body)


def test_adapters_that_cannot_be_written_end_all_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = []

    def body(mesh: Mesh) -> None:
        model = cc.parallelize(adapted("llama-10q2kv"), mesh)
        with pytest.raises(RankError if mesh.rank else ValueError, match="rank 0 failed: .*file" if mesh.rank else "file"):
            model.save_pretrained(str(tmp_path / "file"))
        ended.append(mesh.rank)

    on_ranks(2, body)
    assert sorted(ended) == [0, 1]
