"""Every family of the zoo, split by its table, equals itself unsplit: logits, loss, gradients, text; and is gathered again."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscut as cc
import zoo
from crosscut.distributed.mesh import Mesh
from crosscut.layers.replicas import check_replicas, clip_grad_norm_, placed_parameters
from crosscut.layers.shards import take
from crosscut.models import split_modules, weights
from crosscut.models.split_modules import OnePerQuery
from crosscut.sharding import FAMILIES, Role, Rule, plan
from crosscut.sharding.describe import describe

OnRanks = Callable[..., list[Any]]
NEAR = 1e-5  # relative; float32 sums in another order are off by 1e-6 here, a wrong cut or a missing sum by far more
NEW_TOKENS = 5


def batch(name: str) -> dict[str, Tensor]:
    """Two prompts, the first of which is shorter: padded on the left."""
    ids = zoo.prompt(name)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def outcome(model: Any, name: str) -> dict[str, Tensor]:
    """Text, logits, loss, and the gradients in ``.grad``."""
    inputs = batch(name)
    text = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    out = model(**inputs, labels=labels)
    out.loss.backward()
    return {"text": text, "logits": out.logits.detach()[inputs["attention_mask"] == 1], "loss": out.loss.detach()}


@cache
def unsplit(name: str, **options: Any) -> dict[str, Tensor]:
    model = zoo.model(name, **options)
    found = outcome(model, name)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return found | {"norm": norm} | {f"grad of {n}": p.grad for n, p in model.named_parameters()}


def split(mesh: Mesh, name: str, prepare: Callable[[Any], None] | None = None, **options: Any) -> dict[str, Tensor]:
    """The same of the split model; then one step, after which replicas must be equal, and the model gathered."""
    model = zoo.model(name, **options.pop("built", {}))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert cc.parallelize(model, mesh, **options) is model
    if prepare is not None:
        prepare(model)
    found = outcome(model, name)
    placed = {p.name: p for p in placed_parameters(model)}
    grads = {f"grad of {n}": p.like(p.local.grad).whole(mesh.tp) for n, p in placed.items()}
    own = {f"grad of {n}": p.local.grad.clone() for n, p in placed.items() if p.replicated}  # a rank's own replica counts
    gathered = cc.gather(model).state_dict()
    assert gathered.keys() == before.keys()
    assert all(torch.equal(gathered[key], value) for key, value in before.items()), "gather changed the weights"
    return found | grads | own


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key in found:
        if key == "text":
            assert torch.equal(found[key], expected[key]), "another text"
            continue
        # OPT's key bias moves all scores of a token alike, so its gradient is 0 but for rounding: hence a floor
        scale = max(float(expected[key].norm()), 1e-3 * float(expected["norm"]))
        off = float((found[key] - expected[key]).norm()) / scale
        assert off < NEAR, f"{key}: {off:.1e}"


def compare(on_ranks: OnRanks, name: str, tp: int, *args: Any, **options: Any) -> None:
    expected = unsplit(name)
    for found in on_ranks(tp, lambda mesh: split(mesh, name, *args, **options)):
        assert_equal(found, expected)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_split_model_is_the_unsplit_one(on_ranks: OnRanks, name: str, tp: int) -> None:
    compare(on_ranks, name, tp)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("name", ["llama-9q3kv-tied", "gpt2-5heads", "falcon-40b-10q2kv", "deepseek_v3"])
def test_one_rank_and_three(on_ranks: OnRanks, name: str, tp: int) -> None:
    compare(on_ranks, name, tp)


@pytest.mark.parametrize("name", zoo.STRANGERS)
def test_a_guessed_table(on_ranks: OnRanks, name: str) -> None:
    compare(on_ranks, name, 4, accept_guess=True)


@pytest.mark.parametrize("name", ["llama-10q2kv", "gpt2", "olmo2-10q2kv"])
def test_eager_attention(on_ranks: OnRanks, name: str) -> None:
    expected = unsplit(name, attn_implementation="eager")
    for found in on_ranks(4, lambda mesh: split(mesh, name, built={"attn_implementation": "eager"})):
        assert_equal(found, expected)


def test_every_way_to_expand_kv_heads_is_taken(on_ranks: OnRanks) -> None:
    """Ten query heads of two KV heads on four ranks: rank 1 holds two query heads of one group and one of the other."""

    def body(mesh: Mesh, name: str) -> set[str]:
        model = cc.parallelize(zoo.model(name), mesh)
        return {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, OnePerQuery)}

    expected = {
        "llama-10q2kv": {"k_proj", "v_proj"},
        "phi3-10q2kv": {"qkv_proj"},
        "falcon-40b-10q2kv": {"query_key_value"},
        "cohere-10q2kv": {"k_norm", "v_proj"},
        "olmo2-10q2kv": {"k_norm", "v_proj"},
    }
    for name, modules in expected.items():
        assert on_ranks(4, body, name) == [set(), modules, set(), set()], name


def drop_rows(*args: Any) -> Any:
    return args[0]


FAULTS = {
    "q, k and v cut contiguously": ("phi3", Role.QKV, Role.COLUMN),
    "gate and up cut contiguously": ("phi3", Role.GATE_UP, Role.COLUMN),
    "Conv1D's q, k and v cut contiguously": ("gpt2", Role.QKV, Role.COLUMN),
    "NeoX's heads taken for blocks of q, k and v": ("gpt_neox", Role.GROUPED_QKV, Role.QKV),
    "a head norm's gradient not summed": ("qwen3", Role.HEAD_NORM, Role.REPLICATED),
    "the latent key's gradient not summed": ("deepseek_v3", Role.LATENT_DOWN, Role.REPLICATED),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_role_turns_it_red(on_ranks: OnRanks, fault: str) -> None:
    name, right, wrong = FAULTS[fault]
    family = FAMILIES.find(zoo.ZOO[name].model_type)
    assert family is not None
    rules = tuple(Rule(r.path, wrong, r.transposed) if r.role is right else r for r in family.rules)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(on_ranks, name, 2, family=replace(family, rules=rules))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("llama-10q2kv", "_summed"),  # the gradient of KV heads on two ranks
        ("cohere-10q2kv", "_summed"),
        ("mixtral", "copy_to_tp"),  # the routing weights' gradient, and that of the input
        ("mixtral", "reduce_from_tp"),
        ("qwen3_moe", "copy_to_tp"),
        ("olmo2", "reduce_from_tp"),
        ("olmo2", "copy_to_tp"),
        ("deepseek_v2", "copy_to_tp"),
    ],
)
def test_a_missing_sum_turns_it_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, name: str, function: str) -> None:
    unsplit(name)
    monkeypatch.setattr(split_modules, function, drop_rows)
    with pytest.raises(AssertionError):
        compare(on_ranks, name, 4)


@pytest.mark.parametrize("name", ["llama-10q2kv", "qwen3_moe", "deepseek_v3", "olmo2-10q2kv"])
def test_training_keeps_replicas_equal(on_ranks: OnRanks, name: str) -> None:
    """Two steps with clipping, activations recomputed: the unsplit model's weights, and the same bits in every copy."""

    def train(model: Any, clip: Callable[[Any], Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.activation_checkpointing_enable()
        model.train()
        for _ in range(2):
            model(**batch(name), labels=batch(name)["input_ids"], use_cache=False).loss.backward()
            clip(model)
            optimizer.step()
            optimizer.zero_grad()

    whole = zoo.model(name)
    train(whole, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = cc.parallelize(zoo.model(name), mesh)
        train(model, lambda model: clip_grad_norm_(model, 0.5, mesh))
        check_replicas(model, mesh)
        return cc.gather(model).state_dict()

    start = zoo.model(name).state_dict()
    for found in on_ranks(4, body):
        for key, value in whole.state_dict().items():
            assert float((found[key] - value).norm()) <= 1e-5 * float(value.norm()), key
            assert name == "deepseek_v3" or not torch.equal(value, start[key]), key


@pytest.mark.parametrize("name", ["llama-10q2kv", "gpt2", "mixtral", "deepseek_v3"])
def test_saved_at_two_loaded_at_four(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    on_ranks(2, lambda mesh: weights.save(cc.parallelize(zoo.model(name), mesh), path, mesh))

    def load(mesh: Mesh) -> dict[str, Tensor]:
        model = cc.parallelize(zoo.model(name, seed=5), mesh)
        weights.load(model, path, mesh)
        return dict(cc.gather(model).named_parameters())

    for found in on_ranks(4, load):
        for key, value in zoo.model(name).named_parameters():
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "qwen2_moe"])
def test_a_meta_model_is_split_without_weights(on_ranks: OnRanks, name: str) -> None:
    """Every parameter has the rank's shape and its cut; filled from a checkpoint's tensors it is the split model."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        with torch.device("meta"):
            hollow = zoo.hollow(name)
        cc.parallelize(hollow, mesh)
        stored = dict(zoo.model(name).named_parameters())
        for placed in list(placed_parameters(hollow)):
            assert placed.local.is_meta
            parent, _, leaf = placed.name.rpartition(".")
            mine = take(stored[placed.name].detach(), placed.cut, mesh.tp.size, mesh.tp.rank)
            assert mine.shape == placed.local.shape
            setattr(hollow.get_submodule(parent), leaf, torch.nn.Parameter(mine))
        hollow.tie_weights()
        whole = zoo.model(name)
        for path, buffer in whole.named_buffers():
            parent, _, leaf = path.rpartition(".")
            hollow.get_submodule(parent)._buffers[leaf] = buffer
        return {"logits": hollow.eval()(**batch(name)).logits.detach()[batch(name)["attention_mask"] == 1]}

    for found in on_ranks(2, body):
        assert_equal(found, unsplit(name))


def test_a_static_cache_has_the_ranks_heads(on_ranks: OnRanks) -> None:
    """Also where KV heads are expanded to one per query head."""
    name = "llama-10q2kv"
    how = {**batch(name), "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected = zoo.model(name).generate(**how)
    for found in on_ranks(4, lambda mesh: cc.parallelize(zoo.model(name), mesh).generate(**how)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama-10q2kv", "gemma3", "deepseek_v3", "falcon-7b", "falcon-40b", "falcon-40b-10q2kv"])
def test_the_plan_counts_the_cache_that_a_rank_fills(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    zoo.config(name).save_pretrained(tmp_path)
    tokens = 4

    def body(mesh: Mesh) -> float:
        model = cc.parallelize(zoo.model(name), mesh)
        layers = model(zoo.prompt(name, batch=1, length=tokens), use_cache=True).past_key_values.layers
        return sum(held.numel() * held.element_size() for layer in layers for held in (layer.keys, layer.values)) / tokens

    for tp in (1, 2, 4):
        planned = plan.split(describe(tmp_path, "float32"), tp)
        sizes = [full + short for full, short in zip(planned.full_token, planned.window_token, strict=True)]
        assert on_ranks(tp, body) == sizes, tp


@pytest.mark.parametrize(("features", "tp", "dtype"), [(16, 4, torch.bfloat16), (8, 6, torch.float32), (4, 6, torch.float32)])
def test_narrow_experts(on_ranks: OnRanks, features: int, tp: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are aligned in float32 and not in bfloat16, to which the split model is converted; and ranks without any."""
    animal = zoo.ZOO["mixtral"]
    monkeypatch.setitem(zoo.ZOO, "narrow", replace(animal, sizes={**animal.sizes, "intermediate_size": features}))
    ids = zoo.prompt("narrow")
    expected = zoo.model("narrow")(ids).logits.detach()
    for found in on_ranks(tp, lambda mesh: cc.parallelize(zoo.model("narrow"), mesh).to(dtype)(ids).logits.detach()):
        near = NEAR if dtype == torch.float32 else 0.05
        assert float((found - expected).norm()) <= near * float(expected.norm())


@pytest.mark.parametrize("name", ["llama-10q2kv", "phi3-10q2kv"])
def test_training_after_inference_mode(on_ranks: OnRanks, name: str) -> None:
    """What a rank made in inference mode (the order in which heads are repeated) serves backward, too."""

    def body(mesh: Mesh) -> Tensor:
        model = cc.parallelize(zoo.model(name), mesh)
        with torch.inference_mode():
            model(**batch(name))
        return outcome(model, name)["loss"]

    for loss in on_ranks(3, body):
        assert_equal({"loss": loss}, unsplit(name))


def test_a_deep_copy_is_restored_too() -> None:
    """What was not there before the change is not there afterwards, in a copy as in the original."""
    module = torch.nn.Linear(2, 2)
    split_modules.change(module, mine=3)
    other = deepcopy(module)
    split_modules.restore(other)
    assert not hasattr(other, "mine")


def test_a_deep_copy_is_a_model_of_its_own(on_ranks: OnRanks) -> None:
    """As moving averages of the weights keep; it shares the ranks' group, which cannot be copied."""
    name = "llama-6q3kv"

    def body(mesh: Mesh) -> tuple[bool, Tensor, Tensor]:
        model = cc.parallelize(zoo.model(name), mesh).eval()
        twin = deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        whole = dict(zoo.model(name).named_parameters())
        logits = twin(**batch(name)).logits.detach()
        same = all(torch.equal(p, whole[key]) for key, p in cc.gather(twin).named_parameters())
        return same, logits[batch(name)["attention_mask"] == 1], model(**batch(name)).logits

    for same, logits, zeroed in on_ranks(2, body):
        assert same
        assert_equal({"logits": logits}, unsplit(name))
        assert not zeroed.any()
