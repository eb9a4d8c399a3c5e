"""What lies over and under the curves of a collective: spans from p10 to p90, fitted lines, crossover marks.

``bench/fit.py`` made the fits and crossovers, and put them into the record as rows; nothing is computed anew here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from crosscut.records import Row
from crosscut.report.canvas import color, plain, tint
from crosscut.report.sheets import number
from crosscut.units import format_size

FIT_POINTS = 40
"""Points of a drawn fit: on logarithmic axes a line in time bends."""
Curve = Sequence[tuple[int, float]]
"""Sizes in bytes, rising, with a value at each."""


def span(row: Row) -> tuple[float, float]:
    """How far p10 lies below and p90 above the median; nothing when one of them is missing or out of order."""
    low, middle, high = (number(getattr(row.us, name, None)) for name in ("p10", "p50", "p90"))
    if low is None or middle is None or high is None or not 0 < low <= middle <= high:
        return 0.0, 0.0
    return middle - low, high - middle


def whiskers(rows: Iterable[Row]) -> dict[str, Any]:
    """Error bars from p10 to p90 around the median, for bars and lone points."""
    spans = [span(row) for row in rows]
    sides = {"arrayminus": [below for below, _ in spans], "array": [above for _, above in spans]}
    return {"type": "data", "symmetric": False, "width": 2, "thickness": 1, **sides}


def band(impl: str, rows: Sequence[tuple[int, float, Row]]) -> dict[str, Any]:
    """The area from p10 to p90 along a curve of (size, median, row)."""
    sizes = [size for size, _, _ in rows]
    low = [value - span(row)[0] for _, value, row in rows]
    high = [value + span(row)[1] for _, value, row in rows]
    edge = {"x": sizes + sizes[::-1], "y": high + low[::-1], "mode": "lines", "line": {"width": 0}}
    return edge | {"type": "scatter", "fill": "toself", "fillcolor": tint(impl, 0.18), "hoverinfo": "skip", "showlegend": False}


def fit_line(impl: str, fit: Row, value: Callable[[float, float], float]) -> dict[str, Any] | None:
    """The fit as a thin dotted line; ``value`` makes of (bytes, us) what the chart shows. None when a number is missing."""
    alpha, rate, low, high = (number(fit.extra.get(name)) for name in ("alpha_us", "gbps", "from_bytes", "to_bytes"))
    if alpha is None or rate is None or low is None or high is None or not (rate > 0 and alpha >= 0 and 0 < low < high):
        return None
    sizes = [low * (high / low) ** (i / FIT_POINTS) for i in range(FIT_POINTS + 1)]
    line = {"color": color(impl), "width": 1, "dash": "dot"}
    drawn = {"x": sizes, "y": [value(size, alpha + size / rate / 1e3) for size in sizes], "line": line}
    return drawn | {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}


def crossing_marks(crossovers: Iterable[Row], curves: Mapping[str, Curve]) -> dict[str, Any] | None:
    """A cross where two curves meet, on the curve that is faster below; None without any."""
    marks = []
    for row in crossovers:
        size, below = number(row.extra.get("bytes")), str(row.extra.get("below"))
        height = _interpolate(curves.get(below, []), size) if size is not None and size > 0 else None
        if height is not None and size is not None:
            words = f"{format_size(size)}: below {below}, above {row.extra.get('above')} is faster"
            marks.append((size, height, plain(words)))
    if not marks:
        return None
    sizes, heights, texts = (list(column) for column in zip(*marks, strict=True))
    marker = {"symbol": "x-thin", "size": 11, "line": {"color": "#888888", "width": 2}}
    drawn = {"x": sizes, "y": heights, "text": texts, "mode": "markers", "marker": marker, "name": "crossover"}
    return drawn | {"type": "scatter", "hovertemplate": "%{text}<extra></extra>"}


def _interpolate(curve: Curve, size: float) -> float | None:
    """The curve's value at ``size``, a straight line between its neighbours on logarithmic axes; None outside it."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= size <= x1:
            part = math.log(size / x0) / math.log(x1 / x0)
            return float(y0 * (y1 / y0) ** part)
    return None
