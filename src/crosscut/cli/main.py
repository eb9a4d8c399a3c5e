"""``crosscut``: the program. One place turns errors into one message and an exit code: 0 done, 1 failed, 2 a user's mistake.

The commands are imported inside :func:`main`, so that a Ctrl-C while they load is caught as well.
"""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from crosscut.env import quiet_torch, rank_env, settings
from crosscut.errors import CrosscutError, RankError, UsageError

TYPER_INTERRUPTED = 130
"""The exit code that typer makes of a KeyboardInterrupt."""


def main() -> None:
    """Entry of the console script."""
    try:
        _ready_streams()
        quiet_torch()
        settings()
        from crosscut.cli.app import app

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


def _ready_streams() -> None:
    """Have all three streams (``>&-`` closes one, whose number a pipe to the ranks would take), and let them take any text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            lowest = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest, True)
            setattr(sys, name, os.fdopen(lowest, mode))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python sets standard error


def _stopped() -> NoReturn:
    """The end by Ctrl-C of what has no ranks, with the words and the exit code of what has."""
    error = RankError("the run was ended by SIGINT", code="interrupted")
    tell(error)
    sys.exit(error.exit_code)


def tell(error: CrosscutError) -> None:
    """Write an error for people: what happened, its code, and what to do."""
    from rich.console import Console

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
