"""From rows to sentences: does the split pay, from which size on, and is every result right. Pure functions of rows."""

from __future__ import annotations

from collections.abc import Sequence

from crosscut.records import Row
from crosscut.units import ROUNDOFF, format_gain, format_size, format_us


def allowed_error(dtype: str, unsplit: float, world: int) -> float:
    """The largest relative error of a right split result: each of ``world`` partial sums may round once more.

    Roundings add up like the square root of their number; the factor 4 is slack. A rank left out gives 0.3 and more.
    """
    return 4 * max(unsplit, ROUNDOFF[dtype]) * world**0.5


def label(shape: dict[str, int]) -> str:
    """``'32 x 4096 -> 8192'``, the pair ``'32 x 4096 -> 14336 -> 4096'``, a block ``'1 x 4096 (32/8 heads, ffn 14336)'``."""
    if "heads" in shape:
        batch = f"{shape['batch']} x " if "batch" in shape else ""
        heads = f"{shape['heads']}/{shape['kv_heads']} heads"
        return f"{batch}{shape['tokens']} x {shape['hidden']} ({heads}, ffn {shape['ffn']})"
    if "ffn" in shape:
        return f"{shape['tokens']} x {shape['hidden']} -> {shape['ffn']} -> {shape['hidden']}"
    return f"{shape['tokens']} x {shape['in']} -> {shape['out']}"


def pass_of(row: Row) -> str:
    """``forward``, or ``forward+backward``."""
    return str(row.extra.get("pass", "forward"))


def _unsplit(row: Row, rows: Sequence[Row]) -> Row | None:
    """One device's row of the same subject, shape, mode and pass."""

    def same(other: Row) -> bool:
        mine, its = ((r.subject, r.shape, r.mode, pass_of(r)) for r in (row, other))
        return other.impl == "single" and mine == its

    return next(filter(same, rows), None)


def speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """Time of one device over the time of ``row``, same subject, shape, mode and pass; None where either is missing."""
    single = _unsplit(row, rows)
    return single.us.p50 / row.us.p50 if single is not None and single.us and row.us else None


def pays_from(impl: str, mode: str, rows: Sequence[Row], which: str = "forward") -> str:
    """One sentence: from which size on the split ``impl`` is faster than one device in ``mode``, in the pass ``which``."""
    where = f"In {mode} mode, forward and backward," if which != "forward" else f"In {mode} mode"
    cases = []
    for row in rows:
        gain = speedup(row, rows) if (row.impl, row.mode, pass_of(row)) == (impl, mode, which) else None
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
    top = f"best {format_gain(best[1])} at {best[2]}"
    if best[1] < 1:
        return f"{where} the {impl} split does not pay at any size measured ({top})."
    if paying == 0:
        some = ", ".join(name for _, gain, name in cases if gain >= 1)
        return f"{where} the {impl} split pays at some sizes only, and not at the largest: {some} ({top})."
    if paying == len(cases):
        return f"{where} the {impl} split pays at every size measured ({top})."
    first = cases[-paying]
    worst = min(cases, key=lambda case: case[1])
    return (
        f"{where} the {impl} split pays from {first[2]} on, where one device takes {format_us(first[0])} "
        f"({top}; below that, as little as {format_gain(worst[1])})."
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


def kept(rows: Sequence[Row]) -> list[str]:
    """A sentence for each shape: what the layer keeps for its backward, whole tokens on every rank against own tokens."""
    told: dict[str, str] = {}
    for row in rows:
        for other in rows:
            same = (row.impl, other.impl, row.shape) == ("crosscut", "crosscut_sp", other.shape)
            if same and row.shape is not None and "saved_bytes" in row.extra and "saved_bytes" in other.extra:
                told[label(row.shape)] = (
                    f"{label(row.shape)}: a rank keeps {format_size(row.extra['saved_bytes'])} for the backward, with sequence "
                    f"parallelism {format_size(other.extra['saved_bytes'])}."
                )
    return list(told.values())


def wrong_results(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row whose error is larger than rounding explains; empty when all results are right."""
    found = []
    for row in rows:
        if row.error is None or row.shape is None or row.impl == "single":
            continue
        single = _unsplit(row, rows)
        allowed = allowed_error(row.dtype, (single.error if single is not None else None) or 0.0, row.world)
        if not row.error <= allowed:
            found.append(
                f"{row.impl} ({row.mode}{', with backward' if pass_of(row) != 'forward' else ''}) at {label(row.shape)}: "
                f"relative error {row.error:.3g}, rounding in {row.dtype} explains {allowed:.3g}"
            )
    return found
