"""Two records compared: what is matched, what is called a difference, and what the terminal and the page show of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from crosscut.cli.report import report
from crosscut.errors import UsageError
from crosscut.records import Hardware, Row, Times
from crosscut.report.compare import compare_records, comparison_sheet, differences
from crosscut.report.html import render
from report_samples import bench_record, collectives_record, linear_record, record, times


def row(us: Times, nbytes: int = 1024, path: str | None = None, **extra: object) -> Row:
    return Row("all_reduce", "nccl", "graph", 2, "bfloat16", bytes=nbytes, us=us, path=path, extra=extra)


def spread(p50: float, part: float) -> Times:
    return Times(p50 * (1 - part), p50, p50 * (1 + part), p50 * (1 + 2 * part))


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (spread(20, 0.05), spread(10, 0.05), "faster"),
        (spread(10, 0.05), spread(20, 0.05), "slower"),
        (spread(20, 0.5), spread(16, 0.5), "not told apart"),
        (spread(10, 0.01), spread(9.9, 0.01), "not told apart"),
        (spread(10, 0.0), spread(9.9, 0.0), "faster"),
    ],
)
def test_a_difference_counts_when_the_spans_lie_apart(before: Times, after: Times, outcome: str) -> None:
    (match,) = compare_records(record([row(before)]), record([row(after)])).matches
    assert match.outcome == outcome
    assert match.ratio == pytest.approx(before.p50 / after.p50)


def test_a_record_equals_itself() -> None:
    comparison = compare_records(linear_record(), linear_record())
    assert len(comparison.matches) == len(linear_record().rows)
    assert {match.outcome for match in comparison.matches} == {"not told apart"}
    assert (comparison.only_a, comparison.only_b, comparison.differences) == (0, 0, [])
    assert "geometric mean 1.00x." in comparison.summary


def test_what_was_measured_must_be_the_same() -> None:
    base = row(times(10.0), redop="sum", in_place=False)
    others = [
        replace(base, subject="all_gather"),
        replace(base, impl="gloo"),
        replace(base, mode="eager"),
        replace(base, world=4),
        replace(base, dtype="float32"),
        replace(base, bytes=2048),
        replace(base, shape={"tokens": 1}),
        *(replace(base, extra={**base.extra, **more}) for more in ({"redop": "max"}, {"in_place": True}, {"root": 1})),
    ]
    comparison = compare_records(record([base]), record(others))
    assert (comparison.matches, comparison.only_a, comparison.only_b) == ([], 1, len(others))
    assert comparison.summary == "No timed row of one record has a counterpart in the other."
    told = replace(base, path="ring", n=7, note="x", extra={**base.extra, "ranks_us": [1.0, 2.0], "spread": 0.2})
    assert len(compare_records(record([base]), record([told])).matches) == 1, "how it came out is not what was measured"


def test_the_path_tells_rows_apart_that_measured_the_same() -> None:
    before = [row(times(10.0), path="lanes"), row(times(20.0), path="blocks")]
    after = [row(times(40.0), path="blocks"), row(times(10.0), path="lanes")]
    matches = compare_records(record(before), record(after)).matches
    assert [(match.a.path, match.ratio) for match in matches] == [("blocks", 0.5), ("lanes", 1.0)]


def test_sure_and_large_effects_come_first() -> None:
    before = [row(spread(10, 0.01), size) for size in (1, 2, 3, 4)]
    after = [row(spread(us, part), size) for size, us, part in ((1, 9, 0.01), (2, 30, 0.01), (3, 10, 0.01), (4, 99, 1.0))]
    comparison = compare_records(record(before), record(after))
    assert [match.a.bytes for match in comparison.matches] == [2, 1, 4, 3]
    assert "4 rows that measured the same: 1 faster, 1 slower, 2 not told apart" in comparison.summary


def test_rows_without_a_time_and_conclusions_are_not_compared() -> None:
    comparison = compare_records(bench_record(), bench_record(2.0))
    assert {match.a.subject for match in comparison.matches} == {"all_reduce", "pair"}
    faster = [match for match in comparison.matches if match.a.subject == "all_reduce"]
    assert {match.outcome for match in faster} == {"faster"}
    assert {round(match.ratio, 6) for match in faster} == {2.0}


def test_other_differences_are_named() -> None:
    a = record([], hardware=Hardware("NVIDIA H100", 2, [["-", "NV18"], ["NV18", "-"]], "570"))
    b = record([], hardware=Hardware("NVIDIA H200", 2, [["-", "SYS"], ["SYS", "-"]], "570"), commit=None)
    versions = {"torch": "2.11.0", "cuda": "13.0", "python": "3.11.7", "crosscut": "0.1.0"}
    assert differences(a, replace(b, versions=versions)) == [
        "device NVIDIA H100 and NVIDIA H200",
        "links NV18 and SYS",
        "torch 2.13.0 and 2.11.0",
        "nccl 2.28.9 and not known",
        "commit 1a2b3c4d5e6f and not known",
    ]


def test_the_sheet_shows_both_medians_with_their_spans() -> None:
    sheet = comparison_sheet(compare_records(bench_record(), bench_record(2.0)))
    cells = dict(zip([column.name for column in sheet.columns], sheet.rows[0], strict=True))
    assert sheet.title == "Rows of both records, world 2"
    assert cells["ratio"].text == "2.00x"
    assert cells["B is"].text == "faster"
    assert (cells["A us"].value or 0) == pytest.approx(2 * float(cells["B us"].value or 0))
    assert re.fullmatch(r"[\d.]+–[\d.]+", cells["A us"].below)
    assert {"0 to 1", "0 and 1"} <= {row[4].text for row in sheet.rows}


def test_the_page_compares_the_first_record_with_each_other_one() -> None:
    page = render([bench_record(), bench_record(2.0), collectives_record()], ["first", "second", "third"])
    assert page.count("B against A, 102 rows that measured the same: 66 faster") == 1
    assert page.count("B: second") == page.count("B: third") == 1
    assert "<h2>Comparison" not in render([bench_record()], ["first"])
    order = [page.index(part) for part in ("<h2>Charts", "<h2>Comparison", "<h2>Tables")]
    assert order == sorted(order)


def run(*args: str) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    app.command()(report)
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.stdout, result.exception


def test_the_command_prints_the_comparison_and_writes_a_page_only_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = bench_record().write(tmp_path / "a.json"), bench_record(2.0, commit="other").write(tmp_path / "b.json")
    code, text, _ = run(str(a), str(b), "--compare")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 120
    assert sum("2.00x  faster" in line for line in text.splitlines()) == 66
    assert "torch_one_shot " in text, "no name is broken"
    assert "B against A, 102 rows" in text
    assert "They also differ in commit 1a2b3c4d5e6f and other." in text
    assert not list(tmp_path.glob("*.html"))
    code, text, _ = run(str(a), str(b), "--compare", "--out", "page.html")
    assert (code, text.splitlines()[-1]) == (0, "page.html")
    assert "<h2>Comparison" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_one_record_cannot_be_compared(tmp_path: Path) -> None:
    _, _, error = run(str(bench_record().write(tmp_path / "a.json")), "--compare")
    assert isinstance(error, UsageError)
    assert (error.code, "two records" in error.message) == ("bad-option", True)
    _, _, error = run(str(tmp_path / "a.json"), str(tmp_path / "none.json"), "--compare")
    assert isinstance(error, UsageError)
    assert error.code == "file-missing"
