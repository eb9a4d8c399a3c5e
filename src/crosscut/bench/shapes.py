"""Shapes and options as they are typed: read and refused before any rank starts. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from crosscut.errors import UsageError, choose
from crosscut.units import SHORT_DTYPES

DTYPES = ("float32", "bfloat16", "float16", "float64")
MOST = (1 << 31) - 1
"""The largest size that BLAS libraries count to."""


@dataclass(frozen=True)
class Shape:
    """A layer at one size: ``sizes`` are (tokens, in, out), or for the column-row pair (tokens, hidden, ffn)."""

    pair: bool
    sizes: tuple[int, int, int]


def parse_shape(text: str) -> Shape:
    """``'32x4096->8192'`` is one layer, ``'32x4096->14336->4096'`` the pair up and down. Spaces do not matter.

    Raises UsageError (``bad-shape``).
    """
    compact = re.sub(r"\s+", "", text)
    match = re.fullmatch(r"(\d+)x(\d+)->(\d+)(?:->(\d+))?", compact)
    if match is None:
        raise UsageError(
            f"the shape {text!r} cannot be read",
            code="bad-shape",
            fix="write TOKENSxIN->OUT ('32x4096->8192'), or TOKENSxHIDDEN->FFN->HIDDEN for the pair, in quotes",
        )
    tokens, first, second = (int(group) for group in match.groups()[:3])
    _check_range(text, tokens, first, second)
    if match.group(4) is not None and int(match.group(4)) != first:
        raise UsageError(
            f"the pair {text!r} starts with {first} features and ends with {match.group(4)}",
            code="bad-shape",
            fix=f"write {tokens}x{first}->{second}->{first}",
        )
    return Shape(match.group(4) is not None, (tokens, first, second))


def parse_sizes(text: str) -> tuple[int, int, int]:
    """An MLP's (tokens, hidden, ffn) from ``'32x4096x14336'``. Spaces do not matter. Raises UsageError (``bad-shape``)."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", re.sub(r"\s+", "", text))
    if match is None:
        raise UsageError(f"the shape {text!r} cannot be read", code="bad-shape", fix="write TOKENSxHIDDENxFFN: 32x4096x14336")
    tokens, hidden, ffn = map(int, match.groups())
    _check_range(text, tokens, hidden, ffn)
    return tokens, hidden, ffn


def _check_range(text: str, *sizes: int) -> None:
    if not 1 <= min(sizes) <= max(sizes) <= MOST:
        wrong = next(size for size in sizes if not 1 <= size <= MOST)
        raise UsageError(f"the shape {text!r} has a size of {wrong}", code="bad-shape", fix=f"give sizes from 1 to {MOST}")


def parse_dtype(text: str) -> str:
    """The dtype's full name; ``auto`` stays. Raises UsageError (``bad-dtype``)."""
    name = SHORT_DTYPES.get(text.lower(), text.lower())
    return choose("dtype", name, ("auto", *DTYPES), code="bad-dtype")


def parse_list(text: str, what: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """``'a,b'`` as names that are all in ``allowed``, each once. Raises UsageError (``bad-option``)."""
    return tuple(dict.fromkeys(choose(what, name.strip(), allowed) for name in text.split(",") if name.strip()))


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """``'1,32'`` as whole numbers from 1 to 2^31 - 1, each once. Raises UsageError (``bad-option``)."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not 1 <= min(counts) <= max(counts) <= MOST:
        raise UsageError(f"{what} {text!r} is not a list of numbers", code="bad-option", fix="write numbers with commas: 1,32")
    return counts
