"""Training records as loss curves in one chart."""

from __future__ import annotations

from typing import Any

import pytest

from crosscut.records import Hardware, Row, RunRecord
from crosscut.report.plots import charts
from crosscut.report.tables import sheets


def record(impl: str, **extra: Any) -> RunRecord:
    row = Row("training", impl, "eager", 2, "float32", n=3, extra=extra)
    return RunRecord("examples/train_tiny_llama.py", {}, Hardware("CPU", 2), {}, [row])


def test_several_runs_share_one_chart() -> None:
    runs = [record("tp 1, dp 1", loss=[3.0, 2.0, 1.0]), record("tp 2, dp 1", loss=[3.0, 2.5], first_step=10)]
    (chart,) = charts(runs, ["a", "b"])
    first, second = chart.figure.data
    assert (first.name, list(first.x), list(first.y)) == ("tp 1, dp 1", [1, 2, 3], [3.0, 2.0, 1.0])
    assert (second.name, list(second.x)) == ("tp 2, dp 1", [11, 12])
    assert first.line.dash != second.line.dash
    assert first.line.width > second.line.width, "the later curve would hide the earlier"


def test_runs_of_one_name_are_told_apart_by_their_records() -> None:
    (chart,) = charts([record("tp 1, dp 1", loss=[1.0])] * 2, ["a", "b"])
    assert [trace.name for trace in chart.figure.data] == ["tp 1, dp 1 (a)", "tp 1, dp 1 (b)"]


@pytest.mark.parametrize("extra", [{}, {"loss": "none"}, {"loss": []}, {"loss": ["nan"]}])
def test_a_run_without_losses_has_no_chart(extra: dict[str, Any]) -> None:
    assert charts([record("tp 1", **extra)], ["a"]) == []


def test_what_is_not_finite_is_left_out() -> None:
    (chart,) = charts([RunRecord.from_json(record("tp 1", loss=[2.0, float("inf"), 1.0]).to_json())], ["a"])
    assert list(chart.figure.data[0].x) == [1, 3]


def test_it_is_listed_in_the_tables() -> None:
    (sheet,) = sheets(record("tp 1, dp 1", loss=[1.0]))
    assert "training" in sheet.title or any("training" in str(cell) for cell in sheet.rows[0])
