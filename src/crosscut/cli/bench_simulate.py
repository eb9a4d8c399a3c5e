"""``crosscut bench collectives --simulate``: the counted messages as a picture and a table, for someone who wants to see why.

The picture follows the chunks: one line for each step, one box for each rank, and in it how many ranks' values each chunk
already holds. It is plain text, so it can be pasted anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from crosscut.cli.ranks import deliver, load_numpy, run_on_ranks
from crosscut.errors import MismatchError
from crosscut.units import format_size, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from crosscut.bench.schedules import Message
    from crosscut.records import Row

WIDTH = 100
MOST_DRAWN = 9
"""A picture of more ranks would not fit into 100 columns."""
LEGEND = (
    "A box is one rank's chunks. A number: of how many ranks the chunk holds the sum; '.': the rank does not hold it; "
    "[ ]: it came in this step. 'c3>1': sends chunk 3 to rank 1; 'all': the whole tensor; 'each': to each rank its "
    "own chunk; '*': to all other ranks."
)
WHY = {
    "ring": "Why a ring: in every step each rank sends one chunk of S/n to its neighbour, so no link rests and none carries "
    "more than another. More ranks mean more steps of smaller chunks: the bytes of a rank hardly grow, the waits do.",
    "tree": "Why a tree: the number of steps grows with the logarithm of n, so it is quick for small tensors. But a rank "
    "with two children sends the whole tensor up to three times, and half of the ranks only once.",
    "one-shot": "Why one-shot: a single step, the fewest waits there can be. For an all-reduce each rank sends everything "
    "to everyone, (n-1) x S, which only pays for small tensors.",
    "two-shot": "Why two-shot: each rank sums one chunk for all, then sends the sum to all. It moves as few bytes as a "
    "ring, in two steps instead of 2(n-1), but every rank must reach every other one directly.",
}


def simulate(algorithm: str, op: str, world: int, size: str, json: bool, out: Path | None) -> None:
    """Run ``op`` by ``algorithm`` over ``world`` CPU ranks on ``size`` ('1M') bytes and show what was sent.

    Raises UsageError (``bad-option``, ``bad-size``) before any rank starts, MismatchError (``result-differs``) after the
    output when an element of the result is wrong.
    """
    load_numpy()
    from crosscut.bench.schedules import check
    from crosscut.bench.simulate import SimulateConfig, refuse
    from crosscut.bench.simulate import simulate as run

    nbytes = parse_size(size)
    check(algorithm, op, world, nbytes)
    config = SimulateConfig(algorithm, op, world, nbytes)
    refuse(config)
    record = run_on_ranks(run, config, world, "gloo", "cpu", out)
    if record is None:
        return
    row = record.rows[0]
    if json:
        deliver(record, json, out)
    else:
        if out is not None:
            record.write(out)
        show(row, record.notes)
        if out is not None:
            typer.echo(f"record: {out}")
    if row.extra["wrong"]:
        raise MismatchError(
            f"{row.extra['wrong']} elements of the result are wrong (see above)",
            code="result-differs",
            fix="please report it with the record (--json)",
        )


def show(row: Row, notes: list[str]) -> None:
    """Print the picture, the table and ``notes``."""
    import sys

    from rich.console import Console
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for line in [*picture(row), ""]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table(row))
    for text in [*notes, WHY[row.impl]]:
        console.print(Text(text))


def picture(row: Row) -> list[str]:
    """The steps as lines of text of at most 100 columns; one sentence instead for more than :data:`MOST_DRAWN` ranks."""
    from crosscut.bench.schedules import holdings, schedule

    world, op = row.world, row.extra["op"]
    assert row.bytes is not None, "a simulation has a size"
    title = f"{row.impl} {op}: {format_size(row.bytes)} in {world} chunks of {format_size(row.bytes / world)}"
    if world > MOST_DRAWN:
        return [title, f"(a picture is drawn for up to {MOST_DRAWN} ranks)"]
    steps = schedule(row.impl, op, world, row.bytes)
    states = holdings(steps, op, world)
    wide = 10 + world * (3 * world + 2) <= WIDTH
    column = 3 * world + 2 if wide else max(world + 1, 8)

    def line(head: str, cells: list[str]) -> str:
        return f"{head:<10}{''.join(f'{cell:<{column}}' for cell in cells)}".rstrip()

    def boxes(state: list[list[int]], step: list[Message]) -> list[str]:
        came = {(m.dst, chunk) for m in step for chunk in range(m.first, m.end)}
        return [_box(chunks, [(rank, chunk) in came for chunk in range(world)], wide) for rank, chunks in enumerate(state)]

    lines = [title, "", line("", [f"rank {rank}" for rank in range(world)]), line("start", boxes(states[0], []))]
    for number, (step, state) in enumerate(zip(steps, states[1:], strict=True), start=1):
        lines.append(line("  sends", [_sends([m for m in step if m.src == rank], world) for rank in range(world)]))
        lines.append(line(f"step {number}", boxes(state, step)))
    return [*lines, "", *_wrapped(LEGEND)]


def _box(chunks: list[int], came: list[bool], wide: bool) -> str:
    numbers = [str(held) if held else "." for held in chunks]
    if not wide:
        return "".join(numbers)
    return "".join(f"[{number}]" if new else f" {number} " for number, new in zip(numbers, came, strict=True))


def _sends(messages: list[Message], world: int) -> str:
    """``'c3>1'``, ``'all>1,2'``, ``'each>*'``; ``'-'`` for a rank that sends nothing."""
    if not messages:
        return "-"
    parts = {(message.first, message.end) for message in messages}
    first, end = next(iter(parts))
    what = "each" if len(parts) > 1 else "all" if end - first == world else f"c{first}"
    everyone = world > 2 and len(messages) == world - 1
    return f"{what}>{'*' if everyone else ','.join(str(message.dst) for message in messages)}"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH)


def table(row: Row) -> Table:
    """One line for each rank: its messages, its bytes each way, and what the formula says of the busiest rank."""
    from rich import box
    from rich.table import Table

    extra = row.extra
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in ("rank", "messages", "sent", "received", "formula", "in words"):
        shown.add_column(name, justify="left" if name == "in words" else "right", overflow="fold")
    theory = extra["formula"]
    messages = [message for step in extra["steps"] for message in step]
    for rank, (sent, received) in enumerate(zip(extra["sent"], extra["received"], strict=True)):
        count = sum(message["src"] == rank for message in messages)
        said = (format_size(theory["bytes_per_rank"]), theory["text"]) if rank == 0 else ("", "")
        shown.add_row(str(rank), str(count), format_size(sent), format_size(received), *said)
    return shown
