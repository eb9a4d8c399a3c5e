"""What was concluded from a record's rows, as tables: verdicts, fits, crossovers, and the counts of simulated algorithms.

``bench/fit.py`` and ``bench/simulate.py`` make these rows; docs/records.md describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crosscut.records import Row
from crosscut.report.sheets import MISSING, Cell, Column, Sheet, cell, nbytes, number, sheet_of, short, words
from crosscut.units import format_size

DERIVED = ("verdict", "fit", "crossover", "simulate", "memory")
"""Subjects of rows that have a table of their own: conclusions, counts and bytes, not times of one call."""
HOISTED = ("size", "mode", "world", "dtype", "redop")


def extra(name: str, show: Callable[[object], Cell] = words) -> Callable[[Row], Cell]:
    """A reader of ``row.extra[name]``."""
    return lambda row: show(row.extra.get(name))


def _with_error(name: str) -> Callable[[Row], Cell]:
    """A fitted number with its standard error: ``'11.3 ± 0.6'``."""

    def show(row: Row) -> Cell:
        value, error = number(row.extra.get(f"{name}_us", row.extra.get(name))), number(row.extra.get(f"{name}_err"))
        if value is None:
            return Cell(MISSING)
        return Cell(short(value) if error is None else f"{short(value)} ± {short(error)}", value)

    return show


def _span(row: Row) -> Cell:
    low, high = (number(row.extra.get(name)) for name in ("from_bytes", "to_bytes"))
    return Cell(MISSING) if low is None or high is None else Cell(f"{format_size(low)} to {format_size(high)}", low)


def _count(row: Row) -> Cell:
    return cell(sum(map(len, messages(row))) or None, short)


def _steps(row: Row) -> Cell:
    return cell(len(messages(row)) or None, short)


def _most(name: str) -> Callable[[Row], Cell]:
    """The largest of a list of bytes, one a rank."""

    def show(row: Row) -> Cell:
        given = row.extra.get(name)
        values = [number(value) for value in given] if isinstance(given, list) else []
        return nbytes(max((value for value in values if value is not None), default=None))

    return show


def _formula(row: Row) -> Cell:
    given = row.extra.get("formula")
    if not isinstance(given, dict):
        return Cell(MISSING)
    return Cell(f"{given.get('text', '')} = {nbytes(given.get('bytes_per_rank')).text}", number(given.get("bytes_per_rank")))


def _sizes(row: Row) -> Cell:
    return words(", ".join(f"{name} {size}" for name, size in (row.shape or {}).items()))


def _share(row: Row, name: str) -> Cell:
    """The measured bytes in percent of a formula's."""
    whole, part = number(row.extra.get(name)), number(row.bytes)
    return Cell(MISSING) if not whole or part is None else Cell(f"{part / whole:.1%}", part / whole)


def messages(row: Row) -> list[list[tuple[int, int, float]]]:
    """The messages of a simulated algorithm by step, each (source, destination, bytes); odd ones are left out."""
    given = row.extra.get("steps")
    steps = [step for step in given if isinstance(step, list)] if isinstance(given, list) else []
    return [[sent for sent in map(_message, step) if sent] for step in steps]


def _message(given: object) -> tuple[int, int, float] | None:
    if not isinstance(given, dict):
        return None
    src, dst, size = given.get("src"), given.get("dst"), number(given.get("bytes"))
    return (src, dst, size) if isinstance(src, int) and isinstance(dst, int) and size is not None else None


_COMMON: dict[Column, Callable[[Row], Cell]] = {
    Column("mode", False): lambda row: words(row.mode),
    Column("world"): lambda row: cell(row.world, short),
    Column("dtype", False): lambda row: words(row.dtype),
}
_OP: dict[Column, Callable[[Row], Cell]] = {Column("op", False): extra("op")}
_REDOP: dict[Column, Callable[[Row], Cell]] = {Column("redop", False): extra("redop")}
SHEETS: dict[str, tuple[str, str, dict[Column, Callable[[Row], Cell]]]] = {
    "verdict": (
        "Verdicts",
        "The best bus bandwidth next to what the same hardware is known to reach; good from 90 % on.",
        {
            **_OP,
            Column("level", False): extra("level"),
            Column("%"): extra("percent", lambda value: cell(value, short)),
            Column("verdict", False): extra("text"),
            Column("source", False): extra("source"),
        },
    ),
    "fit": (
        "Latency and rate",
        "time = alpha + size / rate, fitted on the relative error, with standard errors. Below the half size latency rules, "
        "above it bandwidth: there alpha and the transfer take equally long. Two lines where one does not fit.",
        {
            **_OP,
            **_REDOP,
            Column("impl", False): lambda row: words(row.impl),
            **_COMMON,
            Column("sizes", False): _span,
            Column("alpha us"): _with_error("alpha"),
            Column("GB/s"): _with_error("gbps"),
            Column("r2"): extra("r2", lambda value: cell(value, "{:.4f}".format)),
            Column("half size"): extra("half_bytes", nbytes),
            Column("points"): extra("points", lambda value: cell(value, short)),
        },
    ),
    "crossover": (
        "Crossovers",
        "Below the size the first is faster, above it the second; only where the spans from p10 to p90 lie apart.",
        {
            **_OP,
            **_REDOP,
            **_COMMON,
            Column("faster below", False): extra("below"),
            Column("size"): extra("bytes", nbytes),
            Column("faster above", False): extra("above"),
        },
    ),
    "memory": (
        "Kept for the backward",
        "Bytes of one layer on one rank: measured, by the terms of docs/memory.md, and by arXiv 2205.05198 without the "
        "attention matrix, which SDPA never keeps. peak: what one more layer adds to the GPU's peak.",
        {
            Column("size", False): _sizes,
            Column("impl", False): lambda row: words(row.impl),
            **_COMMON,
            Column("measured"): lambda row: nbytes(row.bytes),
            Column("terms"): extra("derived_bytes", nbytes),
            Column("of terms"): lambda row: _share(row, "derived_bytes"),
            Column("paper"): extra("paper_bytes", nbytes),
            Column("of paper"): lambda row: _share(row, "paper_bytes"),
            Column("peak"): extra("peak_bytes", nbytes),
            Column("note", False): lambda row: words(row.note),
        },
    ),
    "simulate": (
        "Simulated algorithms",
        "Counted while the algorithm ran: steps, messages, and the bytes of the rank that sent or received most. S is the size "
        "of the whole tensor, n the number of ranks.",
        {
            Column("algorithm", False): lambda row: words(row.impl),
            **_OP,
            Column("world"): lambda row: cell(row.world, short),
            Column("size"): lambda row: nbytes(row.bytes),
            Column("steps"): _steps,
            Column("messages"): _count,
            Column("sent"): _most("sent"),
            Column("received"): _most("received"),
            Column("formula", False): _formula,
        },
    ),
}


def summary_sheets(rows: Sequence[Row]) -> list[Sheet]:
    """One sheet for each kind of conclusion that ``rows`` hold."""
    found = [(SHEETS[subject], [row for row in rows if row.subject == subject]) for subject in DERIVED]
    return [sheet_of(title, caption, columns, of, HOISTED) for (title, caption, columns), of in found if of]
