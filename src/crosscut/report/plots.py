"""Figures of records. Each kind of chart is one entry of :data:`KINDS`, and draws itself where it finds its data.

Rows become points (a place on the x axis, a series, a row); points that may share a chart are grouped; each kind draws
the groups in which it has a value. Colours are those of Okabe and Ito (Color Universal Design, 2008), which people with
any colour vision can tell apart, and an implementation has the same colour in every chart. Traces of several records
differ by dash, hatching and symbol as well, so that no chart relies on colour alone. Page colours (text, grid,
background) are left to page.js, which follows the light or dark theme.
"""

from __future__ import annotations

import html
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import plotly.graph_objects as go

from crosscut.records import Row, RunRecord
from crosscut.report.tables import Axis, Shape, compare, impl_order, number, p50, speedup
from crosscut.units import ROUNDOFF, SHORT_DTYPES, format_size

PALETTE = ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#999999")
COLORS = {
    "crosscut": "#0072B2",
    "textbook": "#D55E00",
    "nccl": "#E69F00",
    "dtensor": "#009E73",
    "gloo": "#CC79A7",
    "no_comm": "#56B4E9",
    "single": "#999999",
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


class Series(NamedTuple):
    """What one trace shows: an implementation in one record (by its position), on one world."""

    record: int
    impl: str
    world: int


@dataclass(frozen=True)
class Point:
    """One row in its place. ``family`` is 'layer' (x is a shape) or 'size' (x is a number of bytes)."""

    family: str
    group: tuple[str, ...]
    dtype: str
    series: Series
    x: Shape | int
    row: Row
    speedup: float | None = None


@dataclass(frozen=True)
class Kind:
    """One kind of chart: which points it draws (those with a ``value``), and how. The axis is linear in percent, else log."""

    key: str
    family: str
    title: str
    caption: str
    axis: str
    read: Callable[[Point], float | None]
    bars: bool = False
    percent: bool = False
    spread: bool = False
    reference: Callable[[str], tuple[float, str] | None] = lambda dtype: None

    def value(self, point: Point) -> float | None:
        """What the chart shows of a point; None when there is nothing, or nothing that a log axis can show."""
        value = self.read(point)
        return value if value is not None and (self.percent or value > 0) else None


def color(impl: str) -> str:
    """The colour of an implementation, always the same one."""
    return COLORS.get(impl) or PALETTE[zlib.crc32(impl.encode()) % len(PALETTE)]


def roundoff(dtype: str) -> tuple[float, str] | None:
    """The unit roundoff of a dtype with its label; None for one that is not known."""
    name = SHORT_DTYPES.get(dtype, dtype)
    return (ROUNDOFF[name], f"rounding of {name}") if name in ROUNDOFF else None


KINDS = (
    Kind(
        "time",
        "layer",
        "Time",
        "Median time of one call, shorter is better; whiskers span the 10th to the 90th percentile. "
        "no_comm is the local work alone.",
        "us",
        lambda point: p50(point.row),
        bars=True,
        spread=True,
    ),
    Kind(
        "speedup",
        "layer",
        "Speed-up over one device",
        "Above the line at 1 the split pays; below it one device alone is faster. no_comm is the ceiling of any split.",
        "times",
        lambda point: point.speedup,
        reference=lambda dtype: (1.0, "break-even"),
    ),
    Kind(
        "comm",
        "layer",
        "Share of communication",
        "The part of a call's time that is spent in communication.",
        "share of time",
        lambda point: number(point.row.extra.get("comm_share")),
        bars=True,
        percent=True,
    ),
    Kind(
        "error",
        "layer",
        "Error against float64",
        "Relative error of the result. A split is as good as one device when its points lie at the same height.",
        "relative error",
        lambda point: number(point.row.error),
        reference=roundoff,
    ),
    Kind(
        "latency",
        "size",
        "Latency",
        "Median time of one call over the size of the whole tensor, lower is better.",
        "us",
        lambda point: p50(point.row),
        spread=True,
    ),
    Kind(
        "busbw",
        "size",
        "Bus bandwidth",
        "Traffic on the busiest link over the size of the whole tensor, higher is better; compare it with the link's rate.",
        "GB/s",
        lambda point: number(point.row.busbw_gbps),
    ),
)


def charts(records: Sequence[RunRecord], labels: Sequence[str]) -> list[Chart]:
    """All the charts that ``records`` have data for; ``labels`` (one a record) tell the traces of several apart."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for index, record in enumerate(records):
        for point in _points(index, record):
            groups.setdefault((point.family, *point.group), []).append(point)
    drawn: list[Chart] = []
    for (family, *names), points in groups.items():
        for kind in KINDS:
            shown = [point for point in points if kind.value(point) is not None]
            if kind.family == family and shown:
                drawn.append(_chart(kind, len(drawn) + 1, names, shown, labels))
    return drawn


def _points(index: int, record: RunRecord) -> Iterator[Point]:
    for line in compare(record.rows):
        case = line.case
        split = f"{case.split} split" if case.split else ""
        for impl, row in line.rows.items():
            series = Series(index, impl, row.world)
            group = (case.subject, split, case.dtype, case.mode)
            yield Point("layer", group, case.dtype, series, line.shape, row, speedup(row, line))
    for row in record.rows:
        nbytes = number(row.bytes)
        if nbytes is not None and nbytes > 0:
            series = Series(index, row.impl, row.world)
            yield Point("size", (row.subject, row.dtype, row.mode), row.dtype, series, round(nbytes), row)


def _chart(kind: Kind, order: int, names: Sequence[str], points: list[Point], labels: Sequence[str]) -> Chart:
    axis = Axis(point.x for point in points if isinstance(point.x, tuple))
    figure = go.Figure(layout=_layout(kind, axis, points))
    of_series: dict[Series, dict[Shape | int, Point]] = {}
    for point in points:
        of_series.setdefault(point.series, {}).setdefault(point.x, point)
    impls = impl_order(series.impl for series in of_series)
    for series in sorted(of_series, key=lambda s: (impls.index(s.impl), s.world, s.record)):
        placed = sorted(of_series[series].values(), key=lambda point: point.x)
        figure.add_trace(_trace(kind, series, placed, axis, impls) | _legend(series, of_series, labels))
    reference = kind.reference(points[0].dtype)
    if reference is not None:
        _mark(figure, *reference)
    figure.update_layout(height=_height(figure))
    where = ", ".join(filter(None, names))
    fixed = f" Here {axis.fixed}." if axis.fixed else ""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{kind.key} {where} {order}".lower()).strip("-")
    return Chart(slug, f"{kind.title}: {where}", kind.caption + fixed, figure)


def _trace(kind: Kind, series: Series, points: list[Point], axis: Axis, impls: list[str]) -> dict[str, Any]:
    """A plotly trace as a dict: grouped bars, or a line with markers."""
    values = [kind.value(point) for point in points]
    fill, unit = color(series.impl), "" if kind.percent else f" {kind.axis}"
    trace: dict[str, Any] = {
        "x": [point.x if isinstance(point.x, int) else axis.label(point.x) for point in points],
        "y": values,
        "customdata": [_plain(point.row.path or "") for point in points],
        "hovertemplate": f"%{{fullData.name}}<br>%{{x}}: %{{y:{'.0%' if kind.percent else '.3g'}}}{unit}<br>%{{customdata}}"
        "<extra></extra>",
    }
    if kind.spread:
        trace["error_y"] = _whiskers(points)
    if kind.bars:
        pattern = {"shape": PATTERNS[series.record % len(PATTERNS)], "fgcolor": fill, "fillmode": "replace"}
        return trace | {"type": "bar", "marker": {"color": fill, "pattern": pattern, "line": {"color": fill, "width": 1}}}
    symbol = SYMBOLS[impls.index(series.impl) % len(SYMBOLS)]
    line = {"color": fill, "width": 2, "dash": DASHES[series.record % len(DASHES)]}
    marker = {"color": fill, "symbol": symbol, "size": 8}
    return trace | {"type": "scatter", "mode": "lines+markers", "line": line, "marker": marker}


def _whiskers(points: list[Point]) -> dict[str, Any]:
    """Error bars from p10 to p90 around the median."""
    spans = [_span(point) for point in points]
    sides = {"arrayminus": [below for below, _ in spans], "array": [above for _, above in spans]}
    return {"type": "data", "symmetric": False, "width": 2, "thickness": 1, **sides}


def _span(point: Point) -> tuple[float, float]:
    """How far p10 lies below and p90 above the median; nothing when one of them is missing or out of order."""
    low, middle, high = (number(getattr(point.row.us, name, None)) for name in ("p10", "p50", "p90"))
    if low is None or middle is None or high is None or not 0 < low <= middle <= high:
        return 0.0, 0.0
    return middle - low, high - middle


def _legend(series: Series, shown: dict[Series, Any], labels: Sequence[str]) -> dict[str, Any]:
    """The trace's name in the legend, under its record's label when there are several records."""
    split_worlds = {other.world for other in shown if other.impl != "single"}
    name = f"{series.impl}, world {series.world}" if len(split_worlds) > 1 else series.impl
    if len(labels) < 2:
        return {"name": _plain(name)}
    title = {"text": _plain(labels[series.record])}
    return {"name": _plain(name), "legendgroup": str(series.record), "legendgrouptitle": title}


def _plain(text: object) -> str:
    """Text that plotly shows as it is, instead of reading tags in it."""
    return html.escape(str(text), quote=False)


def _layout(kind: Kind, axis: Axis, points: list[Point]) -> dict[str, Any]:
    y = {"tickformat": ".0%", "range": [0, 1]} if kind.percent else _log_axis(kind, points)
    return {
        "template": {},
        "barmode": "group",
        "margin": {"l": 56, "r": 12, "t": 12, "b": 40},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "maxheight": 2000},
        "xaxis": _size_axis(points) if points[0].family == "size" else _shape_axis(axis, points),
        "yaxis": {"title": {"text": kind.axis}, "automargin": True, **y},
    }


def _height(figure: go.Figure) -> int:
    """Pixels: enough for the legend of several records, which lists the traces of each below its label."""
    grouped = {trace.legendgroup for trace in figure.data if trace.legendgroup}
    return 400 + (22 * (len(figure.data) + len(grouped)) if grouped else 0)


def _log_axis(kind: Kind, points: list[Point]) -> dict[str, Any]:
    """A log axis whose ends and ticks are round (1, 2, 5, 10, ...), around all values, whiskers and the reference."""
    values = [value for value in map(kind.value, points) if value is not None]
    if kind.spread:
        values += [
            edge for value, (down, up) in zip(values, map(_span, points), strict=True) for edge in (value - down, value + up)
        ]
    reference = kind.reference(points[0].dtype)
    values += [] if reference is None else [reference[0]]
    low, high = min(values) / 1.1, max(values) * 1.1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) < 7 else (1,)
    round_values = [float(f"{step}e{power}") for power in powers for step in steps]
    first = max(value for value in round_values if value <= low)
    last = min(value for value in round_values if value >= high)
    ticks = [value for value in round_values if first <= value <= last]
    texts = [f"{tick:g}" for tick in ticks]
    return {"type": "log", "range": [math.log10(first), math.log10(last)], "tickvals": ticks, "ticktext": texts}


def _shape_axis(axis: Axis, points: list[Point]) -> dict[str, Any]:
    order = sorted({point.x for point in points if isinstance(point.x, tuple)})
    names = list(dict.fromkeys(axis.label(shape) for shape in order))
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": names,
        "title": {"text": _plain(axis.name)},
        "automargin": True,
    }


def _size_axis(points: list[Point]) -> dict[str, Any]:
    """A log axis of bytes with at most eight of the measured sizes as ticks."""
    sizes = sorted({point.x for point in points if isinstance(point.x, int)})
    ticks = sizes[:: -(-len(sizes) // 8)]
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [format_size(size) for size in ticks],
        "title": {"text": "size"},
        "automargin": True,
    }


def _mark(figure: go.Figure, value: float, text: str) -> None:
    """A dashed horizontal line at ``value`` across all shapes, named in the legend."""
    names = list(figure.layout.xaxis.categoryarray)
    line = {"color": "#888888", "width": 2, "dash": "longdash"}
    figure.add_trace(
        {"type": "scatter", "mode": "lines", "name": f"{text} ({value:.2g})", "x": names, "y": [value] * len(names)}
        | {"line": line, "hoverinfo": "skip"}
    )
