"""cc.from_pretrained: each bad checkpoint is refused with one message, before memory is allocated."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

import crosscut as cc
import zoo
from crosscut.distributed.mesh import Group, Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.models import load as loading
from crosscut.models.source import HUB_FILES, locate

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


def edit_config(where: Path, **changes: Any) -> None:
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(where: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(where / SINGLE)
    change(tensors)
    save_file(tensors, where / SINGLE)


def edit_index(where: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((where / INDEX).read_text())
    change(index["weight_map"])
    (where / INDEX).write_text(json.dumps(index))


def truncate(where: Path) -> None:
    data = (where / SINGLE).read_bytes()
    (where / SINGLE).write_bytes(data[:-100])


def spoil_header(where: Path) -> None:
    data = (where / SINGLE).read_bytes()
    (where / SINGLE).write_bytes(data[:8] + b"}{" + data[10:])


def claim_a_huge_header(where: Path) -> None:
    data = (where / SINGLE).read_bytes()
    (where / SINGLE).write_bytes(struct.pack("<Q", 1 << 60) + data[8:])


def pickles(where: Path) -> None:
    torch.save(load_file(where / SINGLE), where / "pytorch_model.bin")
    (where / SINGLE).unlink()


def spoil_checksums(where: Path) -> None:
    from crosscut.models.weights import save

    save(zoo.model("llama-6q3kv"), where / SINGLE, make_mesh(device="cpu"))
    data = bytearray((where / SINGLE).read_bytes())
    data[-1] ^= 1
    (where / SINGLE).write_bytes(data)


ONE_FILE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "file-missing", "config.json"),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "file-unreadable", "config.json"),
    "no weights": (lambda d: (d / SINGLE).unlink(), "file-missing", "holds no weights"),
    "truncated": (truncate, "file-unreadable", "is truncated"),
    "damaged header": (spoil_header, "file-unreadable", "cannot be read as safetensors"),
    "senseless header": (claim_a_huge_header, "file-unreadable", "its header would be"),
    "damaged bytes": (spoil_checksums, "file-unreadable", "is damaged: the bytes of 'lm_head.weight' are"),
    "unknown model_type": (lambda d: edit_config(d, model_type="llamma"), "unknown-model", "did you mean 'llama'"),
    "another size": (lambda d: edit_config(d, intermediate_size=86), "bad-config", "by config.json it would be [48, 86]"),
    "other heads": (lambda d: edit_config(d, num_key_value_heads=2), "bad-config", "k_proj.weight is [24, 48]"),
    "more layers": (lambda d: edit_config(d, num_hidden_layers=3), "parameter-missing", "lacks model.layers.2."),
    "quantized": (lambda d: edit_config(d, quantization_config={"quant_method": "gptq"}), "bad-dtype", "gptq"),
    "bytes for weights": (lambda d: edit_tensors(d, lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})), "bad-dtype", "I8"),
    "missing": (lambda d: edit_tensors(d, lambda t: t.pop(DOWN)), "parameter-missing", f"lacks {DOWN}"),
    "too many": (
        lambda d: edit_tensors(d, lambda t: t.update({"model.layers.0.mlp.side.weight": torch.ones(2)})),
        "parameter-missing",
        "matches model.layers.0.mlp.side.weight",
    ),
    "twice": (
        lambda d: edit_tensors(d, lambda t: t.update({"norm.weight": torch.ones(48)})),
        "bad-config",
        "'model.norm.weight' twice",
    ),
    "pickles": (pickles, "bad-option", "allow_pickle=True"),
}  # fmt: skip

SEVERAL_FILES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a shard is missing": (
        lambda d: next(iter(d.glob("model-00002*"))).unlink(), "file-missing", "lacks model-00002-of",
    ),
    "the index names another file": (
        lambda d: edit_index(d, lambda m: m.update({DOWN: m["model.embed_tokens.weight"]})),
        "parameter-missing",
        f"does not hold {DOWN}",
    ),
    "the index forgets": (lambda d: edit_index(d, lambda m: m.pop(DOWN)), "parameter-missing", f"lacks {DOWN}"),
    "the index is no index": (lambda d: (d / INDEX).write_text("[]"), "file-unreadable", "is not an index"),
    "the index leads elsewhere": (
        lambda d: edit_index(d, lambda m: m.update({DOWN: "other.safetensors"})), "file-missing", "lacks other.safetensors",
    ),
}  # fmt: skip


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh(device="cpu")


def refused(mesh: Mesh, where: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> UsageError:
    def filled(*_: Any) -> None:
        raise AssertionError("memory was allocated")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_fill", filled)
        with pytest.raises(UsageError) as error:
            cc.from_pretrained(where, mesh, **options)
    return error.value


@pytest.mark.parametrize("fault", [*ONE_FILE, *SEVERAL_FILES])
def test_bad_checkpoints(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    spoil, code, words = {**ONE_FILE, **SEVERAL_FILES}[fault]
    zoo.model("llama-6q3kv").save_pretrained(tmp_path, max_shard_size="60KB" if fault in SEVERAL_FILES else "1GB")
    cc.from_pretrained(tmp_path, mesh)  # it is good until now
    spoil(tmp_path)
    error = refused(mesh, tmp_path, monkeypatch)
    assert error.code == code, error
    assert words in str(error)
    assert error.fix


def test_damaged_bytes_are_passed_over_unchecked(mesh: Mesh, tmp_path: Path) -> None:
    zoo.model("llama-6q3kv").save_pretrained(tmp_path)
    spoil_checksums(tmp_path)
    cc.from_pretrained(tmp_path, mesh, check=False)


def test_experts_that_are_missing_or_too_many(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.model("mixtral").save_pretrained(tmp_path)
    whole = (tmp_path / SINGLE).read_bytes()
    one = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.pop(one.format(2)))
    assert "lacks model.layers.1.mlp.experts.gate_up_proj" in str(refused(mesh, tmp_path, monkeypatch))
    (tmp_path / SINGLE).write_bytes(whole)
    edit_tensors(tmp_path, lambda tensors: tensors.update({one.format(4): tensors[one.format(1)].clone()}))
    assert f"holds {one.format(4)}, which the model has not" in str(refused(mesh, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    ("tp", "message", "fix"),
    [
        (5, "6 query heads in 3 groups do not divide by 5", "tp 1, 3, 6 divide; 5 is possible unevenly with uneven=True"),
        (7, "6 query heads in 3 groups are fewer than 7 ranks", "tp 1"),
    ],
)
def test_a_tp_that_does_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, message: str, fix: str) -> None:
    """One rank of such a group refuses by itself; that all do is the same function on each."""
    zoo.model("llama-6q3kv").save_pretrained(tmp_path)
    alone = make_mesh(device="cpu")
    group = Group("tp", 0, tp, tuple(range(tp)), "none", alone.device)
    with pytest.raises(UsageError) as error:
        loading._checked(tmp_path, Mesh(group, alone.dp, alone.device), None, False, False, False, True)
    assert message in error.value.message
    assert error.value.fix is not None
    assert error.value.fix.startswith(fix)


def test_pickles_that_hold_more_than_tensors_are_refused(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``weights_only``: what would run when it is read is not read."""
    zoo.model("llama-6q3kv").save_pretrained(tmp_path)
    (tmp_path / SINGLE).unlink()
    torch.save({"weights": Path("x")}, tmp_path / "pytorch_model.bin")
    error = refused(mesh, tmp_path, monkeypatch, allow_pickle=True)
    assert error.code == "file-unreadable"
    assert "UnpicklingError" in str(error)


def test_values_beyond_float16_are_named(mesh: Mesh, tmp_path: Path) -> None:
    model = zoo.model("llama-6q3kv")
    with torch.no_grad():
        model.model.norm.weight[0] = 1e6
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"model\.norm\.weight of .* or values beyond float16"):
        cc.from_pretrained(tmp_path, mesh, dtype=torch.float16)


def test_progress_says_the_time_left(mesh: Mesh, tmp_path: Path) -> None:
    model = zoo.model("llama-6q3kv")
    model.save_pretrained(tmp_path)
    told: list[tuple[float, str]] = []
    cc.from_pretrained(tmp_path, mesh, progress=lambda fraction, text: told.append((fraction, text)))
    assert told[-1][0] == 1
    assert [fraction for fraction, _ in told] == sorted(fraction for fraction, _ in told)
    assert told[-1][1].startswith("loading: ")
    assert told[-1][1].endswith(" s left")
    assert len(told) >= len(list(model.parameters()))


# ---- names of the hub


def test_of_the_hub_only_what_is_needed_is_fetched() -> None:
    there = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
        "merges.txt", "chat_template.jinja", "model-00001-of-00002.safetensors", INDEX, SINGLE,
    ]  # fmt: skip
    other = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "README.md", "x.gguf"]
    fetched = filter_repo_objects([*there, *other], allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"])
    assert sorted(fetched) == sorted(there)


def test_a_name_of_the_hub(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate("meta/Llama", mesh, "v1") == tmp_path
    assert asked == [("meta/Llama", "v1")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta" / "Llama").mkdir(parents=True)
    assert locate("meta/Llama", mesh) == Path("meta/Llama")  # a local path comes first
    assert len(asked) == 1


def test_offline_is_one_clear_message(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(
        UsageError, match=r"no directory 'meta/Llama', and the hub did not give it: .* snapshot folder\n"
    ) as error:
        cc.from_pretrained("meta/Llama", mesh)
    assert error.value.code == "file-missing"
    assert "be online" in str(error.value.fix)


@pytest.mark.parametrize("name", ["./meta/Llama", "/no/such/model", "llama", "a/b/c"])
def test_a_path_is_not_asked_of_the_hub(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UsageError, match="there is no directory"):
        cc.from_pretrained(name, mesh)
