"""Records as tables: what stands on one line, what each cell says, and that nothing is cut off."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from crosscut.records import Row, RunRecord
from crosscut.report.sheets import Sheet, number, short
from crosscut.report.tables import Axis, compare, comparison_sheets, impl_order, rows_sheet, sheets, table
from report_samples import (
    SPEED,
    TOKENS,
    bench_record,
    collectives_record,
    layer_rows,
    linear_record,
    record,
    times,
    training_rows,
)


def printed(run: RunRecord, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(table(run))
    return out.getvalue()


def column(sheet: Sheet, name: str) -> list[str]:
    i = [c.name for c in sheet.columns].index(name)
    return [row[i].text for row in sheet.rows]


def test_one_sheet_for_each_subject_split_and_mode() -> None:
    sheets = comparison_sheets(linear_record())
    assert [sheet.title.split(", in ")[0].split(", hidden")[0] for sheet in sheets] == [
        "linear, column split, bfloat16, graph, world 2",
        "linear, column split, bfloat16, eager, world 2",
        "mlp, pair split, bfloat16, graph, world 2",
    ]
    assert column(sheets[0], "tokens") == [str(tokens) for tokens in TOKENS]
    assert sheets[0].title.endswith("in 4096, out 14336"), "what never differs is said once"


def test_the_cells_of_a_line() -> None:
    sheet = comparison_sheets(linear_record())[0]
    names = [c.name for c in sheet.columns]
    assert names == ["tokens", "single", "textbook", "nccl", "dtensor", "crosscut", "no_comm", "error", "comm", "GB/s"]
    cells = dict(zip(names, sheet.rows[0], strict=True))
    base = 12.0 + 0.11
    assert cells["single"].value == pytest.approx(base)
    assert cells["single"].below == "-"
    for impl, factor in SPEED.items():
        assert cells[impl].value == pytest.approx(base * factor)
    assert cells["textbook"].below == "0.62x"
    assert cells["crosscut"].below == "1.43x"
    assert cells["error"].text == "2.1e-3"
    assert cells["comm"].text == "19%"
    assert cells["GB/s"].value == pytest.approx(14336 / base / 600)


def test_a_pass_with_backward_has_a_table_of_its_own() -> None:
    forward = [row for row in layer_rows("graph", "mlp", "pair") if row.subject == "mlp"]
    first, second = comparison_sheets(record([*forward, *training_rows()]))
    assert first.title.startswith("mlp, pair split, bfloat16, graph, world 2")
    assert second.title.startswith("mlp, pair split, bfloat16, graph, forward+backward, world 2")
    assert [c.name for c in second.columns][1:] == [
        "single", "nccl", "crosscut", "crosscut_sp", "no_comm", "hidden", "kept", "kept sp"
    ]  # fmt: skip
    assert [column(second, name) for name in ("hidden", "kept", "kept sp")] == [["50%"], ["3 MiB"], ["1.5 MiB"]]
    assert len(first.rows) == len(TOKENS)
    assert "kept: for the backward" in second.caption
    (alone,) = comparison_sheets(record(forward))
    assert "kept" not in alone.caption, "a record in which nothing kept was counted"
    worse = [replace(row, extra={**row.extra, "hidden_share": -2.5}) for row in training_rows()]
    assert column(comparison_sheets(record(worse))[0], "hidden") == ["none"]


def test_memory_rows_have_a_table_of_their_own() -> None:
    shape = {"tokens": 64, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 32}
    rows = [
        Row("memory", impl, "eager", 2, "bfloat16", shape, bytes=n, extra={"derived_bytes": 2048, "paper_bytes": n // 2})
        for impl, n in (("crosscut", 2048), ("crosscut_sp", 1024))
    ]
    (sheet,) = sheets(record(rows))
    assert sheet.title.startswith("Kept for the backward, size tokens 64, hidden 8, heads 2, kv_heads 2, ffn 32, mode eager")
    assert column(sheet, "of terms") == ["100.0%", "50.0%"]
    assert column(sheet, "of paper") == ["200.0%", "200.0%"]


def test_the_speedup_is_computed_when_the_record_does_not_tell() -> None:
    shape = {"tokens": 1, "in": 8, "out": 8}
    rows = [
        Row("linear", "single", "eager", 1, "float32", shape, us=times(30.0)),
        Row("linear", "gloo", "eager", 2, "float32", shape, us=times(20.0)),
    ]
    (sheet,) = comparison_sheets(record(rows))
    assert sheet.rows[0][-1].below == "1.50x"


def test_one_device_stands_on_the_line_of_every_split_and_world() -> None:
    shape = {"tokens": 1, "in": 8, "out": 8}
    single = Row("linear", "single", "eager", 1, "float32", shape, us=times(30.0))
    split = [
        Row("linear", "crosscut", "eager", world, "float32", shape, us=times(20.0), extra={"split": name})
        for name in ("column", "row")
        for world in (2, 4)
    ]
    lines = compare([single, *split])
    assert {(line.case.split, line.case.world) for line in lines} == {(s, w) for s in ("column", "row") for w in (2, 4)}
    assert all(set(line.rows) == {"single", "crosscut"} for line in lines)
    (alone,) = compare([single])
    assert set(alone.rows) == {"single"}
    other = Row("linear", "single", "graph", 1, "float32", shape, us=times(9.0))
    assert all(line.rows["single"] is single for line in compare([single, other, *split]) if len(line.rows) == 2)


def test_a_collective_belongs_to_its_own_shape_split_and_mode() -> None:
    rows = [row for row in layer_rows("graph") if row.subject == "linear"]
    assert "GB/s" not in [c.name for c in comparison_sheets(record(rows))[0].columns]
    shape = {"tokens": 32, "in": 4096, "out": 14336}

    def gather(impl: str, rate: float, mode: str = "graph", subject: str = "all_gather") -> Row:
        return Row(subject, impl, mode, 2, "bfloat16", bytes=64, busbw_gbps=rate, extra={"shape_of": shape})

    wrong = [gather("crosscut", 900.0, mode="eager"), gather("crosscut", 800.0, subject="all_reduce")]
    (sheet,) = comparison_sheets(record([*rows, *wrong, gather("nccl", 70.0)]))
    assert column(sheet, "GB/s") == ["-", "70", "-", "-"]
    (sheet,) = comparison_sheets(record([*rows, *wrong, gather("nccl", 70.0), gather("crosscut", 50.0)]))
    assert column(sheet, "GB/s") == ["-", "50", "-", "-"], "crosscut's own comes first"


@pytest.mark.parametrize("width", [100, 80])
def test_the_printed_table_fits_and_loses_nothing(width: int) -> None:
    run = linear_record()
    text = printed(run, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for sheet in comparison_sheets(run):
        for row in sheet.rows:
            line = next(line for line in text.splitlines() if line.split() == [cell.text for cell in row])
            assert line
    assert run.notes[0] in text


def test_any_other_record_prints_all_its_rows() -> None:
    text = printed(collectives_record())
    assert max(map(len, text.splitlines())) <= 100
    assert sum("nccl_symmetric" in line for line in text.splitlines()) == 7
    assert "subject all_reduce, mode graph, world 2, dtype bfloat16" in text
    sheet = rows_sheet(collectives_record())
    names = [c.name for c in sheet.columns]
    assert names == ["impl", "size", "p10", "p50", "p90", "p99", "algbw", "busbw", "error", "path"]
    assert column(sheet, "size")[:3] == ["1 KiB", "8 KiB", "64 KiB"]


def test_missing_and_odd_values_are_shown_as_they_are() -> None:
    rows = [
        Row("decode", "hf [bold]", "graph", 2, "bfloat16", error="inf", note="[/] out of memory"),  # type: ignore[arg-type]
        Row("decode", "single", "graph", 1, "bfloat16", {"tokens": 1}, us=times(5.0)),
    ]
    sheet = rows_sheet(record(rows))
    assert column(sheet, "error") == ["inf", "-"]
    assert [row[-2].value for row in sheet.rows] == [None, None], "neither can be sorted"
    text = printed(record(rows))
    assert "hf [bold]" in text, "no markup is read from a record"
    assert "[/] out of memory" in text


def test_a_record_without_rows_prints_its_notes() -> None:
    assert "nothing ran" in printed(record([], notes=["nothing ran"]))


def test_axis_names_what_differs() -> None:
    axis = Axis([(("tokens", 1), ("in", 8), ("out", 4)), (("tokens", 1), ("in", 16), ("out", 8))])
    assert (axis.name, axis.fixed) == ("in x out", "tokens 1")
    assert axis.label((("tokens", 1), ("in", 16), ("out", 8))) == "16 x 8"
    alone = Axis([(("tokens", 1), ("in", 8))])
    assert (alone.name, alone.fixed) == ("tokens", "in 8")


def test_small_helpers() -> None:
    assert [number(value) for value in (1, "2.5", None, "inf", float("nan"), [1], 10**400)] == [1.0, 2.5, *[None] * 5]
    assert [short(value) for value in (0, 0.001, 0.25, 18.84, 99.96, 12345.6)] == [
        "0",
        "<0.01",
        "0.25",
        "18.8",
        "100",
        "12346",
    ]
    assert impl_order(["zeta", "crosscut", "single", "alpha"]) == ["single", "crosscut", "alpha", "zeta"]


def test_conclusions_have_tables_of_their_own() -> None:
    found = {sheet.title.split(",")[0]: sheet for sheet in sheets(bench_record())}
    assert list(found) == ["Verdicts", "Latency and rate", "Crossovers", "Simulated algorithms", "Pairs", "All rows"]
    assert column(found["Verdicts"], "level") == ["good"]
    fits = found["Latency and rate"]
    assert fits.title == "Latency and rate, redop sum, mode graph, world 2, dtype bfloat16"
    assert column(fits, "impl") == ["nccl", "torch_one_shot", "crosscut"]
    assert column(fits, "sizes") == ["1 KiB to 1 GiB"] * 3
    assert column(fits, "alpha us")[0].startswith("11 ± ")
    assert column(fits, "half size")[0] == "3.1 MiB"
    assert column(found["Crossovers"], "faster below") == ["torch_one_shot", "crosscut"]
    steps = found["Simulated algorithms"]
    assert [cell.text for cell in steps.rows[0]] == [
        *("ring", "all_reduce", "4", "1 MiB", "6", "24", "1.5 MiB", "1.5 MiB"),
        "2(n-1)/n x S = 1.5 MiB",
    ]
    assert column(found["Pairs"], "pair")[:2] == ["0 to 1", "0 and 1"]
    assert set(column(found["All rows"], "place")) == {"in", "out"}
    assert len(found["All rows"].rows) == 66, "no conclusion, no pair among them"


def test_the_terminal_shows_rows_then_conclusions() -> None:
    text = printed(bench_record(), 120)
    assert max(map(len, text.splitlines())) <= 120
    places = [text.index(part) for part in ("All rows", "Pairs", "Verdicts", "Latency and rate", "Crossovers", "Simulated")]
    assert places == sorted(places)


def test_a_damaged_conclusion_is_shown_as_far_as_it_goes() -> None:
    odd = {"op": ["x"], "steps": [{"src": 0}, [{"src": "0", "dst": 1, "bytes": 2}, 7]], "sent": [None, "x"], "formula": 3}
    rows = [Row(subject, "ring", "eager", 2, "float32", extra=odd) for subject in ("fit", "crossover", "verdict", "simulate")]
    run = record(rows, notes=["still here"])
    assert "still here" in printed(run)
    assert "['x']" in printed(run)
