"""Who talks to whom: pair matrices as heat maps, and the steps of a simulated algorithm as arrows between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from crosscut.records import Row, RunRecord
from crosscut.report.canvas import PALETTE, Chart, plain, slug
from crosscut.report.sheets import number, p50, short
from crosscut.report.summary import messages
from crosscut.units import format_size

MOST_NUMBERS = 16
"""Ranks up to which the cells of a matrix show their numbers."""
MOST_ARROWS = 2000
"""Messages up to which the steps of an algorithm are drawn."""
DIRECTIONS = {"uni": "one way at a time", "bi": "both ways at once"}


def map_charts(records: Sequence[RunRecord], labels: Sequence[str], order: int) -> list[Chart]:
    """The pair matrices and step charts of ``records``; their ids count on from ``order``."""
    drawn = []
    for record, label in zip(records, labels, strict=True):
        where = f" ({label})" if len(records) > 1 else ""
        found = [*_matrices(record), *filter(None, (_steps(row) for row in record.rows if row.subject == "simulate"))]
        drawn += [(title + where, caption, figure) for title, caption, figure in found]
    return [Chart(slug(f"map {title} {order + i}"), title, caption, figure) for i, (title, caption, figure) in enumerate(drawn)]


def _matrices(record: RunRecord) -> Iterator[tuple[str, str, go.Figure]]:
    """For each kind of pair: latency at its smallest size, bandwidth at its largest."""
    kinds: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in record.rows:
        if row.subject == "pair" and _ends(row) is not None and (number(row.bytes) or 0) > 0:
            kinds.setdefault((str(row.extra.get("direction")), row.impl, row.mode, row.dtype), []).append(row)
    for (direction, *names), rows in kinds.items():
        sizes = sorted({row.bytes for row in rows if row.bytes is not None})
        where = ", ".join([DIRECTIONS.get(direction, direction), *names])
        for name, unit, size, read in (
            ("latency", "us", sizes[0], p50),
            ("bandwidth", "GB/s", sizes[-1], lambda row: number(row.algbw_gbps)),
        ):
            figure = _heat([row for row in rows if row.bytes == size], direction == "bi", read, unit)
            if figure is not None:
                caption = f"Each two ranks alone, {format_size(size)}: rows send, columns receive. "
                caption += "A pair that differs from its like has another link, or a broken one."
                yield f"Pair {name}: {where}", caption, figure


def _ends(row: Row) -> tuple[int, int] | None:
    src, dst = row.extra.get("src"), row.extra.get("dst")
    return (src, dst) if isinstance(src, int) and isinstance(dst, int) else None


def _heat(rows: list[Row], mirrored: bool, read: Callable[[Row], float | None], unit: str) -> go.Figure | None:
    """A square of ranks coloured by value; None when no row has one. An unordered pair fills both its cells.

    Colours start at zero, so that noise between equal links does not look like a difference.
    """
    cells: dict[tuple[int, int], float] = {}
    for row in rows:
        ends, value = _ends(row), read(row)
        if ends is not None and value is not None:
            cells[ends] = value
            if mirrored:
                cells[ends[::-1]] = value
    if not cells:
        return None
    ranks = sorted({rank for ends in cells for rank in ends})
    names = [str(rank) for rank in ranks]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": [[cells.get((src, dst)) for dst in ranks] for src in ranks],
        "text": [[short(cells[src, dst]) if (src, dst) in cells else "" for dst in ranks] for src in ranks],
        "zmin": 0,
        "zmax": max(cells.values()),
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": unit}, "thickness": 12},
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "hovertemplate": f"%{{y}} to %{{x}}: %{{text}} {unit}<extra></extra>",
    }
    if len(ranks) <= MOST_NUMBERS:
        trace["texttemplate"] = "%{text}"
    axis = {"type": "category", "automargin": True, "showgrid": False}
    layout = {
        "template": {},
        "height": 400,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 40},
        "xaxis": {**axis, "title": {"text": "to rank"}},
        "yaxis": {**axis, "title": {"text": "from rank"}, "autorange": "reversed"},
    }
    return go.Figure([trace], layout)


def _steps(row: Row) -> tuple[str, str, go.Figure] | None:
    """The messages of a simulated algorithm: time runs downwards, one arrow a message. None when there are none."""
    steps = messages(row)
    sent = [(i, src, dst, size) for i, step in enumerate(steps) for src, dst, size in step]
    if not 0 < len(sent) <= MOST_ARROWS:
        return None
    ranks = sorted({rank for _, src, dst, _ in sent for rank in (src, dst)})
    place = {rank: i for i, rank in enumerate(ranks)}
    heads = {"symbol": "arrow", "size": [0, 11, 0] * len(sent), "angleref": "previous", "opacity": 1}
    lines: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [x for _, src, dst, _ in sent for x in (place[src], place[dst], None)],
        "y": [y for i, _, _, _ in sent for y in (i + 0.1, i + 0.9, None)],
        "line": {"color": PALETTE[0], "width": 2},
        "marker": {**heads, "color": PALETTE[0], "line": {"width": 0}},
        "hoverinfo": "skip",
    }
    middles: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": [(place[src] + place[dst]) / 2 for _, src, dst, _ in sent],
        "y": [i + 0.5 for i, _, _, _ in sent],
        "marker": {"size": 14, "opacity": 0},
        "text": [f"step {i + 1}: rank {src} sends {format_size(size)} to rank {dst}" for i, src, dst, size in sent],
        "hovertemplate": "%{text}<extra></extra>",
    }
    layout = {
        "template": {},
        "height": min(900, 140 + 70 * len(steps)),
        "margin": {"l": 56, "r": 12, "t": 40, "b": 12},
        "showlegend": False,
        "xaxis": {"side": "top", "tickvals": list(place.values()), "ticktext": [f"rank {rank}" for rank in ranks]}
        | {"range": [-0.4, len(ranks) - 0.6], "zeroline": False},
        "yaxis": {"range": [len(steps), 0], "tickvals": [i + 0.5 for i in range(len(steps))], "showgrid": False}
        | {"ticktext": [f"step {i + 1}" for i in range(len(steps))], "zeroline": False, "automargin": True},
    }
    title = f"Steps: {plain(row.impl)} {row.extra.get('op', '')}, {row.world} ranks"
    return title, _told(row, len(steps), [size for *_, size in sent]), go.Figure([lines, middles], layout)


def _told(row: Row, steps: int, sizes: list[float]) -> str:
    """The caption: what was counted, next to the formula."""
    span = format_size(min(sizes)) if min(sizes) == max(sizes) else f"{format_size(min(sizes))} to {format_size(max(sizes))}"
    text = f"Time runs downwards, an arrow is a message. Counted: {_plural(steps)}, {len(sizes)} messages of {span}"
    sent, formula = row.extra.get("sent"), row.extra.get("formula")
    counted = [value for value in map(number, sent) if value is not None] if isinstance(sent, list) else []
    text += f"; the busiest rank sends {format_size(max(counted))}" if counted else ""
    if not isinstance(formula, dict):
        return f"{text}."
    size, expected = number(row.bytes), number(formula.get("bytes_per_rank"))
    whole = f", with S = {format_size(size)} the whole tensor and n = {row.world} ranks" if size else ""
    result = f" = {format_size(expected)}" if expected is not None else ""
    return f"{text}. Formula: {_plural(formula.get('steps'))} and {formula.get('text', '')}{result} a rank{whole}."


def _plural(steps: object) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"
