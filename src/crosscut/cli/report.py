"""``crosscut report RECORD.json ...``: one self-contained web page of records, with charts and tables.

The libraries that draw the page are imported when the command runs, so that ``crosscut --help`` stays instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Files = Annotated[
    list[Path],
    typer.Argument(help="Records that crosscut commands wrote; several are drawn side by side.", show_default=False),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="The page to write; an existing file is replaced.")]


def report(files: Files, out: Out = Path("report.html")) -> None:
    """Draw records as one HTML page: verdict, machine, charts, tables and the raw data. It opens without a network."""
    from crosscut.report.html import write

    typer.echo(str(write(files, out)))
