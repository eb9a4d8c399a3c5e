"""From rows to sentences: does the split pay, from which size on, and is every result right. Pure functions of rows."""

from __future__ import annotations

from collections.abc import Sequence

from crosscut.records import Row
from crosscut.units import ROUNDOFF, format_us


def allowed_error(dtype: str, unsplit: float, world: int) -> float:
    """The largest relative error of a right split result: each of ``world`` partial sums may round once more.

    Roundings add up like the square root of their number; the factor 4 is slack. A rank left out gives 0.3 and more.
    """
    return 4 * max(unsplit, ROUNDOFF[dtype]) * world**0.5


def label(shape: dict[str, int]) -> str:
    """``'32 x 4096 -> 8192'``, or for the pair ``'32 x 4096 -> 14336 -> 4096'``."""
    if "ffn" in shape:
        return f"{shape['tokens']} x {shape['hidden']} -> {shape['ffn']} -> {shape['hidden']}"
    return f"{shape['tokens']} x {shape['in']} -> {shape['out']}"


def speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """Time of one device over the time of ``row``, same subject, shape and mode; None where either is missing."""
    for single in rows:
        same = (single.impl, single.subject, single.shape, single.mode) == ("single", row.subject, row.shape, row.mode)
        if same and single.us and row.us:
            return single.us.p50 / row.us.p50
    return None


def pays_from(impl: str, mode: str, rows: Sequence[Row]) -> str:
    """One sentence: from which size on the split ``impl`` is faster than one device in ``mode``."""
    cases = []
    for row in rows:
        gain = speedup(row, rows) if row.impl == impl and row.mode == mode else None
        if gain is not None and row.us is not None and row.shape is not None:
            cases.append((row.us.p50 * gain, gain, label(row.shape)))
    if not cases:
        return f"{impl} was not measured in {mode} mode."
    cases.sort()
    paying = 0
    for _, gain, _ in reversed(cases):
        if gain < 1:
            break
        paying += 1
    best = max(cases, key=lambda case: case[1])
    top = f"best {best[1]:.2f}x at {best[2]}"
    if best[1] < 1:
        return f"In {mode} mode the {impl} split does not pay at any size measured ({top})."
    if paying == 0:
        where = ", ".join(name for _, gain, name in cases if gain >= 1)
        return f"In {mode} mode the {impl} split pays at some sizes only, and not at the largest: {where} ({top})."
    if paying == len(cases):
        return f"In {mode} mode the {impl} split pays at every size measured ({top})."
    first = cases[-paying]
    worst = min(cases, key=lambda case: case[1])
    return (
        f"In {mode} mode the {impl} split pays from {first[2]} on, where one device takes {format_us(first[0])} "
        f"({top}; below that, as little as {worst[1]:.2f}x)."
    )


def noisy(rows: Sequence[Row]) -> str | None:
    """A sentence when the samples of many cases spread by more than a factor of two; None for a quiet run.

    Judged by the cases without communication where there are any: ranks that wait for each other spread by nature,
    gloo's on a few cores most of all.
    """
    quiet = [row.us for row in rows if row.us is not None and row.impl in ("single", "no_comm")]
    timed = quiet or [row.us for row in rows if row.us is not None]
    wide = [us for us in timed if us.p90 > 2 * us.p10]
    if len(wide) * 5 <= len(timed):
        return None
    return (
        f"This run is noisy: in {len(wide)} of {len(timed)} cases the slow samples (p90) took more than twice as long as "
        "the fast ones (p10). Something else was running, so there is no verdict: measure again."
    )


def wrong_results(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row whose error is larger than rounding explains; empty when all results are right."""
    found = []
    for row in rows:
        if row.error is None or row.shape is None or row.impl == "single":
            continue
        unsplit = next(
            (r.error for r in rows if r.impl == "single" and (r.subject, r.shape) == (row.subject, row.shape) and r.error),
            0.0,
        )
        allowed = allowed_error(row.dtype, unsplit, row.world)
        if not row.error <= allowed:
            found.append(
                f"{row.impl} ({row.mode}) at {label(row.shape)}: relative error {row.error:.3g}, "
                f"rounding in {row.dtype} explains {allowed:.3g}"
            )
    return found
