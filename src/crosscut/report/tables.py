"""A record as tables: plain sheets of cells, which a terminal (:func:`table`) and the web page (``html``) both show.

A layer benchmark is compared line by line: one line for each shape, one column for each implementation, and under each
time its speed-up over one device. Any other record is listed row by row. Records come from other machines and older
versions, so a missing or odd value is shown as it is and never stops a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crosscut.records import Row, RunRecord
from crosscut.units import format_size

LAYERS = ("linear", "mlp", "block")
"""Subjects that are compared with the same layer on one device."""
IMPLS = ("single", "textbook", "nccl", "gloo", "mpi", "dtensor", "crosscut", "no_comm")
"""The usual implementations in the order in which tables and charts show them; others follow."""
MISSING = "-"
COMPARED = (
    "Median time in us, below it the speed-up over one device; no_comm is the local work alone, the ceiling of any "
    "split. error (relative, against float64) and comm (share of the time) are crosscut's, GB/s the collective's busbw."
)
LISTED = "Times in us, sizes of the whole tensor, algbw and busbw in GB/s, error relative against float64."

Shape = tuple[tuple[str, int], ...]


class Case(NamedTuple):
    """What a group of lines has in common."""

    subject: str
    split: str | None
    dtype: str
    mode: str
    world: int

    @property
    def title(self) -> str:
        """``'linear, column split, bf16, graph, world 2'``."""
        split = f"{self.split} split" if self.split else ""
        return ", ".join(filter(None, (self.subject, split, self.dtype, self.mode, f"world {self.world}")))


@dataclass(frozen=True)
class Line:
    """One shape of one case: the same work done by each implementation."""

    case: Case
    shape: Shape
    rows: dict[str, Row]


class Cell(NamedTuple):
    """``text`` for people, ``value`` to sort by (None sorts last), ``below`` a second line in smaller type."""

    text: str
    value: float | str | None = None
    below: str = ""


class Column(NamedTuple):
    """A heading; ``numeric`` columns are aligned to the right."""

    name: str
    numeric: bool = True


@dataclass(frozen=True)
class Sheet:
    """A table as plain data, with a caption that explains it. Every row holds one cell for each column."""

    title: str
    caption: str
    columns: list[Column]
    rows: list[list[Cell]]


def number(value: Any) -> float | None:
    """``value`` as a finite float, None when it is missing, not a number, or not finite."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def p50(row: Row | None) -> float | None:
    """The median time in microseconds, None when there is none (or none above zero, which no clock can read)."""
    value = number(row.us.p50) if row is not None and row.us is not None else None
    return value if value is not None and value > 0 else None


def speedup(row: Row, line: Line) -> float | None:
    """How many times faster than one device: what the record says, else the ratio of the medians. None for single."""
    if row.impl == "single":
        return None
    told = number(row.extra.get("speedup"))
    if told is not None:
        return told
    base, mine = p50(line.rows.get("single")), p50(row)
    return base / mine if base is not None and mine is not None else None


def impl_order(impls: Iterable[str]) -> list[str]:
    """The implementations once each: the usual ones in their fixed order, then the others by name."""
    return sorted(set(impls), key=lambda impl: (IMPLS.index(impl) if impl in IMPLS else len(IMPLS), impl))


def compare(rows: Iterable[Row]) -> list[Line]:
    """Layer rows as lines, in the order of the record.

    A row without a split or with world 1 (one device) stands on the line of every split and world of its shape.
    """
    buckets: dict[tuple[str, str, str, Shape], list[Row]] = {}
    for row in rows:
        if row.subject in LAYERS and row.shape:
            key = (row.subject, row.dtype, row.mode, tuple(row.shape.items()))
            buckets.setdefault(key, []).append(row)
    lines = []
    for (subject, dtype, mode, shape), bucket in buckets.items():
        places = list(dict.fromkeys(_place(row) for row in bucket))
        for place in places:
            if not any(_covers(place, other) for other in places if other != place):
                here = {row.impl: row for row in bucket if _covers(_place(row), place)}
                lines.append(Line(Case(subject, place[0], dtype, mode, place[1]), shape, here))
    return lines


def _place(row: Row) -> tuple[str | None, int]:
    """The split and the world of a row."""
    return row.extra.get("split"), row.world


def _covers(general: tuple[str | None, int], special: tuple[str | None, int]) -> bool:
    """Whether what holds at ``general`` (no split, world 1) also serves ``special``."""
    return general[0] in (None, special[0]) and general[1] in (1, special[1])


class Axis:
    """Names shapes by what differs among them: ``'32'`` when only the tokens differ, ``'32 x 4096'`` when two sizes do.

    Of shapes that are all equal it names the first size.
    """

    def __init__(self, shapes: Iterable[Shape]) -> None:
        sizes: dict[str, set[int]] = {}
        for shape in shapes:
            for name, size in shape:
                sizes.setdefault(name, set()).add(size)
        self._names = [name for name, values in sizes.items() if len(values) > 1] or list(sizes)[:1]
        self.name = " x ".join(self._names)
        self.fixed = ", ".join(f"{name} {min(sizes[name])}" for name in sizes if name not in self._names)

    def label(self, shape: Shape) -> str:
        """The sizes of ``shape`` that differ, in the order of ``name``."""
        return " x ".join(str(dict(shape).get(name, MISSING)) for name in self._names)


def comparison_sheets(record: RunRecord) -> list[Sheet]:
    """One sheet for each case of a layer benchmark; none when the record holds no layer rows.

    Columns: the sizes that differ, the median of each implementation in us (below it the speed-up over one device),
    then of crosscut's split: error (relative, against float64), comm (share of the time spent in communication) and the
    busbw of the case's collective in GB/s. A column without any value is left out.
    """
    cases: dict[Case, list[Line]] = {}
    for line in compare(record.rows):
        cases.setdefault(line.case, []).append(line)
    return [_comparison(case, lines, record.rows) for case, lines in cases.items()]


def _comparison(case: Case, lines: list[Line], rows: list[Row]) -> Sheet:
    impls = impl_order(impl for line in lines for impl in line.rows)
    axis = Axis(line.shape for line in lines)
    columns = [Column(axis.name), *map(Column, impls), Column("error"), Column("comm"), Column("GB/s")]
    body = [
        [Cell(axis.label(line.shape), number(math.prod(size for _, size in line.shape)))]
        + [_time(line, impl) for impl in impls]
        + [*_crosscut_cells(line), _cell(_collective_rate(line, rows), short)]
        for line in lines
    ]
    return _without_empty(Sheet(", ".join(filter(None, (case.title, axis.fixed))), COMPARED, columns, body))


def _time(line: Line, impl: str) -> Cell:
    row = line.rows.get(impl)
    if row is None:
        return Cell(MISSING)
    gain, time = speedup(row, line), p50(row)
    return Cell(MISSING if time is None else short(time), time, MISSING if gain is None else f"{gain:.2f}x")


def _crosscut_cells(line: Line) -> list[Cell]:
    row = line.rows.get("crosscut")
    if row is None:
        return [Cell(MISSING), Cell(MISSING)]
    return [_cell(row.error, _power), _cell(row.extra.get("comm_share"), "{:.0%}".format)]


def _collective_rate(line: Line, rows: list[Row]) -> float | None:
    """busbw in GB/s of the collective that belongs to ``line``: crosscut's own when measured, else the fastest."""
    wanted = "all_gather" if line.case.split == "column" else "all_reduce"
    rates: dict[bool, list[float]] = {}
    for row in rows:
        rate, of = number(row.busbw_gbps), row.extra.get("shape_of")
        same = row.subject == wanted and row.mode == line.case.mode and row.world == line.case.world
        if same and rate is not None and isinstance(of, dict) and tuple(of.items()) == line.shape:
            rates.setdefault(row.impl == "crosscut", []).append(rate)
    return max(rates.get(True) or rates.get(False) or [], default=None)


def short(value: float) -> str:
    """A time or a rate in at most three digits, without an exponent: ``'0.25'``, ``'18.8'``, ``'1234'``, ``'<0.01'``."""
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if abs(value) < 1 else f"{value:.3g}" if abs(value) < 99.95 else f"{value:.0f}"


def _power(value: float) -> str:
    """An error with two digits: ``'2.1e-3'``."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _cell(value: Any, style: Callable[[float], str]) -> Cell:
    """A number in ``style``, or what was recorded in its place ('inf')."""
    finite = number(value)
    if finite is None:
        return Cell(MISSING if value is None else str(value))
    return Cell(style(finite), finite)


def _words(value: Any) -> Cell:
    return Cell(MISSING) if value in (None, "") else Cell(str(value), str(value))


def _size(row: Row) -> Cell:
    if row.bytes is not None and number(row.bytes) is not None:
        return Cell(format_size(row.bytes), float(row.bytes))
    shape = row.shape or {}
    work = number(math.prod(shape.values())) if shape else None
    return Cell(", ".join(f"{name} {size}" for name, size in shape.items()) or MISSING, work)


def _percentile(name: str) -> Callable[[Row], Cell]:
    return lambda row: _cell(getattr(row.us, name, None), short)


COLUMNS: dict[Column, Callable[[Row], Cell]] = {
    Column("subject", False): lambda row: _words(row.subject),
    Column("impl", False): lambda row: _words(row.impl),
    Column("split", False): lambda row: _words(row.extra.get("split")),
    Column("mode", False): lambda row: _words(row.mode),
    Column("world"): lambda row: _cell(row.world, short),
    Column("dtype", False): lambda row: _words(row.dtype),
    Column("size", False): _size,
    **{Column(name): _percentile(name) for name in ("p10", "p50", "p90", "p99")},
    Column("algbw"): lambda row: _cell(row.algbw_gbps, short),
    Column("busbw"): lambda row: _cell(row.busbw_gbps, short),
    Column("error"): lambda row: _cell(row.error, _power),
    Column("path", False): lambda row: _words(row.path),
    Column("note", False): lambda row: _words(row.note),
}
HOISTED = ("subject", "mode", "world", "dtype", "split")


def rows_sheet(record: RunRecord) -> Sheet:
    """Every row of a record: times in us, algbw and busbw in GB/s.

    Empty columns are left out, and what all of several rows share (mode, world, dtype, ...) moves into the title.
    """
    sheet = Sheet("", LISTED, list(COLUMNS), [[make(row) for make in COLUMNS.values()] for row in record.rows])
    sheet = _without_empty(sheet)
    shared = [i for i, column in enumerate(sheet.columns) if column.name in HOISTED and _shared(sheet, i)]
    facts = [f"{sheet.columns[i].name} {sheet.rows[0][i].text}" for i in shared]
    return replace(_keep(sheet, lambda i: i not in shared), title=", ".join(["All rows", *facts]))


def _shared(sheet: Sheet, i: int) -> bool:
    return len(sheet.rows) > 1 and len({row[i] for row in sheet.rows}) == 1


def _without_empty(sheet: Sheet) -> Sheet:
    return _keep(sheet, lambda i: any(row[i].text != MISSING for row in sheet.rows))


def _keep(sheet: Sheet, wanted: Callable[[int], bool]) -> Sheet:
    kept = [i for i in range(len(sheet.columns)) if wanted(i)]
    rows = [[row[i] for i in kept] for row in sheet.rows]
    return replace(sheet, columns=[sheet.columns[i] for i in kept], rows=rows)


def label(record: RunRecord) -> str:
    """``'NVIDIA H200 x 2, 1a2b3c4d5e6f, 2026-01-02T03:04:05+00:00'``: what tells a record from others."""
    hardware = record.hardware
    return ", ".join(filter(None, (f"{hardware.device} x {hardware.count}", record.commit, record.started)))


def table(record: RunRecord) -> RenderableType:
    """The record for a terminal of 100 columns: comparison sheets of a layer benchmark, else every row; then the notes."""
    sheets = comparison_sheets(record) or [rows_sheet(record)]
    parts: list[RenderableType] = [part for sheet in sheets for part in (Text(sheet.title, style="bold"), _rich(sheet), Text())]
    captions = dict.fromkeys(sheet.caption for sheet in sheets)
    return Group(*parts, *(Text(caption, style="dim") for caption in captions), *map(Text, record.notes))


def _rich(sheet: Sheet) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in sheet.columns:
        shown.add_column(Text(column.name), justify="right" if column.numeric else "left", overflow="fold")
    for row in sheet.rows:
        shown.add_row(*map(_rich_cell, row))
    return shown


def _rich_cell(cell: Cell) -> Text:
    text = Text(cell.text)
    if cell.below:
        gain = number(cell.below.rstrip("x"))
        style = "dim" if gain is None else "green" if gain > 1 else "red"
        text.append(f"\n{'' if cell.below == MISSING else cell.below}", style=style)
    return text
