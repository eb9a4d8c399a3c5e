"""``crosscut bench``: measurements, one command for each subject."""

from __future__ import annotations

import typer

from crosscut.cli.bench_collectives import collectives
from crosscut.cli.bench_layers import block, linear, mlp

bench = typer.Typer(help="Measure layers and collectives, with every result checked in the same run.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure layers and collectives, with every result checked in the same run."""


for command in (linear, mlp, block, collectives):
    bench.command()(command)
