"""A record as tables: plain sheets of cells, which a terminal (:func:`table`) and the web page (``html``) both show.

A layer benchmark is compared line by line: one line for each shape, one column for each implementation, and under each
time its speed-up over one device. Any other record is listed row by row. What was concluded from rows (fits, crossovers,
verdicts) has tables of its own in ``summary``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from crosscut.records import Row, RunRecord
from crosscut.report.sheets import (
    MISSING,
    Cell,
    Column,
    Sheet,
    cell,
    drawn,
    nbytes,
    number,
    p50,
    power,
    sheet_of,
    short,
    without_empty,
    words,
)
from crosscut.report.summary import DERIVED, summary_sheets
from crosscut.units import format_gain

BOTH = "forward+backward"
"""The pass of a row, where it is not the forward alone."""
LAYERS = ("linear", "mlp", "block")
"""Subjects that are compared with the same layer on one device."""
IMPLS = ("single", "single_best", "textbook", "nccl", "gloo", "mpi", "dtensor", "crosscut", "crosscut_sp", "no_comm")
"""The usual implementations in the order in which tables and charts show them; others follow."""
COMPARED = (
    "Median time in us, below it the speed-up over one device; no_comm is the local work alone, the ceiling of any split. "
    "error (relative, against float64), comm (share of the time) and hidden (of what the plain split takes beyond no_comm) "
    "are crosscut's, GB/s the collective's busbw."
)
KEPT = " kept: for the backward, on one rank; kept sp: with sequence parallelism."
LISTED = (
    "Times in us, sizes of the whole tensor, algbw, busbw and wire (what one port carried) in GB/s, error relative against "
    "float64, wrong the number of elements that differ."
)
PAIRED = "Two ranks at a time: one sends to the other, or both send at once (and). Times in us, algbw in GB/s."

Shape = tuple[tuple[str, int], ...]


class Case(NamedTuple):
    """What a group of lines has in common."""

    subject: str
    split: str | None
    dtype: str
    mode: str
    world: int
    both: bool = False
    """Forward and backward, not forward alone."""

    @property
    def group(self) -> tuple[str, ...]:
        """What a chart of it is called: subject, split, dtype, mode, and the pass where it is not the forward alone."""
        split = f"{self.split} split" if self.split not in (None, self.subject) else ""
        return (self.subject, split, self.dtype, self.mode, BOTH if self.both else "")

    @property
    def title(self) -> str:
        """``'linear, column split, bf16, graph, world 2'``."""
        return ", ".join(filter(None, (*self.group, f"world {self.world}")))


@dataclass(frozen=True)
class Line:
    """One shape of one case: the same work done by each implementation."""

    case: Case
    shape: Shape
    rows: dict[str, Row]


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
    buckets: dict[tuple[str, str, str, bool, Shape], list[Row]] = {}
    for row in rows:
        if row.subject in LAYERS and row.shape:
            key = (row.subject, row.dtype, row.mode, row.extra.get("pass") == BOTH, tuple(row.shape.items()))
            buckets.setdefault(key, []).append(row)
    lines = []
    for (subject, dtype, mode, both, shape), bucket in buckets.items():
        places = list(dict.fromkeys(_place(row) for row in bucket))
        for place in places:
            if not any(_covers(place, other) for other in places if other != place):
                here = {row.impl: row for row in bucket if _covers(_place(row), place)}
                lines.append(Line(Case(subject, place[0], dtype, mode, place[1], both), shape, here))
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
    then of crosscut's split: error (relative, against float64), comm (share of the time spent in communication), hidden (how
    much of it), what it keeps for the backward, and the busbw of the case's collective in GB/s. A column without any value
    is left out.
    """
    cases: dict[Case, list[Line]] = {}
    for line in compare(record.rows):
        cases.setdefault(line.case, []).append(line)
    return [_comparison(case, lines, record.rows) for case, lines in cases.items()]


def _comparison(case: Case, lines: list[Line], rows: list[Row]) -> Sheet:
    impls = impl_order(impl for line in lines for impl in line.rows)
    axis = Axis(line.shape for line in lines)
    columns = [Column(axis.name), *map(Column, (*impls, "error", "comm", "hidden", "kept", "kept sp", "GB/s"))]
    body = [
        [Cell(axis.label(line.shape), number(math.prod(size for _, size in line.shape)))]
        + [_time(line, impl) for impl in impls]
        + [*_crosscut_cells(line), cell(_collective_rate(line, rows), short)]
        for line in lines
    ]
    words = COMPARED + (KEPT if any("saved_bytes" in row.extra for row in rows) else "")
    return without_empty(Sheet(", ".join(filter(None, (case.title, axis.fixed))), words, columns, body))


def _time(line: Line, impl: str) -> Cell:
    row = line.rows.get(impl)
    if row is None:
        return Cell(MISSING)
    gain, time = speedup(row, line), p50(row)
    return Cell(MISSING if time is None else short(time), time, MISSING if gain is None else format_gain(gain))


def _crosscut_cells(line: Line) -> list[Cell]:
    row, own_tokens = line.rows.get("crosscut"), line.rows.get("crosscut_sp")
    extra, sp = ({} if r is None else r.extra for r in (row, own_tokens))
    shares = [cell(extra.get(name), _share) for name in ("comm_share", "hidden_share")]
    return [cell(row.error if row else None, power), *shares, nbytes(extra.get("saved_bytes")), nbytes(sp.get("saved_bytes"))]


def _share(share: float) -> str:
    return f"{share:.0%}" if share > 0 else "none"


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


def _size(row: Row) -> Cell:
    if row.bytes is not None and number(row.bytes) is not None:
        return nbytes(row.bytes)
    shape = row.shape or {}
    work = number(math.prod(shape.values())) if shape else None
    return Cell(", ".join(f"{name} {size}" for name, size in shape.items()) or MISSING, work)


def _percentile(name: str) -> Callable[[Row], Cell]:
    return lambda row: cell(getattr(row.us, name, None), short)


def _extra(name: str) -> Callable[[Row], Cell]:
    return lambda row: words(row.extra.get(name))


def _in_place(row: Row) -> Cell:
    """Where a collective puts its result: ``'in'`` or ``'out'`` of place."""
    given = row.extra.get("in_place")
    return Cell(MISSING) if given is None else words("in" if given else "out")


def _pair(row: Row) -> Cell:
    """``'0 to 1'``, or both ways at once ``'0 and 1'``."""
    src, dst = row.extra.get("src"), row.extra.get("dst")
    word = "and" if row.extra.get("direction") == "bi" else "to"
    return Cell(MISSING) if src is None or dst is None else words(f"{src} {word} {dst}")


COLUMNS: dict[Column, Callable[[Row], Cell]] = {
    Column("subject", False): lambda row: words(row.subject),
    Column("impl", False): lambda row: words(row.impl),
    **{Column(name, False): _extra(name) for name in ("split", "pass", "op", "redop")},
    Column("place", False): _in_place,
    Column("pair", False): _pair,
    Column("mode", False): lambda row: words(row.mode),
    Column("world"): lambda row: cell(row.world, short),
    Column("dtype", False): lambda row: words(row.dtype),
    Column("size", False): _size,
    **{Column(name): _percentile(name) for name in ("p10", "p50", "p90", "p99")},
    Column("algbw"): lambda row: cell(row.algbw_gbps, short),
    Column("busbw"): lambda row: cell(row.busbw_gbps, short),
    Column("wire"): lambda row: cell(row.extra.get("wire_gbps"), short),
    Column("wrong"): lambda row: cell(row.extra.get("wrong"), short),
    Column("error"): lambda row: cell(row.error, power),
    Column("path", False): lambda row: words(row.path),
    Column("note", False): lambda row: words(row.note),
}
HOISTED = ("subject", "mode", "world", "dtype", "split", "pass", "redop", "place")


def rows_sheet(record: RunRecord) -> Sheet:
    """Every measured row of a record: times in us; algbw, busbw and wire in GB/s. Pairs have a sheet of their own.

    Empty columns are left out, and what all of several rows share (mode, world, dtype, ...) moves into the title.
    """
    rows = [row for row in record.rows if row.subject not in (*DERIVED, "pair")]
    return sheet_of("All rows", LISTED, COLUMNS, rows, HOISTED)


def pairs_sheet(record: RunRecord) -> Sheet:
    """The rows of a pair matrix: what each two ranks reached alone."""
    return sheet_of("Pairs", PAIRED, COLUMNS, [row for row in record.rows if row.subject == "pair"], HOISTED)


def sheets(record: RunRecord) -> list[Sheet]:
    """All tables of a record that hold something: comparisons, conclusions, pairs, and last every row."""
    found = [*comparison_sheets(record), *summary_sheets(record.rows), pairs_sheet(record), rows_sheet(record)]
    return [sheet for sheet in found if sheet.rows]


def label(record: RunRecord) -> str:
    """``'2 x NVIDIA H200, 1a2b3c4d5e6f, 2026-01-02T03:04:05+00:00'``: what tells a record from others."""
    return ", ".join(filter(None, (record.hardware.label, record.commit, record.started)))


def table(record: RunRecord) -> RenderableType:
    """The record for a terminal of 100 columns: comparisons of a layer benchmark, else every row; conclusions; the notes."""
    measured = comparison_sheets(record) or [rows_sheet(record), pairs_sheet(record)]
    return printed([*(sheet for sheet in measured if sheet.rows), *summary_sheets(record.rows)], record.notes)


def printed(shown: list[Sheet], notes: Iterable[str]) -> RenderableType:
    """Sheets one below the other, then each of their captions once, then sentences."""
    parts: list[RenderableType] = [part for sheet in shown for part in (Text(sheet.title, style="bold"), drawn(sheet), Text())]
    captions = dict.fromkeys(sheet.caption for sheet in shown)
    return Group(*parts, *(Text(caption, style="dim") for caption in captions), *map(Text, notes))
