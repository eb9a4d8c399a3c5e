"""Whole models in and out of Hugging Face directories: every family, byte for byte; and errors that all ranks share."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3Config

import crosscut as cc
import zoo
from crosscut.distributed.mesh import Mesh
from crosscut.errors import RankError, UsageError
from crosscut.models import load as loading
from crosscut.models import read, save, slots
from crosscut.sharding import Column, plan
from crosscut.sharding.describe import describe

OnRanks = Callable[..., list[Any]]
SHARD = "60KB"


def load(where: Path, mesh: Mesh, **options: Any) -> Any:
    return cc.from_pretrained(where, mesh, uneven=True, **options)


def whole(where: Path, **options: Any) -> Callable[[Mesh], dict[str, Tensor]]:
    """What a rank function gathers of the checkpoint in ``where``."""
    return lambda mesh: dict(cc.gather(load(where, mesh, **options)).state_dict())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def assert_same_files(found: Path, expected: Path) -> None:
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def saved(name: str, where: Path, **options: Any) -> Any:
    """A model of the zoo, which transformers saved to ``where``."""
    model = zoo.model(name)
    model.save_pretrained(where, **options)
    return model


@pytest.mark.parametrize("name", zoo.ZOO)
def test_saved_at_two_loaded_at_four(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    """transformers' files, loaded at tp 2 and saved, are the same bytes; loaded at tp 4 and gathered, the same model."""
    model = saved(name, tmp_path / "theirs")
    on_ranks(2, lambda mesh: cc.save_pretrained(load(tmp_path / "theirs", mesh), tmp_path / "ours", mesh))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    for found in on_ranks(4, whole(tmp_path / "ours")):
        assert_same(found, model.state_dict())


@pytest.mark.parametrize("name", zoo.STRANGERS)
def test_a_model_without_a_table(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "theirs")

    def body(mesh: Mesh) -> dict[str, Tensor]:
        split = load(tmp_path / "theirs", mesh, accept_guess=True)
        cc.save_pretrained(split, tmp_path / "ours", mesh)
        return dict(cc.gather(split).state_dict())

    for found in on_ranks(3, body):
        assert_same(found, model.state_dict())
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["llama-9q3kv-tied", "mixtral", "gpt2", "gpt_neox", "deepseek_v3"])
def test_several_files(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    """Divided as transformers divides them; and as they were, when that is not said."""
    model = saved(name, tmp_path / "theirs", max_shard_size=SHARD)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3

    def body(mesh: Mesh) -> None:
        cc.save_pretrained(cc.parallelize(zoo.model(name), mesh), tmp_path / "divided", mesh, max_shard_size=SHARD)
        cc.save_pretrained(load(tmp_path / "theirs", mesh), tmp_path / "again", mesh)

    on_ranks(2, body)
    assert_same_files(tmp_path / "divided", tmp_path / "theirs")
    assert_same_files(tmp_path / "again", tmp_path / "theirs")
    for found in on_ranks(3, whole(tmp_path / "again")):
        assert_same(found, model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-6q3kv", "gemma2", "deepseek_v3"])
def test_dtypes_are_those_of_transformers(on_ranks: OnRanks, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also of what transformers keeps in float32 (DeepSeek's router), and back in the dtype that it had on disk."""
    zoo.model(name, dtype).save_pretrained(tmp_path / "theirs")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert theirs.dtype == dtype

    def body(mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = load(tmp_path / "theirs", mesh)
        cc.save_pretrained(model, tmp_path / "ours", mesh)
        return dict(cc.gather(model).state_dict()), dict(model.named_buffers())

    for found, buffers in on_ranks(2, body):
        assert_same(found, theirs.state_dict())
        assert_same(buffers, dict(theirs.named_buffers()))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).state_dict()
    for found in on_ranks(2, whole(tmp_path / "theirs", dtype="float32")):
        assert_same(found, converted)


@pytest.mark.parametrize("name", ["llama-9q3kv-tied", "deepseek_v3"])
def test_the_plan_counts_the_bytes_that_a_rank_holds(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    """Also of what stays in float32."""
    saved(name, tmp_path)
    for tp in (1, 3):
        held = on_ranks(tp, lambda mesh: sum(t.local.nbytes for t in slots.tensors_of(load(tmp_path, mesh, dtype="float16"))))
        assert tuple(held) == plan.split(describe(tmp_path, "float16"), tp).weights, tp


@pytest.mark.parametrize("name", ["llama-9q3kv-tied", "gemma3", "qwen3_moe", "opt"])
def test_it_computes_what_the_unsplit_model_computes(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    """Tied weights are one, buffers are computed, and the model generates and trains."""
    expected = saved(name, tmp_path)
    ids = zoo.prompt(name)
    logits, text = expected(ids).logits, expected.generate(ids, max_new_tokens=4, do_sample=False)

    def body(mesh: Mesh) -> None:
        model = load(tmp_path, mesh)
        assert not model.training
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), text)
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        head = model.get_output_embeddings().weight
        assert (head is model.get_input_embeddings().weight) == model.config.tie_word_embeddings

    on_ranks(2, body)


def test_old_names_and_buffers(on_ranks: OnRanks, tmp_path: Path) -> None:
    """GPT-2 as its authors stored it: names without the prefix, a mask that is no parameter; saved as it was, without that."""
    model = saved("gpt2", tmp_path)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "plain.safetensors", {"format": "pt"})
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    on_ranks(2, lambda mesh: cc.save_pretrained(load(tmp_path, mesh), tmp_path / "ours", mesh))
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    for found in on_ranks(2, whole(tmp_path / "ours")):
        assert_same(found, model.state_dict())


@pytest.mark.parametrize("divided", [False, True])
def test_pickles_load_when_they_are_allowed(on_ranks: OnRanks, divided: bool, tmp_path: Path) -> None:
    model = saved("llama-9q3kv-tied", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = model.state_dict()
    if divided:
        parts = [dict(list(state.items())[i::2]) for i in range(2)]
        for i, part in enumerate(parts):
            torch.save(part, tmp_path / f"pytorch_model-{i}.bin")
        where = {name: f"pytorch_model-{i}.bin" for i, part in enumerate(parts) for name in part}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    for found in on_ranks(3, whole(tmp_path, allow_pickle=True)):
        assert_same(found, state)


def test_two_groups_of_two_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    """dp 2 x tp 2: each group holds the model, and one rank of all writes."""
    model = saved("qwen3_moe", tmp_path / "theirs")

    def body(mesh: Mesh) -> dict[str, Tensor]:
        split = load(tmp_path / "theirs", mesh)
        cc.save_pretrained(split, tmp_path / "ours", mesh)
        return dict(cc.gather(split).state_dict())

    for found in on_ranks(4, body, tp=2):
        assert_same(found, model.state_dict())
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


# ---- errors that one rank meets


def outcomes(on_ranks: OnRanks, world: int, body: Callable[[Mesh], Any]) -> list[Exception]:
    """What each rank raises; every rank must."""

    def caught(mesh: Mesh) -> Exception:
        with pytest.raises((UsageError, RankError, OSError)) as error:
            body(mesh)
        return error.value

    return on_ranks(world, caught)


def test_what_one_rank_misses_all_ranks_raise(on_ranks: OnRanks, tmp_path: Path) -> None:
    """As on a host where the file is not: before anything is allocated."""
    saved("llama-6q3kv", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    first, second, third = outcomes(on_ranks, 3, lambda mesh: load(tmp_path / ("b" if mesh.rank == 1 else "a"), mesh))
    assert isinstance(second, UsageError)
    assert second.code == "file-missing"
    for other in (first, third):
        assert isinstance(other, RankError)
        assert "rank 1 failed: " in str(other)
        assert "model.safetensors" in str(other)


def test_a_read_that_fails_on_one_rank_ends_all(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved("llama-6q3kv", tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    fill = loading._fill

    def shortened(model: Any, source: Any, slots: Any, mesh: Mesh, *rest: Any) -> Any:
        if mesh.rank == 1:
            os.truncate(source.directory / "model.safetensors", 20000)
        return fill(model, source, slots, mesh, *rest)

    monkeypatch.setattr(loading, "_fill", shortened)
    first, second = outcomes(on_ranks, 2, lambda mesh: load(tmp_path / str(mesh.rank), mesh))
    assert "ended while it was read" in str(second)
    assert "rank 1 failed: " in str(first)


@pytest.mark.parametrize("name", ["llama-6q3kv", "qwen3_moe"])
def test_weights_that_are_not_finite_are_named(on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    """Whichever rank holds the number."""
    model = zoo.model(name)
    with torch.no_grad():
        model.lm_head.weight[-1, 3] = float("nan")  # the last rank's
        model.model.layers[1].self_attn.o_proj.weight[2, 0] = float("-inf")  # the first rank's
    model.save_pretrained(tmp_path)
    for error in outcomes(on_ranks, 2, lambda mesh: load(tmp_path, mesh)):
        assert isinstance(error, UsageError)
        assert error.code == "file-unreadable"
        assert "and 1 more" in str(error)
        assert "lm_head.weight" in str(error) or "o_proj.weight" in str(error)
    for found in on_ranks(2, whole(tmp_path, check=False)):
        assert found["lm_head.weight"][-1, 3].isnan()


# ---- saving


def test_a_save_that_fails_leaves_the_old_directory(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved("llama-6q3kv", tmp_path / "model", max_shard_size=SHARD)
    shutil.copytree(tmp_path / "model", tmp_path / "before")
    write, count = save.write_stream, []

    def fails(path: Path, *rest: Any) -> None:
        count.append(path)
        if len(count) == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(path, *rest)

    monkeypatch.setattr(save, "write_stream", fails)

    def body(mesh: Mesh) -> None:
        cc.save_pretrained(load(tmp_path / "before", mesh, dtype="bfloat16"), tmp_path / "model", mesh)

    first, second = outcomes(on_ranks, 2, body)
    assert isinstance(first, OSError)
    assert "No space left" in str(second)
    assert_same_files(tmp_path / "model", tmp_path / "before")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["before", "model"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_keeps_what_is_not_its_own(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exchange: bool
) -> None:
    """The tokenizer stays, the older model's files go, what a killed save left behind is in nobody's way."""
    if not exchange:  # a file system that cannot
        monkeypatch.setattr(save, "_exchange", lambda one, other: False)
    target = tmp_path / "model"
    saved("llama-6q3kv", tmp_path / "theirs")
    saved("llama-6q3kv", target, max_shard_size=SHARD)
    (target / "tokenizer.json").write_text("words")
    (target / "notes").mkdir()
    (target / "notes" / "a.txt").write_text("text")
    (tmp_path / ".model.part").mkdir()
    (tmp_path / ".model.part" / "model.safetensors").write_text("left")
    on_ranks(2, lambda mesh: cc.save_pretrained(load(tmp_path / "theirs", mesh), target, mesh))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "theirs"]
    assert (target / "notes" / "a.txt").read_text() == "text"
    shutil.rmtree(target / "notes")
    assert (target / "tokenizer.json").read_text() == "words"
    (target / "tokenizer.json").unlink()
    assert_same_files(target, tmp_path / "theirs")


def test_what_cannot_be_saved_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    saved("llama-6q3kv", tmp_path / "model")
    (tmp_path / "file").write_text("")

    def body(mesh: Mesh) -> list[str]:
        model = load(tmp_path / "model", mesh)
        codes = []
        for where, size in ((tmp_path / "no" / "model", None), (tmp_path / "file", None), (tmp_path / "new", "5 apples")):
            with pytest.raises(UsageError) as error:
                cc.save_pretrained(model, where, mesh, max_shard_size=size)
            codes.append(error.value.code)
        return codes

    assert on_ranks(2, body) == [["file-missing", "bad-option", "bad-option"]] * 2


def test_a_folder_that_cannot_be_replaced(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the process stands, and where a disk is mounted (a container's volume): both known before the work."""
    saved("llama-6q3kv", tmp_path / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def body(mesh: Mesh) -> None:
        model = load(tmp_path / "model", mesh)
        for where in (".", tmp_path, "/dev"):
            with pytest.raises(UsageError, match="the current folder, around it, or where a disk is mounted") as error:
                cc.save_pretrained(model, where, mesh)
            assert error.value.code == "bad-option"
        cc.save_pretrained(model, "new", mesh)

    on_ranks(2, body)
    assert_same_files(Path("new"), tmp_path / "model")


def test_generation_as_transformers_reads_it(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Old checkpoints say it in config.json; one that cannot be read, or that transformers does not write, is refused."""
    saved("llama-6q3kv", tmp_path)
    path = tmp_path / "generation_config.json"
    path.unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_length": 33, "temperature": 0.5, "eos_token_id": [5, 6]}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert theirs.max_length == 33

    def body(mesh: Mesh) -> None:
        model = load(tmp_path, mesh)
        assert model.generation_config == theirs
        with pytest.raises(UsageError, match=r"does not write the model's generation_config: .*\n.*temperature"):
            cc.save_pretrained(model, tmp_path / "new", mesh)

    on_ranks(2, body)
    path.write_text("{")
    for error in outcomes(on_ranks, 2, lambda mesh: load(tmp_path, mesh)):
        assert "generation_config.json' cannot be used" in str(error)


def test_what_transformers_cannot_build_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    saved("llama-6q3kv", tmp_path)
    for error in outcomes(on_ranks, 2, lambda mesh: load(tmp_path, mesh, attn_implementation="no_such")):
        assert isinstance(error, UsageError)
        assert error.code == "bad-config"
        assert "transformers cannot build the model" in str(error)


def test_files_that_transformers_saved_anew_in_one(on_ranks: OnRanks, tmp_path: Path) -> None:
    """It removes the files of before, and leaves their index."""
    saved("llama-6q3kv", tmp_path / "theirs", max_shard_size=SHARD)
    saved("llama-6q3kv", tmp_path / "theirs")
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    assert index.is_file()
    on_ranks(2, lambda mesh: cc.save_pretrained(load(tmp_path / "theirs", mesh), tmp_path / "ours", mesh))
    index.unlink()
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


# ---- the tests can fail


def an_element_too_early(stored: Any, *rest: Any) -> Any:
    return read.blocks(replace(stored, start=stored.start - 4), *rest)


def taken_for_columns(stored: Any, slot: Any, *rest: Any) -> Any:
    return read.blocks(stored, replace(slot, cut=Column()) if slot.cut.dim == 0 else slot, *rest)


def gate_for_up(target: Any, parts: Any, *rest: Any) -> Any:
    return honest_slots(target, [expert[::-1] for expert in parts], *rest)


honest_slots = slots._slots
FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "a slice from the wrong offset": ("llama-6q3kv", loading, "blocks", an_element_too_early),
    "gate and up cut as one": ("phi3", loading, "blocks", taken_for_columns),
    "gate taken for up": ("mixtral", slots, "_slots", gate_for_up),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_read_turns_it_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, fault: str, tmp_path: Path) -> None:
    name, owner, function, wrong = FAULTS[fault]
    model = saved(name, tmp_path)
    monkeypatch.setattr(owner, function, wrong)
    found = on_ranks(2, whole(tmp_path, check=False))[0]
    with pytest.raises(AssertionError):
        assert_same(found, model.state_dict())


def test_a_wrong_gather_turns_it_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """q, k and v joined as if they were cut as one."""
    saved("gpt2", tmp_path / "theirs")
    honest = save.gather
    monkeypatch.setattr(save, "gather", lambda x, cut, *rest: honest(x, Column(1) if cut.dim == 1 else cut, *rest))
    on_ranks(2, lambda mesh: cc.save_pretrained(load(tmp_path / "theirs", mesh), tmp_path / "ours", mesh))
    with pytest.raises(AssertionError):
        assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def rewritten(where: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """The checkpoint's tensors after ``change``."""
    tensors = load_file(where / "model.safetensors")
    change(tensors)
    save_file(tensors, where / "model.safetensors", {"format": "pt"})


def test_of_a_tied_pair_the_head_alone_is_stored(on_ranks: OnRanks, tmp_path: Path) -> None:
    """As safetensors' save_model leaves it; loaded, and saved as it was."""
    model = saved("llama-9q3kv-tied", tmp_path / "theirs")
    rewritten(tmp_path / "theirs", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    on_ranks(2, lambda mesh: cc.save_pretrained(load(tmp_path / "theirs", mesh), tmp_path / "ours", mesh))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    for found in on_ranks(3, whole(tmp_path / "ours")):
        assert_same(found, model.state_dict())


@pytest.mark.parametrize("pickled", [False, True])
def test_a_tied_head_that_is_stored_too_must_be_the_embedding(on_ranks: OnRanks, pickled: bool, tmp_path: Path) -> None:
    """transformers does not tie the two then: their values would be lost without a word."""
    model = saved("llama-9q3kv-tied", tmp_path)
    head = model.lm_head.weight.detach().clone()

    def store() -> None:
        if pickled:
            (tmp_path / "model.safetensors").unlink(missing_ok=True)
            torch.save({**model.state_dict(), "lm_head.weight": head}, tmp_path / "pytorch_model.bin")
        else:
            rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))

    store()
    for found in on_ranks(2, whole(tmp_path, allow_pickle=True)):
        assert_same(found, model.state_dict())
    head[-1, -1] += 1
    store()
    with pytest.raises(
        UsageError, match=r"ties the output head to the embedding, .*values differ\n.*\"tie_word_embeddings\": false"
    ) as error:
        on_ranks(2, whole(tmp_path, allow_pickle=True))
    assert error.value.code == "bad-config"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    for found in on_ranks(2, whole(tmp_path, allow_pickle=True)):
        assert_same(found, {**model.state_dict(), "lm_head.weight": head})


def test_an_index_that_names_a_tied_head_which_no_file_holds(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Converted on the hub: the files lack what is tied, the index is that of the pickles."""
    model = saved("llama-9q3kv-tied", tmp_path, max_shard_size=SHARD)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    for found in on_ranks(2, whole(tmp_path)):
        assert_same(found, model.state_dict())
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"does not hold model.layers.7.mlp.up_proj.weight, which"):
        on_ranks(1, whole(tmp_path))


def test_a_tied_head_may_have_a_bias(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {**zoo.ZOO["phi"].sizes, "tie_word_embeddings": True}
    monkeypatch.setitem(zoo.ZOO, "phi-tied", replace(zoo.ZOO["phi"], sizes=sizes))
    model = saved("phi-tied", tmp_path)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for found in on_ranks(2, whole(tmp_path)):
        assert_same(found, model.state_dict())


@pytest.mark.parametrize("names", [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_the_text_part_of_a_multimodal_model(on_ranks: OnRanks, names: tuple[str, str], tmp_path: Path) -> None:
    """Saved, it is a language model that transformers loads: under names of its own, not those of the whole."""
    prefix, beside = names
    model = saved("gemma3", tmp_path / "text")
    (tmp_path / "whole").mkdir()
    tensors = {prefix + name.removeprefix("model."): t for name, t in load_file(tmp_path / "text/model.safetensors").items()}
    save_file({**tensors, f"{beside}vision_tower.x.weight": torch.ones(2)}, tmp_path / "whole/model.safetensors")
    Gemma3Config(text_config=model.config.to_dict()).save_pretrained(tmp_path / "whole")
    on_ranks(2, lambda mesh: cc.save_pretrained(load(tmp_path / "whole", mesh), tmp_path / "ours", mesh))
    ours, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert_same(ours.state_dict(), model.state_dict())
