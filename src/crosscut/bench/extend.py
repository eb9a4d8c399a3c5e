"""More rows for a record of collectives: what other ranks measured, with fits, crossovers and verdicts over all of them.

NCCL with a forced choice and MPI each need ranks of their own, so their rows come after the main run. Whatever is derived
from rows (fits, crossovers, verdicts, whether all is right) is derived again from all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crosscut.bench.fit import summarise
from crosscut.bench.verdict import noisy
from crosscut.records import Row, RunRecord
from crosscut.units import format_size

DERIVED = ("fit", "crossover", "verdict")
"""Subjects of rows that are computed from others."""


def measured(record: RunRecord) -> list[Row]:
    """The rows of ``record`` that are not derived from others."""
    return [row for row in record.rows if row.subject not in DERIVED]


def extend(record: RunRecord, rows: Sequence[Row], notes: Sequence[str]) -> RunRecord:
    """``record`` with ``rows`` and ``notes`` after its own, all that is derived made anew, and wrong rows named in notes.

    Old sentences on verdicts, exactness and noise give way to new ones, which see all rows.
    """
    everything = [*measured(record), *rows]
    derived = summarise(everything, record.hardware.device, record.hardware.links)
    told = measured(record)
    before = {str(row.extra["text"]) for row in record.rows if row.subject == "verdict"} | {noisy(told), all_exact(told)}
    disturbed = noisy(everything)
    verdicts = [disturbed] if disturbed else [str(row.extra["text"]) for row in derived if row.subject == "verdict"]
    wrong = [wrong_sentence(row) for row in rows if row.extra.get("wrong")]
    correct = bool(record.config.get("correct", True)) and not wrong
    exact = [all_exact(everything)] if correct and everything else []
    return replace(
        record,
        config=record.config | {"correct": correct},
        rows=[*everything, *derived],
        notes=[*verdicts, *wrong, *exact, *(note for note in record.notes if note not in before), *notes],
    )


def all_exact(rows: Sequence[Row]) -> str:
    """The sentence of a run without a wrong element."""
    checked = sum(row.error is not None for row in rows)
    if not checked:
        return "What was measured has no result to check."
    return f"All {checked} results are exact, element by element, in calls that were timed."


def wrong_sentence(row: Row) -> str:
    """What is wrong in ``row`` and where: ``extra`` holds ``wrong`` and ``first_wrong``."""
    first = row.extra["first_wrong"]
    by = " ".join(filter(None, (row.impl, row.extra.get("forced"))))
    return (
        f"WRONG: {row.subject} by {by} ({row.mode}, {format_size(row.bytes or 0)}): {row.extra['wrong']} elements differ; the "
        f"first is element {first['index']} on rank {first['rank']}, {first['got']:g} instead of {first['expected']:g}."
    )
