"""Headers of safetensors files, without torch: which tensors a checkpoint holds, of what dtype and shape, and where.

Format (github.com/huggingface/safetensors, README): the header's length (8 bytes, little endian), the header (JSON), the
tensors' bytes. A directory holds ``model.safetensors``, or several files and ``model.safetensors.index.json``. Of both, the
single file counts, as for transformers: saving it there leaves an index of removed files behind.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

BITS: dict[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of one element, by safetensors' name of the dtype."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that are converted when a model is loaded in another one."""

_LIMIT = 100 << 20  # a longer header is refused, as safetensors does


@dataclass(frozen=True)
class Stored:
    """One tensor on disk. ``start`` and ``stop`` count bytes from the beginning of ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int


def find_files(directory: str | Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a model and the tensors that the index wants from each (None: there is no index).

    Raises UsageError: ``file-missing`` (no directory, no safetensors in it, a file that the index names is not there),
    ``file-unreadable`` (the index).
    """
    root = Path(directory)
    if not root.is_dir():
        raise UsageError(f"there is no directory {str(root)!r}", code="file-missing", fix="give a local Hugging Face directory")
    if (root / SINGLE).is_file():
        return {root / SINGLE: None}
    if (root / INDEX).is_file():
        return _read_index(root)
    has_gguf = any(root.glob("*.gguf"))
    raise UsageError(
        f"{str(root)!r} holds neither {SINGLE} nor {INDEX}",
        code="file-missing",
        fix="convert its GGUF file: crosscut convert FILE.gguf DIR" if has_gguf else "save the model as safetensors",
    )


def read_headers(directory: str | Path, spare: Callable[[str], bool] = lambda name: False) -> dict[str, Stored]:
    """Every tensor of the model in ``directory`` by name; reads headers alone, and checks each file's length.

    ``spare``: whether the model can do without a tensor. An index may name such ones that no file holds: converters that
    leave a tied head out of the files keep the index of the pickles.
    Raises UsageError as :func:`find_files` and :func:`read_header` do, and ``parameter-missing`` when the index names
    other tensors that their file does not hold.
    """
    tensors: dict[str, Stored] = {}
    for path, wanted in find_files(directory).items():
        header = read_header(path)
        lacking = [name for name in wanted or () if name not in header and not spare(name)]
        if lacking:
            raise UsageError(
                f"{str(path)!r} does not hold {_some(lacking)}, which {INDEX} says it does",
                code="parameter-missing",
                fix="download the index and the files of one and the same revision",
            )
        tensors |= header if wanted is None else {name: header[name] for name in wanted if name in header}
    return tensors


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file by name. Raises UsageError (``file-unreadable``) when it is truncated or damaged."""
    try:
        with path.open("rb") as file:
            length, size = _header_length(file.read(8)), path.stat().st_size
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is not a table of tensors")
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
        end = _end(tensors, 8 + length)
        if size != end:
            what = "is truncated" if size < end else "has bytes behind its last tensor"
            raise ValueError(f"it {what}: {size} bytes, {end} by its header")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read as safetensors: {error}",
            code="file-unreadable",
            fix="check that the download is complete, or download the file again",
        ) from None
    return tensors


def _header_length(head: bytes) -> int:
    if len(head) < 8:
        raise ValueError(f"it has {len(head)} bytes, fewer than the shortest file")
    (length,) = struct.unpack("<Q", head)
    if length > _LIMIT:
        raise ValueError(f"its header would be {length} bytes long")
    return int(length)


def _stored(path: Path, name: str, entry: Mapping[str, Any], base: int) -> Stored:
    dtype, shape, (start, stop) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
    if dtype not in BITS:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    if min(shape, default=0) < 0 or (stop - start) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"{name!r} has {stop - start} bytes, which is not {dtype} of shape {list(shape)}")
    return Stored(name, dtype, shape, path, base + start, base + stop)


def _end(tensors: Mapping[str, Stored], end: int) -> int:
    """Where the last tensor ends; the tensors must follow each other without gaps."""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:
            raise ValueError(f"{tensor.name!r} begins at byte {tensor.start}, and not at {end}, where the one before it ends")
        end = tensor.stop
    return end


def _read_index(root: Path) -> dict[Path, list[str] | None]:
    path = root / INDEX
    files: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(root / file, []).append(str(name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{str(path)!r} is not an index of safetensors files: {type(error).__name__}: {error}",
            code="file-unreadable",
            fix="download the file again",
        ) from None
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise UsageError(
            f"{str(root)!r} lacks {_some(missing)}, which its index names",
            code="file-missing",
            fix=f"download the missing files ({len(missing)})",
        )
    return dict(files)


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
