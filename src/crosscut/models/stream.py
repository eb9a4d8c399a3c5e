"""A safetensors file written one tensor at a time, with a checksum of each, and its checksums read back.

Format (github.com/huggingface/safetensors, README): the header's length (8 bytes, little endian), the header (JSON, padded
to 8 bytes), then the tensors' bytes. The checksums, one CRC-32 of 8 hex digits a tensor in the order of their bytes, stand
in the header's metadata under ``crc32``, where other readers pass over them.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.errors import UsageError

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' names of torch's dtypes."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}

Entry = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of one tensor."""

_PART = 16 << 20  # bytes read at once while a checksum is taken


def write_stream(
    path: Path,
    entries: Sequence[Entry],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
) -> None:
    """Write ``tensors``, as ``entries`` announce them, to ``path``. Holds one at a time; the file is on disk at return.

    A crash leaves a file without its end, so write to another name and rename.
    """
    placeholder = {"crc32": "0" * (8 * len(entries))} if checksums else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {}), **placeholder}}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sums = []
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for (name, dtype, shape), tensor in zip(entries, tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), f"{name} is not what the header says"
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            if checksums:
                sums.append(f"{zlib.crc32(data):08x}")
            out.write(data)
        if sums:
            out.seek(8 + text.index(b'"crc32":"') + len(b'"crc32":"'))
            out.write("".join(sums).encode())
        out.flush()
        os.fsync(out.fileno())


def refuse_fixed(target: Path) -> None:
    """Raise UsageError (``bad-option``) where ``target`` is a folder whose place a new one cannot take."""
    if target.is_dir() and (os.path.ismount(target) or Path.cwd().is_relative_to(target)):
        raise UsageError(
            f"{str(target)!r} is the current folder, around it, or where a disk is mounted: a new folder cannot take its place",
            code="bad-option",
            fix="give the name of a folder in it",
        )


def damaged(path: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Names of the tensors of ``path`` whose bytes are not those that were written.

    Looks at every ``shares``-th tensor from ``share`` on, so that ranks can divide the work.
    A file without checksums has no damaged tensor. Raises UsageError (``file-unreadable``) when the file has no such
    header, or is shorter than it says.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            sums = header.pop("__metadata__", {}).get("crc32", "")
            found = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            size = 8 + length + max((item["data_offsets"][1] for _, item in found), default=0)
            if size != path.stat().st_size:
                raise ValueError(f"{path.stat().st_size} bytes instead of {size}")
            if len(sums) != 8 * len(found):
                return []
            wrong = []
            for index in range(share, len(found), shares):
                name, item = found[index]
                begin, end = item["data_offsets"]
                file.seek(8 + length + begin)
                if f"{_crc(file, end - begin):08x}" != sums[8 * index : 8 * index + 8]:
                    wrong.append(name)
            return wrong
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(
            f"{str(path)!r} is not a whole safetensors file: {error}", code="file-unreadable", fix="use another checkpoint"
        ) from None


def file_sum(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return size, _crc(file, size)


def _crc(file: Any, nbytes: int) -> int:
    crc = 0
    while nbytes:
        part = file.read(min(nbytes, _PART))
        crc, nbytes = zlib.crc32(part, crc), nbytes - len(part)
    return crc
