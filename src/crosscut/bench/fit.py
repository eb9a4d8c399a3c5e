"""What a sweep over sizes means: a latency and a rate, the sizes at which implementations change places, a verdict.

Pure functions of rows. The model is alpha-beta (Hockney 1994): ``t = alpha + bytes * beta``, alpha the latency, 1/beta the
rate. It is fitted by least squares on the *relative* error, so that a size that takes 10 us counts as much as one that
takes 10 ms. An implementation that changes its algorithm with the size follows no single line; it gets two when that
clearly helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from crosscut.hardware import Reference, Wire, references, wire
from crosscut.records import Row
from crosscut.units import format_size

LEAST_POINTS = 3
"""Sizes that one line needs: two fix it, the third tells how well it fits."""
CLEARLY = 2.0
"""Two lines are taken when they make the typical relative error this many times smaller than one line's."""
GOOD_ENOUGH = 0.05
"""A line whose typical relative error is below this is kept whole: two clocks do not agree better."""
PASS = 0.90
"""The part of a reference that counts as good; nccl-tests' own check (NCCL_TESTS_MIN_BW) passes at 90 % too."""
NOISY = 2.0
"""A measurement whose p90 is more than this many times its p10 is noisy."""
NOT_FITTED = ("pair", "simulate", "fit", "crossover", "verdict")


class Line(NamedTuple):
    """One fitted line: alpha in us, beta in us a byte, each with its standard error, over sizes that it was fitted to."""

    alpha: float
    beta: float
    alpha_err: float
    beta_err: float
    r2: float
    points: int
    from_bytes: int
    to_bytes: int
    rss: float
    """Sum of the squared relative errors."""


class Series(NamedTuple):
    """What one curve belongs to: an implementation of one operation."""

    op: str
    redop: str | None
    world: int
    dtype: str
    mode: str
    impl: str


Curve = dict[int, Row]
"""The rows of one series by size in bytes, in rising order."""


def summarise(rows: Sequence[Row], device: str, links: Sequence[Sequence[str]]) -> list[Row]:
    """Rows ``fit``, ``crossover`` and ``verdict`` (docs/records.md) of the collectives measured in ``rows``.

    ``device`` and ``links`` are the record's ``hardware.device`` and ``hardware.links``. Results that were wrong
    (``extra.wrong``) count nowhere: how fast they came does not matter.
    """
    found = curves(rows)
    return [*_fit_rows(found), *_crossover_rows(found), *_verdict_rows(found, device, links)]


def curves(rows: Iterable[Row]) -> dict[Series, Curve]:
    """The curve of each series: its out-of-place calls, or the in-place ones where only those were measured."""
    places: dict[Series, dict[bool, Curve]] = {}
    for row in rows:
        timed = row.bytes and row.us is not None and row.us.p50 > 0
        if row.subject in NOT_FITTED or not timed or row.extra.get("wrong"):
            continue
        extra = row.extra
        series = Series(row.subject, extra.get("redop"), row.world, row.dtype, row.mode, row.impl)
        curve = places.setdefault(series, {}).setdefault(bool(extra.get("in_place")), {})
        curve.setdefault(row.bytes or 0, row)
    return {series: dict(sorted(found.get(False, found.get(True, {})).items())) for series, found in places.items()}


def fit_line(points: Sequence[tuple[int, float]]) -> Line | None:
    """The line through ``points`` (bytes, us) that minimises ``sum(((alpha + beta * bytes - us) / us)**2)``.

    Neither parameter may be negative: an alpha below zero becomes zero. None when there are fewer than three points, or
    when the time does not grow with the size, so that no rate can be told. Standard errors by the usual formula for
    weighted least squares, with the variance estimated from the residual; r2 is the weighted one (weights 1/us^2).
    """
    if len(points) < LEAST_POINTS:
        return None
    u = [1 / us for _, us in points]
    v = [size / us for size, us in points]
    su, sv = sum(u), sum(v)
    suu, svv, suv = _dot(u, u), _dot(v, v), _dot(u, v)
    det = suu * svv - suv * suv
    if det <= 1e-12 * suu * svv:
        return None
    alpha, beta = (su * svv - sv * suv) / det, (sv * suu - su * suv) / det
    if alpha < 0:
        alpha, beta = 0.0, sv / svv
    if beta <= 0:
        return None
    rss = sum((alpha * a + beta * b - 1) ** 2 for a, b in zip(u, v, strict=True))
    variance = rss / (len(points) - 2)
    mean = su / suu
    total = sum((1 - mean * a) ** 2 for a in u)
    errors = math.sqrt(variance * svv / det), math.sqrt(variance * suu / det)
    return Line(alpha, beta, *errors, 1 - rss / total if total else 0.0, len(points), points[0][0], points[-1][0], rss)


def fit(points: Sequence[tuple[int, float]]) -> list[Line]:
    """One line, or two with a break between sizes when they fit clearly better; ``points`` (bytes, us) rise in size.

    "Clearly": the residual's standard deviation (five parameters counted for two lines, two for one) becomes half or less,
    and one line was off by more than 5 %. Each line needs three points. Empty when no line can be fitted.
    """
    one = fit_line(points)
    if one is not None and one.rss <= GOOD_ENOUGH**2 * (one.points - 2):
        return [one]
    breaks = range(LEAST_POINTS, len(points) - LEAST_POINTS + 1)
    pairs = [(fit_line(points[:k]), fit_line(points[k:])) for k in breaks]
    twos = [(low, high) for low, high in pairs if low is not None and high is not None]
    if not twos:
        return [] if one is None else [one]
    best = min(twos, key=lambda two: two[0].rss + two[1].rss)
    spread = (best[0].rss + best[1].rss) / max(1, len(points) - 5)
    if one is None or spread * CLEARLY**2 <= one.rss / (one.points - 2):
        return list(best)
    return [one]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _p50(row: Row) -> float:
    assert row.us is not None, "only timed rows make a curve"
    return row.us.p50


def _fit_rows(found: dict[Series, Curve]) -> list[Row]:
    return [
        _fit_row(series, line) for series, curve in found.items() for line in fit([(b, _p50(row)) for b, row in curve.items()])
    ]


def _fit_row(series: Series, line: Line) -> Row:
    rate = 1 / line.beta / 1e3
    extra = {
        **_named(series),
        "alpha_us": line.alpha,
        "alpha_err": line.alpha_err,
        "gbps": rate,
        "gbps_err": rate * line.beta_err / line.beta,
        "r2": line.r2,
        "half_bytes": round(line.alpha / line.beta),
        "points": line.points,
        "from_bytes": line.from_bytes,
        "to_bytes": line.to_bytes,
    }
    return Row("fit", series.impl, series.mode, series.world, series.dtype, extra=extra)


def _named(series: Series) -> dict[str, object]:
    """The parts of a series that have no field in a row."""
    named: dict[str, object] = {"op": series.op}
    return named if series.redop is None else named | {"redop": series.redop}


def crossings(first: Curve, second: Curve) -> list[tuple[int, bool]]:
    """The sizes in bytes at which two curves change places, and whether ``first`` is the faster one below.

    A size counts only where the times differ by more than their spread (the spans from p10 to p90 do not overlap), so
    that noise makes no crossing. Between two such sizes the ratio of the medians is taken as a straight line over the
    logarithm of the size.
    """
    told = [
        (math.log(size), math.log(_p50(first[size]) / _p50(second[size])))
        for size in first
        if size in second and not _overlap(first[size], second[size])
    ]
    found = []
    for (x0, y0), (x1, y1) in pairwise(told):
        if y0 * y1 < 0:
            found.append((round(math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))), y0 < 0))
    return found


def _overlap(a: Row, b: Row) -> bool:
    assert a.us is not None, "only timed rows make a curve"
    assert b.us is not None, "only timed rows make a curve"
    return a.us.p10 <= b.us.p90 and b.us.p10 <= a.us.p90


def _crossover_rows(found: dict[Series, Curve]) -> list[Row]:
    """The crossings of each two implementations of the same operation."""
    rows = []
    for a, b in combinations(found, 2):
        if a[:5] != b[:5]:
            continue
        for size, first_below in crossings(found[a], found[b]):
            below, above = (a, b) if first_below else (b, a)
            extra = {**_named(a), "below": below.impl, "above": above.impl, "bytes": size}
            rows.append(Row("crossover", below.impl, a.mode, a.world, a.dtype, extra=extra))
    return rows


def _verdict_rows(found: dict[Series, Curve], device: str, links: Sequence[Sequence[str]]) -> list[Row]:
    """One verdict for each operation and world. NCCL is judged where it ran, because the references are NCCL's, and as it
    chooses by itself: what was forced upon it (``extra.forced``) says nothing about the machine.
    """
    cases: dict[tuple[str, int], list[Row]] = {}
    for series, curve in found.items():
        free = [row for row in curve.values() if row.busbw_gbps and not row.extra.get("forced")]
        cases.setdefault((series.op, series.world), []).extend(free)
    rows = []
    for (op, world), measured in cases.items():
        judged = [row for row in measured if row.impl == "nccl"] or measured
        if judged:
            rows.append(_verdict_row(op, judged, device, wire(device, links, world)))
    return rows


def _verdict_row(op: str, rows: list[Row], device: str, link: Wire) -> Row:
    largest = max(row.bytes or 0 for row in rows)
    known = references(device, link, op, rows[0].world)
    reference = next((ref for ref in reversed(known) if ref.nbytes <= largest), None)
    least = reference.nbytes if reference else 0
    best = max((row for row in rows if (row.bytes or 0) >= least), key=lambda row: row.busbw_gbps or 0.0)
    level, percent, text = _judge(best, reference, known, link)
    facts = f"{op}: {best.busbw_gbps:.3g} GB/s of bus bandwidth at {format_size(best.bytes or 0)} ({best.impl}, {best.mode})"
    extra = {"op": op, "level": level, "percent": percent, "text": f"{facts}: {text}{_multicast(best, link)}."}
    if percent is not None and reference is not None:
        extra["source"] = reference.source
    return Row("verdict", best.impl, best.mode, best.world, best.dtype, extra=extra)


def _judge(row: Row, reference: Reference | None, known: list[Reference], link: Wire) -> tuple[str, float | None, str]:
    """Level, percent of the reference, and the sentence's second half."""
    if link.kind == "host":
        return "low", None, "PCIe through the CPU: P2P is off (nvidia-smi topo -p2p r tells why)"
    if row.us is not None and row.us.p90 > NOISY * row.us.p10:
        return "noisy", None, "the slow samples (p90) took more than twice as long as the fast ones (p10); measure again"
    if link.kind == "mixed":
        return "unknown", None, f"the GPUs of this host are linked in several ways ({link.name}); see nvidia-smi topo -m"
    if link.kind == "pcie" and link.gbps:
        part = (row.busbw_gbps or 0.0) / link.gbps
        return (
            "unknown",
            None,
            f"{part:.0%} of PCIe's {link.gbps:.0f} GB/s one way ({link.name}); no reference for this hardware",
        )
    if reference is None and known:
        return "unknown", None, f"the smallest reference is for {format_size(known[0].nbytes)}; measure up to that size"
    if reference is None:
        return "unknown", None, "no reference for this hardware"
    part = (row.busbw_gbps or 0.0) / reference.low
    span = f"{reference.low:.0f}" if reference.low == reference.high else f"{reference.low:.0f} to {reference.high:.0f}"
    reached = f"{part * 100:.0f} % of what {reference.machine} on NVLink reach ({span} GB/s)"
    return ("good" if part >= PASS else "low"), round(part * 100, 1), reached


def _multicast(row: Row, link: Wire) -> str:
    """Why a bus bandwidth may exceed the link's rate: the switch adds, and each port carries less than a ring would."""
    port = row.extra.get("wire_gbps")
    if not isinstance(port, (int, float)) or not link.gbps or not port <= link.gbps < (row.busbw_gbps or 0.0):
        return ""
    return (
        f". This is above the link's {link.gbps:.0f} GB/s and right: the switch adds (NVLS), one port carried {port:.0f} GB/s, "
        "and busbw counts what a ring would carry"
    )
