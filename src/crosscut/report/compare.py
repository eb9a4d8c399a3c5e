"""Two records compared row by row: before and after, machine A and machine B.

Rows that measured the same thing are matched, and their medians divided. A ratio is called *faster* or *slower* only when
the spans from p10 to p90 of the two do not overlap; anything else is *not told apart*. Limits of that rule, which the page
repeats: it tells two runs apart, not two causes. All samples of a run share its clocks, its placement and its neighbours,
so a run that is wholly 3 % slower looks significant; repeat both runs before believing a small ratio. And a real
difference that is smaller than the spread is not seen.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from crosscut.records import Row, RunRecord
from crosscut.report.sheets import MISSING, Cell, Column, Sheet, cell, hoist, number, p50, short, without_empty, words
from crosscut.report.summary import DERIVED
from crosscut.report.tables import COLUMNS, HOISTED

SAME_THING = ("split", "pass", "redop", "in_place", "root", "cold", "op", "direction", "src", "dst", "shape_of")
"""Entries of ``extra`` that say what was measured, beside the fields of a row."""
RULE = (
    "Ratio: median time of A over that of B, above 1 B is faster. Faster and slower: the spans from p10 to p90 do not overlap. "
    "The rule tells two runs apart, not two causes: samples of a run share its clocks and neighbours, so repeat both runs "
    "before you believe a small ratio; and a difference below the spread is not seen. The largest effects come first."
)
ORDER = ("faster", "slower", "not told apart")


class Match(NamedTuple):
    """The same thing in both records: how many times faster B was, and whether that can be told."""

    a: Row
    b: Row
    ratio: float
    outcome: str
    """faster, slower (B, beyond the spread) or not told apart."""


@dataclass(frozen=True)
class Comparison:
    """Matches with the surest and largest first, and how many timed rows have no counterpart."""

    matches: list[Match]
    only_a: int
    only_b: int
    differences: list[str]
    """What else differs between the records: hardware, versions, commit."""

    @property
    def summary(self) -> str:
        """One sentence: how many rows are faster, slower, not told apart, and without a counterpart."""
        if not self.matches:
            return "No timed row of one record has a counterpart in the other."
        counts = Counter(match.outcome for match in self.matches)
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER)
        typical = math.exp(sum(math.log(match.ratio) for match in self.matches) / len(self.matches))
        rest = f"; {self.only_a} rows only in A, {self.only_b} only in B" if self.only_a or self.only_b else ""
        return f"B against A, {len(self.matches)} rows that measured the same: {told}; geometric mean {typical:.2f}x{rest}."


def compare_records(a: RunRecord, b: RunRecord) -> Comparison:
    """Match the timed rows of two records and judge each match by :data:`RULE`."""
    rows_a, rows_b = _timed(a), _timed(b)
    found = [match for key in rows_a if key in rows_b and (match := _match(rows_a[key], rows_b[key]))]
    found.sort(key=lambda match: (match.outcome == ORDER[2], -round(abs(math.log(match.ratio)), 2)))
    return Comparison(found, len(rows_a) - len(found), len(rows_b) - len(found), differences(a, b))


def _timed(record: RunRecord) -> dict[str, Row]:
    """The rows that have a median, by what they measured. Where several measured the same, their path tells them apart."""
    rows = [row for row in record.rows if row.subject not in DERIVED and p50(row) is not None]
    often = Counter(_key(row) for row in rows)
    found: dict[str, Row] = {}
    for row in rows:
        key = _key(row)
        found.setdefault(key if often[key] == 1 else f"{key} {row.path}", row)
    return found


def _key(row: Row) -> str:
    parts = [row.subject, row.impl, row.mode, row.world, row.dtype, row.shape, row.bytes]
    return json.dumps([*parts, *(row.extra.get(name) for name in SAME_THING)], sort_keys=True, default=str)


def _match(a: Row, b: Row) -> Match | None:
    """The judged match; None when the times are so far apart that no ratio can be told."""
    ratio = (p50(a) or 0.0) / (p50(b) or math.inf)
    if not 0 < ratio < math.inf:
        return None
    return Match(a, b, ratio, (ORDER[0] if ratio > 1 else ORDER[1]) if _apart(a, b) else ORDER[2])


def _apart(a: Row, b: Row) -> bool:
    """Whether the spans from p10 to p90 do not overlap; False when one of them is not known."""
    ends = [number(getattr(row.us, name, None)) for row in (a, b) for name in ("p10", "p90")]
    if None in ends:
        return False
    low_a, high_a, low_b, high_b = (end or 0.0 for end in ends)
    return high_a < low_b or high_b < low_a


def differences(a: RunRecord, b: RunRecord) -> list[str]:
    """What else differs, as short texts: ``'torch 2.11.0 and 2.13.0'``."""
    facts: list[tuple[str, Any, Any]] = [
        ("device", a.hardware.device, b.hardware.device),
        ("count", a.hardware.count, b.hardware.count),
        ("links", _links(a), _links(b)),
        ("driver", a.hardware.driver, b.hardware.driver),
        *((name, a.versions.get(name), b.versions.get(name)) for name in {**a.versions, **b.versions}),
        ("commit", a.commit, b.commit),
    ]
    return [f"{name} {_known(x)} and {_known(y)}" for name, x, y in facts if x != y]


def _links(record: RunRecord) -> str:
    """The kinds of links between different devices."""
    kinds = {str(link) for i, row in enumerate(record.hardware.links) for j, link in enumerate(row) if i != j}
    return ", ".join(sorted(kinds)) or "none"


def _known(value: Any) -> str:
    return "not known" if value is None else str(value)


def comparison_sheet(comparison: Comparison) -> Sheet:
    """The matches as a table: what was measured, both medians with their spans below, ratio, outcome."""
    listed = ("subject", "impl", "split", "op", "redop", "pair", "place", "mode", "world", "dtype", "size")
    what: dict[Column, Callable[[Row], Cell]] = {column: make for column, make in COLUMNS.items() if column.name in listed}
    columns = [*what, Column("A us"), Column("B us"), Column("ratio"), Column("B is", False)]
    body = [[*(make(match.a) for make in what.values()), *_compared(match)] for match in comparison.matches]
    return hoist(without_empty(Sheet("Rows of both records", RULE, columns, body)), HOISTED)


def _compared(match: Match) -> list[Cell]:
    return [_time(match.a), _time(match.b), cell(match.ratio, "{:.2f}x".format), words(match.outcome)]


def _time(row: Row) -> Cell:
    """The median, and below it the span from p10 to p90."""
    low, high = (number(getattr(row.us, name, None)) for name in ("p10", "p90"))
    span = MISSING if low is None or high is None else f"{short(low)}–{short(high)}"
    return cell(p50(row), short)._replace(below=span)


def sentences(comparison: Comparison, labels: Sequence[str]) -> list[str]:
    """The summary, which record is which, and what else differs."""
    named = [f"A: {labels[0]}", f"B: {labels[1]}"]
    other = [f"They also differ in {'; '.join(comparison.differences)}."] if comparison.differences else []
    return [comparison.summary, *named, *other]
