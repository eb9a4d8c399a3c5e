"""Headers of safetensors files read with the standard library: equal to what safetensors reads, and every damage named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from crosscut.errors import UsageError
from crosscut.models.stream import NAMES
from crosscut.sharding.headers import BITS, INDEX, SINGLE, read_header, read_headers

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4, dtype=torch.float16),
    "z.weight": torch.arange(10, dtype=torch.bfloat16),
}


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with ``header`` (JSON, or the raw bytes of one) and ``data``."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(**fields: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


def test_a_header_says_what_safetensors_says(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    found = read_headers(tmp_path)
    raw = (tmp_path / SINGLE).read_bytes()
    with safe_open(tmp_path / SINGLE, "pt") as file:
        assert sorted(found) == sorted(file.keys())
        for name, tensor in found.items():
            part = file.get_slice(name)
            assert (tensor.dtype, list(tensor.shape)) == (part.get_dtype(), part.get_shape())
            whole = file.get_tensor(name)
            assert raw[tensor.start : tensor.stop] == whole.flatten().view(torch.uint8).numpy().tobytes()


def test_every_dtype_that_crosscut_writes_has_its_size() -> None:
    assert {name: BITS[name] for name in NAMES.values()} == {name: dtype.itemsize * 8 for dtype, name in NAMES.items()}


def test_several_files_by_their_index(tmp_path: Path) -> None:
    where = {name: f"part-{number}.safetensors" for number, name in enumerate(TENSORS)}
    for name, file in where.items():
        save_file({name: TENSORS[name], f"extra.{name}": torch.zeros(1)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    found = read_headers(tmp_path)
    assert {name: tensor.file.name for name, tensor in found.items()} == where
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**where, "a": where["b"]}}))
    with pytest.raises(UsageError, match=r"part-1.safetensors' does not hold a, which .*index.json says it does") as caught:
        read_headers(tmp_path)
    assert caught.value.code == "parameter-missing"
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lacks part-2.safetensors, which its index names") as caught:
        read_headers(tmp_path)
    assert caught.value.code == "file-missing"


@pytest.mark.parametrize("lost", [1, 20, 10_000])
def test_a_truncated_file(tmp_path: Path, lost: int) -> None:
    save_file({"a": torch.zeros(4096)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-lost])
    with pytest.raises(UsageError, match=rf"is truncated: {len(whole) - lost} bytes, {len(whole)} by its header") as caught:
        read_headers(tmp_path)
    assert caught.value.code == "file-unreadable"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b""), "fewer than the shortest file"),
        (lambda path: path.write_bytes(struct.pack("<Q", 1 << 40)), "its header would be"),
        (lambda path: path.write_bytes(struct.pack("<Q", 90) + b"{}"), "."),
        (lambda path: written(path, b"{not json"), "."),
        (lambda path: written(path, b"\xff\xfe"), "."),
        (lambda path: written(path, [1]), "not a table"),
        (lambda path: written(path, {"a": 3}), "."),
        (lambda path: written(path, {"a": {"dtype": "F32"}}), "shape"),
        (lambda path: written(path, entry(dtype="F33"), bytes(8)), "unknown dtype 'F33'"),
        (lambda path: written(path, entry(shape=[3]), bytes(8)), r"'a' has 8 bytes, which is not F32 of shape \[3\]"),
        (lambda path: written(path, entry(shape=[-2, -1]), bytes(8)), "which is not F32"),
        (lambda path: written(path, entry(data_offsets=[8, 16]), bytes(16)), "begins at byte"),
        (lambda path: written(path, entry(), bytes(9)), "has bytes behind its last tensor"),
    ],
)
def test_damaged_headers(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(tmp_path / SINGLE)
    with pytest.raises(UsageError, match=words) as caught:
        read_header(tmp_path / SINGLE)
    assert caught.value.code == "file-unreadable"
    with pytest.raises((SafetensorError, OSError)), safe_open(tmp_path / SINGLE, "pt"):
        pass


def test_a_single_file_counts_before_an_index(tmp_path: Path) -> None:
    """transformers leaves the index of files that it removes when a model is saved anew in one file."""
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": "model-00001-of-00002.safetensors"}}))
    assert list(read_headers(tmp_path)) == ["a"]


def test_no_directory_and_nothing_in_it(tmp_path: Path) -> None:
    for directory, words in ((tmp_path / "none", "there is no directory"), (tmp_path, "holds neither")):
        with pytest.raises(UsageError, match=words) as caught:
            read_headers(directory)
        assert caught.value.code == "file-missing"
