"""``crosscut convert``: a GGUF file of a Llama model as a Hugging Face directory, which every other command reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    gguf: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="The GGUF file of a Llama model.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write; it must be new or empty.")],
    dtype: Annotated[str, typer.Option(help="Stored as: float32 (exact), float16 or bfloat16.")] = "float32",
) -> None:
    """Convert a GGUF file of a Llama model into a Hugging Face directory (weights, config and tokenizer)."""
    from rich.console import Console
    from rich.progress import Progress

    from crosscut.models.gguf import convert as convert_file

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)

        def show(done: int, total: int, name: str) -> None:
            progress.update(task, description=name, completed=done, total=total)

        directory = convert_file(gguf, out, dtype, show)
    typer.echo(str(directory))
