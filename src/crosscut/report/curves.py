"""Training runs as curves: the loss over the steps, of all records in one chart, so that equal runs lie on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from crosscut.records import Row, RunRecord
from crosscut.report.canvas import DASHES, PALETTE, Chart, plain, slug
from crosscut.report.sheets import number

CAPTION = (
    "Mean loss of each step's batch, lower is better. Runs of one model on the same text should lie on each other however "
    "their ranks are used; thinner lines lie on top, so that the ones below them show."
)


def curve_charts(records: Sequence[RunRecord], labels: Sequence[str], order: int) -> list[Chart]:
    """One chart of every ``training`` row of ``records``, or none; its id counts on from ``order``."""
    runs = [(label, row) for record, label in zip(records, labels, strict=True) for row in record.rows]
    found = [(label, row, losses) for label, row in runs if row.subject == "training" and (losses := _losses(row))]
    if not found:
        return []
    figure = go.Figure(
        layout={
            "template": {},
            "height": 420,
            "margin": {"l": 56, "r": 12, "t": 12, "b": 40},
            "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "maxheight": 2000},
            "xaxis": {"title": {"text": "step"}, "automargin": True},
            "yaxis": {"title": {"text": "loss, nats a token"}, "automargin": True},
        }
    )
    told_apart = len({row.impl for _, row, _ in found}) == len(found)
    for index, (label, row, losses) in enumerate(found):
        name = row.impl if told_apart else f"{row.impl} ({label})"
        figure.add_trace(_trace(index, len(found), plain(name), losses))
    return [Chart(slug(f"loss training {order}"), "Training loss", CAPTION, figure)]


def _losses(row: Row) -> list[tuple[int, float]]:
    """(steps made, loss) of a row; what is not a number is left out."""
    first, given = number(row.extra.get("first_step")) or 0, row.extra.get("loss")
    values = map(number, given) if isinstance(given, list) else ()
    return [(round(first) + done, value) for done, value in enumerate(values, start=1) if value is not None]


def _trace(index: int, count: int, name: str, losses: list[tuple[int, float]]) -> dict[str, Any]:
    line = {
        "color": PALETTE[index % len(PALETTE)],
        "width": 2 + 2 * (count - 1 - index) if count < 5 else 2,
        "dash": DASHES[index % len(DASHES)] if count > 1 else "solid",
    }
    return {
        "type": "scatter",
        "mode": "lines" if len(losses) > 1 else "markers",
        "name": name,
        "x": [step for step, _ in losses],
        "y": [loss for _, loss in losses],
        "line": line,
        "hovertemplate": "%{fullData.name}<br>step %{x}: %{y:.4f}<extra></extra>",
    }
