"""The folder of compiled kernels: used when whole, made anew when not, never a reason to fail."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crosscut.kernels import compile as compiling

IMAGE = b"machine code" * 100


class Nvrtc:
    """A compiler that counts."""

    nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=0)

    def __init__(self) -> None:
        self.compiled = 0

    def nvrtcVersion(self) -> tuple[int, int]:
        return 0, 13

    def nvrtcCreateProgram(self, *args: Any) -> tuple[int, str]:
        return 0, "program"

    def nvrtcCompileProgram(self, *args: Any) -> tuple[int]:
        self.compiled += 1
        return (0,)

    def nvrtcGetCUBINSize(self, program: str) -> tuple[int, int]:
        return 0, len(IMAGE)

    def nvrtcGetCUBIN(self, program: str, image: bytes) -> tuple[int]:
        return (0,)  # as it is: blanks stand for machine code


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nvrtc:
    made = Nvrtc()
    monkeypatch.setattr(compiling, "_nvrtc", lambda: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def cubin() -> bytes:
    return compiling._cubin("exchange.cu", "source", 2, (9, 0))


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "crosscut/kernels").iterdir())


def test_a_kernel_is_compiled_once(nvrtc: Nvrtc, tmp_path: Path) -> None:
    assert cubin() == cubin() == b" " * len(IMAGE)
    assert nvrtc.compiled == 1
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:-1], lambda whole: whole[:40] + b"x" + whole[41:]])
def test_an_entry_that_is_not_whole_is_compiled_anew(nvrtc: Nvrtc, tmp_path: Path, damage: Any) -> None:
    image = cubin()
    (entry,) = entries(tmp_path)
    entry.write_bytes(damage(entry.read_bytes()))
    assert cubin() == image, "the driver would refuse the damaged one in every run to come"
    assert cubin() == image
    assert nvrtc.compiled == 2


def test_an_entry_that_cannot_be_read_is_compiled_anew(nvrtc: Nvrtc, tmp_path: Path) -> None:
    cubin()
    (entry,) = entries(tmp_path)
    entry.unlink()
    entry.mkdir()  # what another user's file of mode 0600 is to us; root reads those
    assert cubin() == b" " * len(IMAGE)
    assert nvrtc.compiled == 2
    assert entries(tmp_path) == [entry], "and what could not be put in its place is gone"


def test_a_full_disk_leaves_nothing_behind(nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cubin() == b" " * len(IMAGE)
    assert entries(tmp_path) == []


def test_a_cache_that_cannot_be_made_costs_only_time(nvrtc: Nvrtc, tmp_path: Path) -> None:
    (tmp_path / "crosscut").write_text("a file where the folder should be")
    assert cubin() == cubin() == b" " * len(IMAGE)
    assert nvrtc.compiled == 2
