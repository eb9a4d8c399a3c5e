"""``crosscut``: the program. One place turns errors into one message and an exit code: 0 done, 1 failed, 2 a user's mistake."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

import typer
from rich.console import Console

from crosscut.cli.bench import bench
from crosscut.cli.convert import convert
from crosscut.cli.plan import plan
from crosscut.cli.report import report
from crosscut.cli.tune import tune
from crosscut.env import quiet_torch, rank_env, settings
from crosscut.errors import CrosscutError, RankError, UsageError
from crosscut.version import __version__

TYPER_INTERRUPTED = 130
"""The exit code that typer makes of a KeyboardInterrupt."""

app = typer.Typer(
    name="crosscut",
    help="Split a layer or a model over several GPUs, prove the answer equal, and see whether it pays.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.command()(plan)
app.command()(tune)
app.command()(report)
app.command()(convert)


@app.callback(invoke_without_command=True)
def crosscut(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"crosscut {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry of the console script."""
    try:
        quiet_torch()
        settings()
        app()
    except CrosscutError as error:
        tell(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _stopped()
    except SystemExit as ended:
        if ended.code != TYPER_INTERRUPTED:
            raise
        _stopped()
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail once more at exit
        tell(UsageError(f"the output cannot be written: {error.strerror}", code="bad-option", fix="make room for it"))
        sys.exit(UsageError.exit_code)


def _stopped() -> NoReturn:
    """The end by Ctrl-C of what has no ranks, with the words and the exit code of what has."""
    error = RankError("the run was ended by SIGINT", code="interrupted")
    tell(error)
    sys.exit(error.exit_code)


def tell(error: CrosscutError) -> None:
    """Write an error for people: what happened, its code, and what to do."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"{_who()}[bold red]error:[/] ", end="")
    console.print(error.message, markup=False, end="")
    console.print(f" \\[{error.code}]", style="dim")
    if error.fix:
        console.print("[bold]what to do:[/] ", end="")
        console.print(error.fix, markup=False)


def _who() -> str:
    """In ranks that another launcher started, which one speaks."""
    try:
        env = rank_env()
    except CrosscutError:  # the very error that is being told
        return ""
    return "" if env is None else f"\\[rank {env.rank}] "
