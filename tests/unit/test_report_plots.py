"""Figures: each record gets the charts that it has data for, with the right numbers, colours and names."""

from __future__ import annotations

from typing import Any

import pytest

from crosscut.records import Row
from crosscut.report.plots import COLORS, Chart, charts, color, roundoff
from crosscut.report.tables import label
from report_samples import SPEED, TOKENS, collectives_record, linear_record, record, times


def by_key(drawn: list[Chart], start: str) -> Chart:
    return next(chart for chart in drawn if chart.id.startswith(start))


def trace(chart: Chart, name: str) -> Any:
    return next(trace for trace in chart.figure.data if trace.name == name)


def test_a_layer_record_gets_its_four_charts_for_each_case() -> None:
    drawn = charts([linear_record()], ["a"])
    kinds = [chart.id.split("-")[0] for chart in drawn]
    assert kinds == ["time", "speedup", "comm", "error"] * 3 + ["latency", "busbw"] * 3
    assert len({chart.id for chart in drawn}) == len(drawn)
    assert by_key(drawn, "time").title == "Time: linear, column split, bfloat16, graph"


def test_time_bars() -> None:
    chart = by_key(charts([linear_record()], ["a"]), "time-linear-column-split-bfloat16-graph")
    assert [trace.name for trace in chart.figure.data] == ["single", "textbook", "nccl", "dtensor", "crosscut", "no_comm"]
    bars = trace(chart, "crosscut")
    assert bars.type == "bar"
    assert list(bars.x) == [str(tokens) for tokens in TOKENS]
    assert bars.y[0] == pytest.approx(12.11 * SPEED["crosscut"])
    assert bars.error_y.array[0] == pytest.approx(bars.y[0] * 0.1)
    assert bars.error_y.arrayminus[0] == pytest.approx(bars.y[0] * 0.05)
    axis = chart.figure.layout.yaxis
    assert axis.type == "log"
    assert 10 ** axis.range[0] < 12.11 * SPEED["no_comm"] * 0.95
    assert 10 ** axis.range[1] > max(trace(chart, "dtensor").y) * 1.1


def test_speedup_has_its_break_even_line_and_no_trace_for_one_device() -> None:
    chart = by_key(charts([linear_record()], ["a"]), "speedup")
    assert "single" not in [trace.name for trace in chart.figure.data]
    assert trace(chart, "crosscut").y[0] == pytest.approx(1 / 0.7)
    assert set(trace(chart, "break-even (1)").y) == {1.0}
    low, high = chart.figure.layout.yaxis.range
    assert low < 0 < high, "the line lies inside the axis"


def test_the_break_even_line_is_inside_when_every_split_is_slower() -> None:
    row = Row("linear", "nccl", "eager", 2, "float32", {"tokens": 1}, extra={"speedup": 0.3})
    (chart,) = charts([record([row])], ["a"])
    low, high = chart.figure.layout.yaxis.range
    assert 10**low < 0.3 < 1 < 10**high


def test_communication_and_error() -> None:
    drawn = charts([linear_record()], ["a"])
    comm, error = by_key(drawn, "comm"), by_key(drawn, "error")
    assert {trace.name for trace in comm.figure.data} == {"textbook", "nccl", "dtensor", "crosscut"}
    assert trace(comm, "crosscut").y[0] == pytest.approx(0.7 / 8 + 0.1)
    assert set(trace(error, "rounding of bfloat16 (0.0039)").y) == {2.0**-8}
    assert "no_comm" not in [trace.name for trace in error.figure.data]


@pytest.mark.parametrize(("dtype", "value"), [("bf16", 2**-8), ("float16", 2**-11), ("float32", 2**-24), ("float64", 2**-53)])
def test_roundoff_is_half_the_distance_from_one_to_the_next_number(dtype: str, value: float) -> None:
    known = roundoff(dtype)
    assert known is not None
    assert known[0] == value
    assert roundoff("float8_e4m3fn") is None


def test_collectives_over_size() -> None:
    latency, busbw = charts([collectives_record()], ["a"])
    assert latency.title == "Latency: all_reduce, bfloat16, graph"
    line = trace(latency, "crosscut")
    assert list(line.x) == sorted(line.x)
    assert line.x[0] == 1024
    assert (latency.figure.layout.xaxis.type, latency.figure.layout.yaxis.type) == ("log", "log")
    assert latency.figure.layout.xaxis.ticktext[0] == "1 KiB"
    assert trace(busbw, "nccl").y[-1] == pytest.approx(257, rel=0.01)
    styles = [(trace.line.color, trace.marker.symbol) for trace in busbw.figure.data]
    assert len({color for color, _ in styles}) == len({symbol for _, symbol in styles}) == 3


def test_several_records_are_told_apart_and_keep_their_colours() -> None:
    records = [linear_record(), linear_record(commit="other"), collectives_record()]
    labels = [label(run) for run in records]
    drawn = charts(records, labels)
    time, speed = by_key(drawn, "time"), by_key(drawn, "speedup")
    pair = [trace for trace in time.figure.data if trace.name == "crosscut"]
    assert [trace.legendgrouptitle.text for trace in pair] == labels[:2]
    assert {trace.marker.color for trace in pair} == {COLORS["crosscut"]}
    assert len({trace.marker.pattern.shape for trace in pair}) == 2
    assert len({trace.line.dash for trace in speed.figure.data if trace.name == "crosscut"}) == 2
    assert sum(chart.id.startswith("latency-all-reduce") for chart in drawn) == 1, "one chart holds all records"


def test_worlds_of_one_record_are_told_apart() -> None:
    rows = [Row("all_reduce", "nccl", "graph", world, "bfloat16", bytes=1024, us=times(world)) for world in (2, 4)]
    (chart,) = charts([record(rows)], ["a"])
    assert [trace.name for trace in chart.figure.data] == ["nccl, world 2", "nccl, world 4"]


def test_no_data_no_chart() -> None:
    bad = {"speedup": -1, "comm_share": "unknown"}
    rows = [
        Row("linear", "crosscut", "eager", 2, "float32", {"tokens": 1}, error=0.0, extra=bad),
        Row("decode", "single", "eager", 1, "float32", us=times(1.0)),
        Row("all_reduce", "nccl", "eager", 2, "float32", bytes=0, us=times(1.0)),
    ]
    assert charts([record(rows)], ["a"]) == []


def test_text_of_a_record_is_never_read_as_tags() -> None:
    rows = [Row("all_reduce", "<b>x", "graph", 2, "f", bytes=8, us=times(1.0), path="<a href='//e'>")]
    (chart,) = charts([record(rows)], ["a"])
    assert chart.figure.data[0].name == "&lt;b&gt;x"
    assert chart.figure.data[0].customdata[0] == "&lt;a href='//e'&gt;"


def test_a_colour_is_always_the_same_and_the_main_ones_differ() -> None:
    assert color("my_own_kernel") == color("my_own_kernel")
    layer = ("single", "textbook", "nccl", "gloo", "dtensor", "crosscut", "no_comm")
    assert len({color(impl) for impl in layer}) == len(layer)
    size = ("nccl", "crosscut", "nccl_symmetric", "torch_one_shot", "torch_two_shot", "mpi")
    assert len({color(impl) for impl in size}) == len(size)
