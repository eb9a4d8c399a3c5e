"""Shapes and options as they are typed: read and refused before any rank starts. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from crosscut.errors import UsageError, choose
from crosscut.units import SHORT_DTYPES

DTYPES = ("float32", "bfloat16", "float16", "float64")


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
    if min(tokens, first, second) < 1:
        raise UsageError(f"the shape {text!r} has a size of 0", code="bad-shape", fix="give sizes of at least 1")
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
    if min(tokens, hidden, ffn) < 1:
        raise UsageError(f"the shape {text!r} has a size of 0", code="bad-shape", fix="give sizes of at least 1")
    return tokens, hidden, ffn


def parse_dtype(text: str) -> str:
    """The dtype's full name; ``auto`` stays. Raises UsageError (``bad-dtype``)."""
    name = SHORT_DTYPES.get(text.lower(), text.lower())
    return choose("dtype", name, ("auto", *DTYPES), code="bad-dtype")


def parse_list(text: str, what: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """``'a,b'`` as names that are all in ``allowed``. Raises UsageError (``bad-option``)."""
    return tuple(choose(what, name.strip(), allowed) for name in text.split(",") if name.strip())


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """``'1,32'`` as whole numbers of at least 1. Raises UsageError (``bad-option``)."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(f"{what} {text!r} is not a list of numbers", code="bad-option", fix="write numbers with commas: 1,32")
    return counts
