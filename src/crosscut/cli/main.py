"""``crosscut``: the program. One place turns errors into one message and an exit code: 0 done, 1 failed, 2 a user's mistake."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from crosscut.cli.bench import bench
from crosscut.cli.convert import convert
from crosscut.cli.plan import plan
from crosscut.cli.report import report
from crosscut.cli.tune import tune
from crosscut.env import quiet_torch, rank_env, settings
from crosscut.errors import CrosscutError
from crosscut.version import __version__

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
        Console(stderr=True).print("[bold red]stopped[/] by Ctrl-C")
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        sys.stderr.close()
        sys.exit(1)


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
