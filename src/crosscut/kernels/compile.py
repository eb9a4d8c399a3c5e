"""CUDA C++ compiled at run time with NVRTC, once for each machine: compiled code is kept in the user's cache folder.

NVRTC and the driver are called through NVIDIA's cuda-bindings, which torch's CUDA builds (2.10 and newer) already need.
Triton was the other way; its launches take 9 us from Python where a prepared driver call takes 4.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from crosscut.env import cache_folder
from crosscut.errors import UsageError

_DIGEST = hashlib.sha256().digest_size


@cache
def function(line: str, name: str, world: int, device: int, file: str = "exchange.cu") -> int:
    """The driver's handle of kernel ``name``, which the source line ``line`` defines at the end of ``file``.

    ``world``: ranks of an exchange (0: a kernel of one rank). ``device`` must be the current one.
    Raises UsageError (``extra-missing``) without cuda-bindings.
    """
    import torch
    from cuda.bindings import driver

    capability = torch.cuda.get_device_capability(device)
    image = _cubin(file, files("crosscut.kernels").joinpath(file).read_text() + line + "\n", world, capability)
    torch.cuda.init()
    torch.empty(1, device=f"cuda:{device}")  # the device's context exists and is current
    module = _checked(driver.cuModuleLoadData(image))
    return int(_checked(driver.cuModuleGetFunction(module, name.encode())))


def _cubin(file: str, source: str, world: int, capability: tuple[int, int]) -> bytes:
    """Machine code of ``source``, from the cache folder when it has been compiled before."""
    nvrtc = _nvrtc()
    arch = f"sm_{capability[0]}{capability[1]}{'a' if capability[0] == 9 else ''}"
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device"] + [f"-DN={world}"] * (world > 0)
    version = _checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256("\0".join([source, *options, str(version)]).encode()).hexdigest()[:32]
    path = cache_folder() / "kernels" / f"{key}.cubin"
    kept = _kept(path)
    if kept is not None:
        return kept
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], []))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"a kernel of crosscut does not compile for {arch}:\n{log.decode()}")
    image = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, image))
    _keep(path, image)
    return image


def _kept(path: Path) -> bytes | None:
    """The cache entry; None when there is none, or one that cannot be read, or is not whole (a full disk, a lost host).

    The driver takes machine code without its length, so what it is given must be right.
    """
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    image = entry[_DIGEST:]
    return image if hashlib.sha256(image).digest() == entry[:_DIGEST] else None


def _keep(path: Path, image: bytes) -> None:
    """Write the cache entry, digest and machine code, whole or not at all; a cache that cannot be written only costs time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(hashlib.sha256(image).digest() + image)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise UsageError(
            "crosscut's kernels need the package cuda-bindings, which torch's CUDA builds bring along",
            code="extra-missing",
            fix="pip install cuda-bindings (of your CUDA's major version), or set CROSSCUT_COLLECTIVES=nccl",
        ) from None
    return nvrtc


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a cuda-bindings call, which returns (status, value)."""
    if int(answer[0]) != 0:
        raise RuntimeError(f"the CUDA driver or NVRTC answered {answer[0]!r}")
    return answer[1] if len(answer) > 1 else None
