"""models.checkpoint: single tensors and rows out of one or several safetensors files, and every way to be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from crosscut.errors import UsageError
from crosscut.models.checkpoint import INDEX, SINGLE, Checkpoint, parse_source

TENSORS = {
    "model.embed.weight": torch.arange(40.0).reshape(10, 4),
    "model.layers.0.up.weight": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
    "model.scale": torch.tensor(2.5),
}


@pytest.fixture
def single(tmp_path: Path) -> Checkpoint:
    save_file(TENSORS, tmp_path / SINGLE)
    return Checkpoint.open(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory whose index spreads TENSORS over one file each."""
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        weight_map[name] = f"part-{number}.safetensors"
        save_file({name: tensor}, tmp_path / weight_map[name])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def code_of(error: pytest.ExceptionInfo[UsageError]) -> str:
    return error.value.code


def test_single_file(single: Checkpoint) -> None:
    assert single.names() == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert single.shape(name) == tuple(tensor.shape)
        assert single.dtype(name) == tensor.dtype
        assert torch.equal(single.read(name), tensor)


def test_several_files(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.names() == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize(
    "rows", [slice(2, 5), slice(None, 3), slice(7, None), slice(-2, None), slice(8, 99), slice(5, 2), slice(None)]
)
def test_rows_follow_the_rules_of_python(single: Checkpoint, rows: slice) -> None:
    name = "model.embed.weight"
    assert torch.equal(single.read(name, rows), TENSORS[name][rows])


def test_rows_that_make_no_sense(single: Checkpoint) -> None:
    with pytest.raises(UsageError, match="scalar") as caught:
        single.read("model.scale", slice(0, 1))
    assert code_of(caught) == "bad-shape"
    with pytest.raises(UsageError, match="step 2") as caught:
        single.read("model.embed.weight", slice(0, 4, 2))
    assert code_of(caught) == "bad-option"


def test_gather(single: Checkpoint) -> None:
    ids = torch.tensor([7, 0, 7, 9, 3])
    assert torch.equal(single.gather("model.embed.weight", ids), TENSORS["model.embed.weight"][ids])


@pytest.mark.parametrize("ids", [[0, 10], [-1, 0], []])
def test_gather_outside_of_the_rows(single: Checkpoint, ids: list[int]) -> None:
    with pytest.raises(UsageError, match="rows 0 to 9") as caught:
        single.gather("model.embed.weight", torch.tensor(ids, dtype=torch.int64))
    assert code_of(caught) == "bad-shape"


def test_only_the_file_that_is_asked_for_is_opened(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    (sharded / "part-1.safetensors").write_bytes(b"ruined")
    assert torch.equal(checkpoint.read("model.embed.weight"), TENSORS["model.embed.weight"])
    with pytest.raises(UsageError, match=r"part-1\.safetensors") as caught:
        checkpoint.read("model.layers.0.up.weight")
    assert code_of(caught) == "file-unreadable"


def test_unknown_parameter(single: Checkpoint) -> None:
    for ask in (single.read, single.shape, single.dtype):
        with pytest.raises(UsageError, match=r"did you mean 'model\.layers\.0\.up\.weight'") as caught:
            ask("model.layers.0.pu.weight")
        assert code_of(caught) == "parameter-missing"


def test_an_index_that_names_an_absent_file(sharded: Path) -> None:
    (sharded / "part-2.safetensors").unlink()
    with pytest.raises(UsageError, match=r"part-2\.safetensors") as caught:
        Checkpoint.open(sharded)
    assert code_of(caught) == "file-missing"


def test_an_index_that_names_a_parameter_its_file_lacks(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"other": "part-0.safetensors"}}))
    with pytest.raises(UsageError, match="other") as caught:
        Checkpoint.open(sharded).read("other")
    assert code_of(caught) == "file-unreadable"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "\ufeff"])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="not an index") as caught:
        Checkpoint.open(tmp_path)
    assert code_of(caught) == "file-unreadable"


def test_a_truncated_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    for end in (0, 5, 40, len(whole) - 1):
        (tmp_path / SINGLE).write_bytes(whole[:end])
        with pytest.raises(UsageError, match="cannot be read as safetensors") as caught:
            Checkpoint.open(tmp_path)
        assert code_of(caught) == "file-unreadable", end


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory") as caught:
        Checkpoint.open(tmp_path / "absent")
    assert code_of(caught) == "file-missing"
    with pytest.raises(UsageError, match="neither") as caught:
        Checkpoint.open(tmp_path)
    assert code_of(caught) == "file-missing"
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UsageError, match="crosscut convert"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "directory", "parameter"),
    [("a/b:x.weight", "a/b", "x.weight"), ("c:/m:odd:w", "c:/m:odd", "w"), (".:w", ".", "w")],
)
def test_parse_source(text: str, directory: str, parameter: str) -> None:
    assert parse_source(text) == (Path(directory), parameter)


@pytest.mark.parametrize("text", ["", "model", ":w", "model:"])
def test_parse_source_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="DIR:PARAM") as caught:
        parse_source(text)
    assert code_of(caught) == "bad-option"
