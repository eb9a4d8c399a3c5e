"""``crosscut tune``: measure on this machine from which size on NCCL is faster than crosscut's kernels, and keep the result.

The table that it keeps is the one that every later run on the same machine reads (collectives/select.py).
"""

from __future__ import annotations

import typer

from crosscut.cli.ranks import Json, Out, Tp, deliver, load_numpy, run_on_ranks


def tune(tp: Tp = 2, json: Json = False, out: Out = None) -> None:
    """Measure every collective, size and algorithm next to NCCL, and keep which is fastest where.

    Needs NVIDIA GPUs of one host that are linked by NVLink, one for each rank.
    """
    load_numpy()
    from crosscut.bench.tune import TuneConfig, run

    record = run_on_ranks(run, TuneConfig(tp), tp, "auto", "auto", out)
    if record is None:
        return
    if json:
        deliver(record, json, out)
        return
    if out is not None:
        record.write(out)
    for note in record.notes:
        typer.echo(note)
    if out is not None:
        typer.echo(f"record: {out}")
