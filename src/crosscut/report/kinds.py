"""The kinds of charts: which points each draws, which value it reads, and how to read it. One entry of :data:`KINDS` each.

Rows become points: a place on the x axis, a series, a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from crosscut.records import Row
from crosscut.report.sheets import number, p50
from crosscut.report.tables import Shape
from crosscut.units import ROUNDOFF, SHORT_DTYPES

Mark = tuple[float, str]
"""A value that a chart marks with a line, and its name."""


class Series(NamedTuple):
    """What one trace shows: an implementation in one record (by its position), on one world, in or out of place."""

    record: int
    impl: str
    world: int
    in_place: bool = False


@dataclass(frozen=True)
class Point:
    """One row in its place. ``family`` is 'layer' (x is a shape) or 'size' (x is a number of bytes)."""

    family: str
    group: tuple[str, ...]
    dtype: str
    series: Series
    x: Shape | int
    row: Row
    speedup: float | None = None
    peak: Mark | None = None


@dataclass(frozen=True)
class Kind:
    """One kind of chart: which points it draws (those with a ``value``), and how. The axis is linear in percent, else log."""

    key: str
    family: str
    title: str
    caption: str
    axis: str
    read: Callable[[Point], float | None]
    bars: bool = False
    percent: bool = False
    spread: bool = False
    reference: Callable[[Point], Mark | None] = lambda point: None
    fitted: Callable[[Row, float, float], float] | None = None
    """What the chart shows of a fit: from a row of the series, a size in bytes and the fitted us."""

    def value(self, point: Point) -> float | None:
        """What the chart shows of a point; None when there is nothing, or nothing that a log axis can show."""
        value = self.read(point)
        return value if value is not None and (self.percent or value > 0) else None


def roundoff(dtype: str) -> Mark | None:
    """The unit roundoff of a dtype with its label; None for one that is not known."""
    name = SHORT_DTYPES.get(dtype, dtype)
    return (ROUNDOFF[name], f"rounding of {name}") if name in ROUNDOFF else None


KINDS = (
    Kind(
        "time",
        "layer",
        "Time",
        "Median time of one call, shorter is better; whiskers span the 10th to the 90th percentile. "
        "no_comm is the local work alone.",
        "us",
        lambda point: p50(point.row),
        bars=True,
        spread=True,
    ),
    Kind(
        "speedup",
        "layer",
        "Speed-up over one device",
        "Above the line at 1 the split pays; below it one device alone is faster. no_comm is the ceiling of any split.",
        "times",
        lambda point: point.speedup,
        reference=lambda point: (1.0, "break-even"),
    ),
    Kind(
        "comm",
        "layer",
        "Share of communication",
        "The part of a call's time that is spent in communication.",
        "share of time",
        lambda point: number(point.row.extra.get("comm_share")),
        bars=True,
        percent=True,
    ),
    Kind(
        "hidden",
        "layer",
        "Share hidden",
        "Of the time that the plain split takes beyond no_comm, how much crosscut saves: all of it at 100 %, nothing at 0 %; "
        "below that it is slower than the plain split.",
        "share hidden",
        lambda point: number(point.row.extra.get("hidden_share")),
        bars=True,
        percent=True,
    ),
    Kind(
        "kept",
        "layer",
        "Kept for the backward",
        "What one rank keeps of a forward until its backward has run, each tensor once and without the weights.",
        "MiB",
        lambda point: mebibytes(point.row.extra.get("saved_bytes")),
        bars=True,
    ),
    Kind(
        "error",
        "layer",
        "Error against float64",
        "Relative error of the result. A split is as good as one device when its points lie at the same height.",
        "relative error",
        lambda point: number(point.row.error),
        reference=lambda point: roundoff(point.dtype),
    ),
    Kind(
        "latency",
        "size",
        "Latency",
        "Median time of one call over the size of the whole tensor, lower is better; the band spans the 10th to the 90th "
        "percentile.",
        "us",
        lambda point: p50(point.row),
        spread=True,
        fitted=lambda row, size, us: us,
    ),
    Kind(
        "busbw",
        "size",
        "Bus bandwidth",
        "Traffic on the busiest link, as a ring would cause it, over the size of the whole tensor; higher is better.",
        "GB/s",
        lambda point: number(point.row.busbw_gbps),
        reference=lambda point: point.peak,
        fitted=lambda row, size, us: size / us / 1e3 * bus_factor(row),
    ),
    Kind(
        "wire",
        "size",
        "Wire bandwidth",
        "What one port really carried each way, where that is not the bus bandwidth: with sums in the switch (NVLS) busbw may "
        "exceed the link's rate, and this never does.",
        "GB/s",
        lambda point: own_wire(point.row),
        reference=lambda point: point.peak,
    ),
)


def mebibytes(nbytes: object) -> float | None:
    """A number of bytes in MiB."""
    value = number(nbytes)
    return None if value is None else value / (1 << 20)


def bus_factor(row: Row) -> float:
    """busbw over algbw of a row; 1 when one of them is missing."""
    bus, alg = number(row.busbw_gbps), number(row.algbw_gbps)
    return bus / alg if bus and alg else 1.0


def own_wire(row: Row) -> float | None:
    """The wire bandwidth of a row, None when it is missing or within 1 % of the bus bandwidth."""
    port, bus = number(row.extra.get("wire_gbps")), number(row.busbw_gbps)
    return None if port is None or (bus is not None and abs(port - bus) <= 0.01 * bus) else port
