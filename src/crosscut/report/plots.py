"""Figures of records. Each kind of chart is one entry of ``kinds.KINDS``, and draws itself where it finds its data.

Rows become points (a place on the x axis, a series, a row); points that may share a chart are grouped; each kind draws
the groups in which it has a value. Traces of several records differ by dash, hatching and symbol as well as by colour, so
that no chart relies on colour alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from crosscut.hardware import wire
from crosscut.records import Row, RunRecord
from crosscut.report.canvas import DASHES, PATTERNS, SYMBOLS, Chart, color, plain, size_axis, slug
from crosscut.report.curves import curve_charts
from crosscut.report.kinds import KINDS, Kind, Mark, Point, Series
from crosscut.report.maps import map_charts
from crosscut.report.overlays import band, crossing_marks, fit_line, span, whiskers
from crosscut.report.sheets import number, p50
from crosscut.report.summary import DERIVED
from crosscut.report.tables import Axis, Shape, compare, impl_order, speedup


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
                drawn.append(_chart(kind, len(drawn) + 1, names, shown, labels, records))
    drawn += map_charts(records, labels, len(drawn) + 1)
    return drawn + curve_charts(records, labels, len(drawn) + 1)


def _points(index: int, record: RunRecord) -> Iterator[Point]:
    for line in compare(record.rows):
        for impl, row in line.rows.items():
            series = Series(index, impl, row.world)
            yield Point("layer", line.case.group, line.case.dtype, series, line.shape, row, speedup(row, line))
    for row in record.rows:
        nbytes = number(row.bytes)
        if nbytes is not None and nbytes > 0 and row.subject not in (*DERIVED, "pair"):
            yield _size_point(index, record, row, round(nbytes))


def _size_point(index: int, record: RunRecord, row: Row, nbytes: int) -> Point:
    extra = row.extra
    series = Series(index, row.impl, row.world, bool(extra.get("in_place")))
    link = wire(record.hardware.device, record.hardware.links, row.world) if isinstance(record.hardware.device, str) else None
    peak = (link.gbps, f"peak of the link, {link.name}") if link is not None and link.gbps else None
    return Point("size", (row.subject, _redop(row), row.dtype, row.mode), row.dtype, series, nbytes, row, peak=peak)


def _redop(row: Row) -> str:
    """The reduction where it is not the usual one."""
    given = row.extra.get("redop")
    return "" if given in (None, "none", "sum") else str(given)


def _chart(
    kind: Kind, order: int, names: Sequence[str], points: list[Point], labels: Sequence[str], records: Sequence[RunRecord]
) -> Chart:
    axis = Axis(point.x for point in points if isinstance(point.x, tuple))
    figure = go.Figure(layout=_layout(kind, axis, points))
    of_series: dict[Series, dict[Shape | int, Point]] = {}
    for point in points:
        of_series.setdefault(point.series, {}).setdefault(point.x, point)
    impls = impl_order(series.impl for series in of_series)
    ordered = sorted(of_series, key=lambda s: (impls.index(s.impl), s.in_place, s.world, s.record))
    notes = [kind.caption]
    for series in ordered:
        placed = sorted(of_series[series].values(), key=lambda point: point.x)
        legend = _legend(series, of_series, labels)
        for under in _underlays(kind, series, placed, of_series, _derived("fit", records[series.record], names)):
            figure.add_trace(under | {"legendgroup": legend["legendgroup"]})
        figure.add_trace(_trace(kind, series, placed, axis, impls) | legend)
    if kind.key == "latency":
        _mark_crossovers(figure, of_series, names, records, labels)
    reference = _reference(kind, points)
    if reference is not None:
        _mark(figure, points, *reference)
    figure.update_layout(height=_height(figure))
    drawn = {trace.line.dash for trace in figure.data if trace.type == "scatter" and trace.showlegend is False}
    notes += ["Dotted: the alpha-beta fit."] if "dot" in drawn else []
    notes += ["Crosses: where two implementations change places."] if figure.data[-1].name == "crossover" else []
    notes += [f"Here {axis.fixed}."] if axis.fixed else []
    where = ", ".join(filter(None, names))
    return Chart(slug(f"{kind.key} {where} {order}"), f"{kind.title}: {where}", " ".join(notes), figure)


def _reference(kind: Kind, points: list[Point]) -> Mark | None:
    """What the chart marks with a line: what is the same for all its points."""
    marks = {kind.reference(point) for point in points}
    return marks.pop() if len(marks) == 1 else None


def _derived(subject: str, record: RunRecord, names: Sequence[str]) -> list[Row]:
    """The record's fits or crossovers that belong to a chart of (op, redop, dtype, mode)."""
    wanted = tuple(names)
    return [
        row
        for row in record.rows
        if row.subject == subject and (row.extra.get("op"), _redop(row), row.dtype, row.mode) == wanted
    ]


def _underlays(
    kind: Kind, series: Series, points: list[Point], shown: dict[Series, Any], fits: list[Row]
) -> Iterator[dict[str, Any]]:
    """The span and the fits of one curve; of the out-of-place calls alone where both were measured."""
    if series.in_place and series._replace(in_place=False) in shown:
        return
    rows = [(point.x, kind.value(point) or 0.0, point.row) for point in points if isinstance(point.x, int)]
    if kind.spread and len(rows) > 1:
        yield band(series.impl, rows)
    if kind.fitted is None:
        return
    show, row = kind.fitted, points[0].row
    for fit in fits:
        if (fit.impl, fit.world) == (series.impl, series.world):
            line = fit_line(series.impl, fit, lambda size, us: show(row, size, us))
            if line is not None:
                yield line


def _mark_crossovers(
    figure: go.Figure,
    shown: dict[Series, dict[Shape | int, Point]],
    names: Sequence[str],
    records: Sequence[RunRecord],
    labels: Sequence[str],
) -> None:
    for i, record in enumerate(records):
        for world in sorted({series.world for series in shown if series.record == i}):
            curves = {
                series.impl: sorted((x, us) for x, point in placed.items() if isinstance(x, int) and (us := p50(point.row)))
                for series, placed in sorted(shown.items(), key=lambda item: not item[0].in_place)
                if (series.record, series.world) == (i, world)
            }
            marks = crossing_marks([row for row in _derived("crossover", record, names) if row.world == world], curves)
            if marks is not None:
                figure.add_trace(marks | ({"legendgroup": str(i)} if len(labels) > 1 else {}))


def _trace(kind: Kind, series: Series, points: list[Point], axis: Axis, impls: list[str]) -> dict[str, Any]:
    """A plotly trace as a dict: grouped bars, or a line with markers."""
    values = [kind.value(point) for point in points]
    fill, unit = color(series.impl), "" if kind.percent else f" {kind.axis}"
    trace: dict[str, Any] = {
        "x": [point.x if isinstance(point.x, int) else axis.label(point.x) for point in points],
        "y": values,
        "customdata": [plain(point.row.path or "") for point in points],
        "hovertemplate": f"%{{fullData.name}}<br>%{{x}}: %{{y:{'.0%' if kind.percent else '.3g'}}}{unit}<br>%{{customdata}}"
        "<extra></extra>",
    }
    if kind.spread and (kind.bars or len(points) == 1):
        trace["error_y"] = whiskers([point.row for point in points])
    if kind.bars:
        pattern = {"shape": PATTERNS[series.record % len(PATTERNS)], "fgcolor": fill, "fillmode": "replace"}
        return trace | {"type": "bar", "marker": {"color": fill, "pattern": pattern, "line": {"color": fill, "width": 1}}}
    symbol = SYMBOLS[impls.index(series.impl) % len(SYMBOLS)] + ("-open" if series.in_place else "")
    line = {"color": fill, "width": 2, "dash": DASHES[series.record % len(DASHES)]}
    marker = {"color": fill, "symbol": symbol, "size": 8}
    return trace | {"type": "scatter", "mode": "lines+markers", "line": line, "marker": marker}


def _legend(series: Series, shown: dict[Series, Any], labels: Sequence[str]) -> dict[str, Any]:
    """The trace's name in the legend, under its record's label when there are several records, and the group that a click
    on it hides: the curve with its span and fits, or the whole record.
    """
    split_worlds = {other.world for other in shown if other.impl != "single"}
    places = {other.in_place for other in shown}
    parts = [
        series.impl,
        f"world {series.world}" if len(split_worlds) > 1 else "",
        "in place" if series.in_place and len(places) > 1 else "",
    ]
    name = plain(", ".join(filter(None, parts)))
    if len(labels) < 2:
        return {"name": name, "legendgroup": name}
    return {"name": name, "legendgroup": str(series.record), "legendgrouptitle": {"text": _wrapped(labels[series.record])}}


def _wrapped(label: str) -> str:
    """A record's label in lines that fit into a chart on a phone; plotly cuts off what does not."""
    return "<br>".join(plain(line) for line in textwrap.wrap(label, 40))


def _layout(kind: Kind, axis: Axis, points: list[Point]) -> dict[str, Any]:
    y = _percent_axis(kind, points) if kind.percent else _log_axis(kind, points)
    return {
        "template": {},
        "barmode": "group",
        "showlegend": True,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 40},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "maxheight": 2000},
        "xaxis": size_axis(_sizes(points)) if points[0].family == "size" else _shape_axis(axis, points),
        "yaxis": {"title": {"text": kind.axis}, "automargin": True, **y},
    }


def _sizes(points: list[Point]) -> list[int]:
    return [point.x for point in points if isinstance(point.x, int)]


def _height(figure: go.Figure) -> int:
    """Pixels: enough for the legend of several records, which lists the traces of each below its label."""
    titles = {trace.legendgroup: trace.legendgrouptitle.text for trace in figure.data if trace.legendgrouptitle.text}
    named = [trace for trace in figure.data if trace.showlegend is not False]
    lines = sum(1 + title.count("<br>") for title in titles.values())
    return 400 + (22 * (len(named) + lines) if titles else 0)


def _percent_axis(kind: Kind, points: list[Point]) -> dict[str, Any]:
    """From 0 to 1, and further where a share lies outside: a split slower than the plain one hides less than nothing."""
    values = [value for value in map(kind.value, points) if value is not None]
    return {"tickformat": ".0%", "range": [1.1 * min(0.0, *values), max(1.0, *values)]}


def _log_axis(kind: Kind, points: list[Point]) -> dict[str, Any]:
    """A log axis whose ends and ticks are round (1, 2, 5, 10, ...), around all values, whiskers and the reference."""
    values = [value for value in map(kind.value, points) if value is not None]
    if kind.spread:
        values += [
            edge
            for value, point in zip(values, points, strict=True)
            for edge in (value - span(point.row)[0], value + span(point.row)[1])
        ]
    reference = _reference(kind, points)
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
        "title": {"text": plain(axis.name)},
        "automargin": True,
    }


def _mark(figure: go.Figure, points: list[Point], value: float, text: str) -> None:
    """A dashed horizontal line at ``value`` across all sizes or shapes, named in the legend."""
    sizes = _sizes(points)
    places = [min(sizes), max(sizes)] if sizes else list(figure.layout.xaxis.categoryarray)
    line = {"color": "#888888", "width": 2, "dash": "longdash"}
    drawn: dict[str, Any] = {"mode": "lines", "line": line}
    if len(set(places)) == 1:  # a line from a place to itself has no length
        drawn = {"mode": "markers", "marker": {"symbol": "line-ew", "size": 80, "line": {"color": "#888888", "width": 2}}}
    name = f"{plain(text)} ({value:.0f})" if value >= 10 else f"{plain(text)} ({value:.2g})"
    figure.add_trace({"type": "scatter", "name": name, "x": places, "y": [value] * len(places), "hoverinfo": "skip", **drawn})
