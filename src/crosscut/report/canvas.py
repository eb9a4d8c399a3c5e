"""What all figures share: a chart with its words, colours, dashes, symbols, text and axes of sizes.

Colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any colour vision can tell apart, and an
implementation has the same colour in every chart. Page colours (text, grid, background) are left to page.js, which follows
the light or dark theme.
"""

from __future__ import annotations

import html
import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import plotly.graph_objects as go

from crosscut.units import format_size

PALETTE = ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#999999")
COLORS = {
    "crosscut": "#0072B2",
    "textbook": "#D55E00",
    "nccl": "#E69F00",
    "dtensor": "#009E73",
    "gloo": "#CC79A7",
    "crosscut_sp": "#F0E442",
    "no_comm": "#56B4E9",
    "single": "#999999",
    "single_best": "#CC79A7",
    "nccl_symmetric": "#56B4E9",
    "torch_one_shot": "#009E73",
    "torch_two_shot": "#CC79A7",
    "mpi": "#D55E00",
    "hf_tp_plan": "#009E73",
}
DASHES = ("solid", "dash", "dot", "dashdot")
PATTERNS = ("", "/", "x", ".")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star")


class Chart(NamedTuple):
    """A figure with an id that is unique on the page, a title, and a caption that says how to read it."""

    id: str
    title: str
    caption: str
    figure: go.Figure


def color(impl: str) -> str:
    """The colour of an implementation, always the same one."""
    return COLORS.get(impl) or PALETTE[zlib.crc32(impl.encode()) % len(PALETTE)]


def tint(impl: str, opacity: float) -> str:
    """The colour of an implementation, see-through: ``'rgba(0,114,178,0.15)'``."""
    red, green, blue = (int(color(impl)[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def plain(text: object) -> str:
    """Text that plotly shows as it is, instead of reading tags in it."""
    return html.escape(str(text), quote=False)


def slug(words: str) -> str:
    """An id for a page from words."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def size_axis(measured: Iterable[int]) -> dict[str, Any]:
    """A log axis of bytes with at most eight of the measured sizes as ticks."""
    sizes = sorted(set(measured))
    ticks = sizes[:: -(-len(sizes) // 8)]
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [format_size(size) for size in ticks],
        "title": {"text": "size"},
        "automargin": True,
    }
