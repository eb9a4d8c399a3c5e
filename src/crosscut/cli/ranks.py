"""What commands that start ranks share: their flags, and progress on standard error for anything over three seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from crosscut.env import settings
from crosscut.errors import UsageError, choose
from crosscut.records import check_target

if TYPE_CHECKING:
    from crosscut.records import RunRecord

T = TypeVar("T")

Tp = Annotated[int, typer.Option("--tp", min=1, help="How many ranks take part (tensor parallel size).")]
Backend = Annotated[str, typer.Option("--backend", help="How ranks talk: auto, nccl or gloo.")]
Device = Annotated[str, typer.Option("--device", help="Where they compute: auto, cuda or cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record (JSON) instead of the table.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Also write the record to this file.", show_default=False)]

QUIET_SECONDS = 3.0


def refuse(ctx: typer.Context, why: str, *unused: str) -> None:
    """Raise UsageError (``bad-option``) for those of the parameters ``unused`` that were typed and would be ignored."""
    typed = []
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name in unused and source is not None and source.name == "COMMANDLINE":
            off = ctx.params[parameter.name] is False and parameter.secondary_opts
            typed.append((parameter.secondary_opts if off else parameter.opts)[0])
    if typed:
        raise UsageError(f"{why} {', '.join(typed)}", code="bad-option", fix=f"leave {' and '.join(typed)} out")


def load_numpy() -> None:
    """Load numpy ahead of torch: in torch's own import of it a Ctrl-C is swallowed, and the command would go on."""
    import numpy  # noqa: F401


def run_on_ranks(fn: Callable[..., T], config: Any, tp: int, backend: str, device: str, out: Path | None = None) -> T | None:
    """Call ``fn(ctx, config)`` on ``tp`` ranks, started here or joined; rank 0's result, None on other ranks.

    ``out``: where the caller will write the result. Raises UsageError (``bad-option``, ``file-missing``) on an unknown
    backend or device or a place that cannot be written, before anything starts; and what the ranks raise.
    """
    if out is not None:
        check_target(out)
    choose("backend", backend, ("auto", "nccl", "gloo"))
    choose("device", device, ("auto", "cuda", "cpu"))
    from crosscut.distributed.launch import LaunchConfig, run

    with _Shown() as shown:
        return run(fn, (config,), LaunchConfig(tp, backend, device, timeout=settings().timeout), shown.report)


def deliver(record: RunRecord, json: bool, out: Path | None) -> None:
    """Print the record or its table, and write it where the user asked."""
    if out is not None:
        record.write(out)
    if json:
        typer.echo(record.to_json(), nl=False)
        return
    from rich.console import Console

    from crosscut.report.tables import table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table(record))
    if out is not None:
        console.print(f"record: {out}", highlight=False, markup=False, soft_wrap=True)


class _Shown:
    """Progress: a bar on a terminal, a line every few seconds elsewhere, nothing at all in the first three seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, fraction: float, text: str) -> None:
        """Show that ``fraction`` of the work is done; called from the launcher's thread."""
        now = time.monotonic()
        if now - self._start < QUIET_SECONDS:
            return
        if sys.stderr.isatty():
            self._on_terminal(fraction, text)
        elif now - self._last >= QUIET_SECONDS:
            self._last = now
            typer.echo(f"{fraction:4.0%}  {text}", err=True)

    def _on_terminal(self, fraction: float, text: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(text, total=1.0)
            self._bar.start()
        self._bar.update(self._task, completed=fraction, description=text)
