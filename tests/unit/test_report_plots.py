"""Figures: each record gets the charts that it has data for, with the right numbers, colours and names."""

from __future__ import annotations

from typing import Any

import pytest

from crosscut.records import Hardware, Row
from crosscut.report.canvas import COLORS, Chart, color
from crosscut.report.kinds import roundoff
from crosscut.report.plots import charts
from crosscut.report.tables import label
from report_samples import SPEED, TOKENS, bench_record, collectives_record, linear_record, record, times, training_rows


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


def test_what_is_hidden_and_kept_is_drawn() -> None:
    drawn = charts([record(training_rows())], ["a"])
    assert [chart.id.split("-")[0] for chart in drawn] == ["time", "speedup", "hidden", "kept"]
    hidden, kept = by_key(drawn, "hidden"), by_key(drawn, "kept")
    assert hidden.title == "Share hidden: mlp, pair split, bfloat16, graph, forward+backward"
    assert trace(hidden, "crosscut").y == (0.5,)
    low, high = hidden.figure.layout.yaxis.range
    assert low < -0.25, "a split slower than the plain one is inside the axis"
    assert high == 1
    assert [t.name for t in kept.figure.data] == ["crosscut", "crosscut_sp"]
    assert trace(kept, "crosscut").y == (3.0,)


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


def test_the_break_even_line_is_seen_where_there_is_one_shape() -> None:
    row = Row("linear", "nccl", "eager", 2, "float32", {"tokens": 1}, extra={"speedup": 0.3})
    (chart,) = charts([record([row])], ["a"])
    mark = trace(chart, "break-even (1)")
    assert (mark.mode, mark.marker.symbol, mark.marker.line.width) == ("markers", "line-ew", 2), "a line needs two places"


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
    styles = [(trace.line.color, trace.marker.symbol) for trace in busbw.figure.data if trace.marker.symbol]
    assert len({color for color, _ in styles}) == len({symbol for _, symbol in styles}) == 3


def test_several_records_are_told_apart_and_keep_their_colours() -> None:
    records = [linear_record(), linear_record(commit="other"), collectives_record()]
    labels = [label(run) for run in records]
    drawn = charts(records, labels)
    time, speed = by_key(drawn, "time"), by_key(drawn, "speedup")
    pair = [trace for trace in time.figure.data if trace.name == "crosscut"]
    assert all(chart.figure.layout.showlegend for chart in drawn), "a single bar is named too"
    titles = [trace.legendgrouptitle.text.split("<br>") for trace in pair]
    assert [" ".join(lines) for lines in titles] == labels[:2]
    assert max(len(line) for lines in titles for line in lines) <= 40, "plotly cuts off what is wider than a phone"
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


def test_curves_have_their_span_and_fit_below_them() -> None:
    latency, busbw = charts([bench_record()], ["a"])[:2]
    own = [trace for trace in latency.figure.data if trace.legendgroup == "crosscut"]
    band, fit, curve = own
    assert [trace.showlegend for trace in own] == [False, False, None], "one entry in the legend hides all three"
    assert (band.fill, len(band.x)) == ("toself", 2 * len(curve.x))
    assert band.y[0] == pytest.approx(curve.y[0] * 1.1)
    assert band.y[-1] == pytest.approx(curve.y[0] * 0.95)
    assert (fit.line.dash, fit.x[0], fit.x[-1]) == ("dot", 1024, pytest.approx(1 << 30))
    assert (fit.y[0], fit.y[-1]) == (pytest.approx(curve.y[0]), pytest.approx(curve.y[-1]))
    assert "Dotted: the alpha-beta fit." in latency.caption
    (rate,) = [trace for trace in busbw.figure.data if trace.legendgroup == "crosscut" and trace.showlegend is False]
    assert rate.y[-1] == pytest.approx(trace(busbw, "crosscut").y[-1]), "the fit in GB/s, without a span"


def test_in_place_curves_are_told_apart_and_bear_no_second_fit() -> None:
    latency = charts([bench_record()], ["a"])[0]
    own = [trace for trace in latency.figure.data if trace.legendgroup == "nccl, in place"]
    assert [(trace.name, trace.marker.symbol) for trace in own] == [("nccl, in place", "circle-open")]


def test_crossovers_lie_on_the_curve_that_is_faster_below() -> None:
    latency = charts([bench_record()], ["a"])[0]
    marks = trace(latency, "crossover")
    found = {text.split(": ")[1]: (x, y) for x, y, text in zip(marks.x, marks.y, marks.text, strict=True)}
    size, us = found["below crosscut, above nccl is faster"]
    assert 1 << 22 < size < 1 << 24
    assert us == pytest.approx(3 + size / 200e3, rel=0.15)
    assert "Crosses:" in latency.caption
    assert "Crosses:" not in charts([collectives_record()], ["a"])[0].caption


def test_the_peak_of_a_known_link_is_marked() -> None:
    busbw = charts([bench_record()], ["a"])[1]
    assert set(trace(busbw, "peak of the link, NV18 (450)").y) == {450.0}
    assert 10 ** busbw.figure.layout.yaxis.range[1] > 450
    cpu = charts([bench_record(hardware=Hardware("CPU, 2 threads", 2))], ["a"])[1]
    assert not [trace for trace in cpu.figure.data if "peak" in (trace.name or "")]
    mixed = charts([bench_record(), bench_record(hardware=Hardware("CPU, 2 threads", 2))], ["a", "b"])[1]
    assert not [trace for trace in mixed.figure.data if "peak" in (trace.name or "")], "no one line holds for both"


def test_wire_bandwidth_is_drawn_where_it_is_not_the_bus_bandwidth() -> None:
    def multicast(port: float) -> list[Row]:
        measured = {"bytes": 1 << 30, "us": times(3900.0), "algbw_gbps": 275.0, "busbw_gbps": 481.0}
        return [Row("all_reduce", "nccl", "graph", 8, "bfloat16", **measured, extra={"wire_gbps": port})]  # type: ignore[arg-type]

    keys = [chart.id.split("-")[0] for chart in charts([record(multicast(309.0))], ["a"])]
    assert keys == ["latency", "busbw", "wire"]
    assert [chart.id.split("-")[0] for chart in charts([record(multicast(481.0))], ["a"])] == ["latency", "busbw"]


def test_redops_have_charts_of_their_own() -> None:
    rows = [
        Row("all_reduce", impl, "graph", 2, "bfloat16", bytes=64, us=times(1.0), extra={"redop": redop})
        for impl, redop in (("nccl", "sum"), ("nccl", "max"), ("nccl ring", "sum"))
    ]
    drawn = charts([record(rows)], ["a"])
    assert [chart.title for chart in drawn] == [
        "Latency: all_reduce, bfloat16, graph",
        "Latency: all_reduce, max, bfloat16, graph",
    ]
    assert [trace.name for trace in drawn[0].figure.data] == ["nccl", "nccl ring"]


def test_pair_matrices() -> None:
    drawn = [chart for chart in charts([bench_record()], ["a"]) if chart.id.startswith("map-pair")]
    assert [chart.title for chart in drawn] == [
        f"Pair {what}: {way}, nccl, eager, float32"
        for way in ("one way at a time", "both ways at once")
        for what in ("latency", "bandwidth")
    ]
    latency, bandwidth, _, both = (chart.figure.data[0] for chart in drawn)
    assert [latency.z[i][i] for i in range(4)] == [None] * 4
    assert latency.z[0][1] == pytest.approx(6.0, rel=1e-3), "at the smallest size"
    assert bandwidth.z[0][1] == pytest.approx(377, rel=0.01), "at the largest size"
    assert bandwidth.z[0][3] == bandwidth.z[3][0] == pytest.approx(60, rel=0.01), "the slow rank shows"
    assert (latency.zmin, latency.zmax) == (0, pytest.approx(6.0, rel=1e-3)), "equal links have equal colours"
    assert both.z[2][1] == both.z[1][2], "an unordered pair fills both cells"
    assert (latency.text[0][1], bandwidth.text[0][1]) == ("6", "377"), "as in the tables: never 1.38e+3"


def test_simulated_steps_are_arrows_between_ranks() -> None:
    (chart,) = [chart for chart in charts([bench_record()], ["a"]) if chart.id.startswith("map-steps")]
    lines, middles = chart.figure.data
    assert (list(lines.x[:3]), list(lines.x[9:12])) == ([0, 1, None], [3, 0, None]), "each to the next, the last to the first"
    assert len(middles.text) == 24
    assert middles.text[0] == "step 1: rank 0 sends 256 KiB to rank 1"
    assert list(chart.figure.layout.yaxis.ticktext) == [f"step {i}" for i in range(1, 7)]
    assert "Counted: 6 steps, 24 messages of 256 KiB; the busiest rank sends 1.5 MiB" in chart.caption
    assert "Formula: 6 steps and 2(n-1)/n x S = 1.5 MiB a rank, with S = 1 MiB" in chart.caption
