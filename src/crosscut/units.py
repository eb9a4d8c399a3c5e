"""Sizes, rates and times as people write them. GB is 1e9 bytes, GiB is 2**30; times are microseconds."""

from __future__ import annotations

import re

from crosscut.errors import UsageError

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of a dtype: half the distance from 1 to the next number (Higham, Accuracy and Stability, 2.1)."""
SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of ``'8K'``, ``'64KiB'``, ``'1.5MB'``, ``'4096'``. A bare letter is binary, as in nccl-tests.

    Raises UsageError (``bad-option``) when ``text`` is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(
            f"{text!r} is not a size", code="bad-option", fix="write a number with K, M or G (binary), KB or KiB: 64K, 1MB"
        )
    number, letter, suffix = match.group(1), match.group(2).upper(), (match.group(3) or "").lower()
    scale = _DECIMAL[letter] if suffix == "b" and letter else _BINARY[letter]
    return round(float(number) * scale)


def format_size(nbytes: float) -> str:
    """``'64 KiB'``, ``'1.5 GiB'``: binary units, at most one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            text = f"{nbytes:.1f}".removesuffix(".0")
            return f"{text} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def format_us(us: float) -> str:
    """Microseconds with three significant digits, in us, ms or s: ``'18.8 us'``, ``'2.74 ms'``."""
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if us < limit:
            value = us / scale
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{us / 1e6:.0f} s"


def format_gain(gain: float) -> str:
    """A ratio of times: ``'1.85x'``; below a tenth with one significant digit, never as zero: ``'0.004x'``."""
    return f"{gain:.2f}x" if gain >= 0.1 else f"{gain:.1g}x"


def gbps(nbytes: float, us: float) -> float:
    """GB/s (1e9 bytes a second) of ``nbytes`` moved in ``us`` microseconds."""
    return nbytes / us / 1e3
