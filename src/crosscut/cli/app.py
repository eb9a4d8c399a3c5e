"""The commands of ``crosscut``, put together."""

from __future__ import annotations

import typer

from crosscut.cli.bench import bench
from crosscut.cli.convert import convert
from crosscut.cli.plan import plan
from crosscut.cli.report import report
from crosscut.cli.tune import tune
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
