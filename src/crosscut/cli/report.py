"""``crosscut report RECORD.json ...``: one self-contained web page of records, with charts and tables.

The libraries that draw the page are imported when the command runs, so that ``crosscut --help`` stays instant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from crosscut.errors import UsageError

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECORD.json...",
        help="Records that crosscut commands wrote; several are drawn side by side.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="The page to write; an existing file is replaced. By default report.html.", show_default=False
    ),
]
Compare = Annotated[
    bool,
    typer.Option("--compare", help="Print the first record next to each other one: what is faster, beyond the spread."),
]


def report(files: Files, out: Out = None, compare: Compare = False) -> None:
    """Draw records as one HTML page: verdict, machine, charts, comparison, tables and the raw data. It opens without a network.

    With --compare a table is printed instead, and the page is written only when --out names it.
    """
    if compare:
        _print_comparison(files)
    if out is not None or not compare:
        from crosscut.report.html import write

        typer.echo(str(write(files, out or Path("report.html"))))


def _print_comparison(files: list[Path]) -> None:
    """One table for each record after the first. Raises UsageError (``bad-option``) when there is none."""
    if len(files) < 2:
        raise UsageError(
            f"--compare needs two records or more, not {len(files)}",
            code="bad-option",
            fix="crosscut report BEFORE.json AFTER.json --compare",
        )
    from rich.console import Console

    from crosscut.report.compare import compare_records, comparison_sheet, sentences
    from crosscut.report.html import load
    from crosscut.report.tables import printed

    records, labels = load(files)
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=120, highlight=False)
    for record, label in zip(records[1:], labels[1:], strict=True):
        comparison = compare_records(records[0], record)
        sheets = [comparison_sheet(comparison)] if comparison.matches else []
        console.print(printed(sheets, sentences(comparison, [labels[0], label])))
