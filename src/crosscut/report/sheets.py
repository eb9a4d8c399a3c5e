"""Tables as plain data, which a terminal (:func:`drawn`) and the web page (``page.html.j2``) both show.

Records come from other machines and older versions, so a missing or odd value is shown as it is and never stops a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from crosscut.records import Row
from crosscut.units import format_size

MISSING = "-"


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


def short(value: float) -> str:
    """A time or a rate in three digits, without an exponent: ``'0.25'``, ``'18.8'``, ``'1234'``, ``'<0.01'``, ``'0'``."""
    if value == 0:
        return "0"
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if abs(value) < 1 else f"{value:.3g}" if abs(value) < 99.95 else f"{value:.0f}"


def power(value: float) -> str:
    """An error with two digits: ``'2.1e-3'``."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def cell(value: Any, style: Callable[[float], str]) -> Cell:
    """A number in ``style``, or what was recorded in its place ('inf')."""
    finite = number(value)
    if finite is None:
        return Cell(MISSING if value is None else str(value))
    return Cell(style(finite), finite)


def words(value: Any) -> Cell:
    """Text as it is."""
    return Cell(MISSING) if value in (None, "") else Cell(str(value), str(value))


def nbytes(value: Any) -> Cell:
    """A number of bytes: ``'64 KiB'``."""
    return cell(value, format_size)


def sheet_of(
    title: str,
    caption: str,
    columns: dict[Column, Callable[[Row], Cell]],
    rows: Sequence[Row],
    hoisted: Collection[str] = (),
) -> Sheet:
    """A sheet with one line for each of ``rows``.

    Empty columns are left out. A column in ``hoisted`` whose cells all say the same moves into the title.
    """
    cells = [[make(row) for make in columns.values()] for row in rows]
    return hoist(without_empty(Sheet(title, caption, list(columns), cells)), hoisted)


def hoist(sheet: Sheet, names: Collection[str]) -> Sheet:
    """The sheet with those columns in ``names`` whose cells all say the same moved into the title."""
    shared = [i for i, column in enumerate(sheet.columns) if column.name in names and _shared(sheet, i)]
    facts = [f"{sheet.columns[i].name} {sheet.rows[0][i].text}" for i in shared]
    return replace(_keep(sheet, lambda i: i not in shared), title=", ".join([sheet.title, *facts]))


def _shared(sheet: Sheet, i: int) -> bool:
    return len(sheet.rows) > 1 and len({row[i] for row in sheet.rows}) == 1


def without_empty(sheet: Sheet) -> Sheet:
    """The sheet without the columns that hold nothing."""
    return _keep(sheet, lambda i: any(row[i].text != MISSING for row in sheet.rows))


def _keep(sheet: Sheet, wanted: Callable[[int], bool]) -> Sheet:
    kept = [i for i in range(len(sheet.columns)) if wanted(i)]
    rows = [[row[i] for i in kept] for row in sheet.rows]
    return replace(sheet, columns=[sheet.columns[i] for i in kept], rows=rows)


def drawn(sheet: Sheet) -> Table:
    """The sheet for a terminal; its title and caption are left to the caller."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in sheet.columns:
        shown.add_column(Text(column.name), justify="right" if column.numeric else "left", overflow="fold")
    for row in sheet.rows:
        shown.add_row(*map(_drawn_cell, row))
    return shown


def _drawn_cell(cell: Cell) -> Text:
    text = Text(cell.text)
    if cell.below:
        gain = number(cell.below.rstrip("x"))
        style = "dim" if gain is None else "green" if gain > 1 else "red"
        text.append(f"\n{'' if cell.below == MISSING else cell.below}", style=style)
    return text
