"""bench collectives over gloo processes, and its command line: table, CSV, record, exit codes, one message for a mistake."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from crosscut.bench import collectives
from crosscut.bench.collective_cases import CASES
from crosscut.cli.bench_collectives import collectives as command
from crosscut.cli.bench_collectives import lines, show
from crosscut.distributed.launch import LaunchConfig, RankContext, run
from crosscut.errors import CrosscutError
from crosscut.records import Hardware, Row, RunRecord, Times

app = typer.Typer()
app.command()(command)


def measure(ctx: RankContext, **config: Any) -> RunRecord:
    return collectives.run(ctx, collectives.CollectivesConfig(ctx.world_size, **config))


def sweep(ctx: RankContext) -> list[RunRecord]:
    """Every collective in and out of place and every pair; reductions that rank threads lack; the host's mode."""
    quick: dict[str, Any] = {"sizes": (3000,), "seconds": 0.001}
    return [
        measure(ctx, root=1, pairs=True, **quick),
        measure(ctx, ops=("all_reduce", "reduce", "reduce_scatter"), redops=("min", "prod"), dtype="int8", **quick),
        measure(ctx, ops=("all_reduce", "all_gather"), redops=("avg", "sum"), dtype="int32", modes=("host",), **quick),
    ]


def test_every_collective_is_exact_over_gloo() -> None:
    records = run(sweep, (), LaunchConfig(2, "gloo", "cpu"))
    assert records is not None
    every, small, whole = records
    for record in records:
        assert record.config["correct"] is True, record.notes
    places = {(row.subject, row.extra["in_place"]) for row in every.rows if row.us and row.subject != "pair"}
    assert places == {(name, place) for name, case in CASES.items() for place in (False, True) if case.in_place or not place}
    assert {row.mode for row in whole.rows if row.us} == {"host"}
    pairs = [(row.extra["src"], row.extra["dst"], row.extra["direction"]) for row in every.rows if row.subject == "pair"]
    assert sorted(pairs) == sorted([(0, 1, "uni"), (1, 0, "uni"), (0, 1, "bi")] * 2)
    assert {row.extra["redop"] for row in small.rows if row.us} == {"min", "prod"}
    assert {row.extra.get("redop") for row in whole.rows if row.us} == {"sum", None}
    assert any(note.startswith("gloo did not run all_reduce avg of int32: ") for note in whole.notes)
    sizes = {row.subject: row.bytes for row in every.rows if row.us and row.extra.get("in_place") is False}
    assert (sizes["all_reduce"], sizes["all_gather"], sizes["barrier"]) == (3000, 3000, None)


def by_messages(ctx: RankContext) -> RunRecord:
    return measure(ctx, root=2, ops=("incast", "multicast", "hypercube"), sizes=(4096,), seconds=0.001)


def test_message_patterns_are_exact_on_four_ranks() -> None:
    record = run(by_messages, (), LaunchConfig(4, "gloo", "cpu"))
    assert record is not None
    assert record.config["correct"] is True, record.notes
    assert {row.subject for row in record.rows if row.us} == {"incast", "multicast", "hypercube"}


def test_the_command_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    record, rows = tmp_path / "record.json", tmp_path / "rows.csv"
    asked = ["--tp", "2", "--op", "all_reduce,all_gather", "-b", "1K", "-e", "16K", "--dtype", "half", "--seconds", "0.001"]
    done = CliRunner().invoke(app, [*asked, "--device", "cpu", "--out", str(record), "--csv", str(rows)])
    assert done.exit_code == 0, done.stderr
    shown = done.stdout.splitlines()
    assert shown[0] == "# all_reduce, gloo, eager, 2 ranks"
    assert shown[2].split() == ["size", "count", "type", "redop", "root", *["time", "algbw", "busbw", "#wrong"] * 2]
    assert [line.split()[:5] for line in shown[4:7]] == [
        [str(b), str(b // 2), "half", "sum", "-1"] for b in (1024, 4096, 16384)
    ]
    assert max(map(len, shown[:14])) <= 100
    assert any(line.startswith("All 12 results are exact") for line in shown)
    with rows.open(newline="", encoding="utf-8") as lines_of:
        table = list(csv.DictReader(lines_of))
    assert [row["bytes"] for row in table[:6]] == ["1024", "1024", "4096", "4096", "16384", "16384"]
    assert all(float(row["p10_us"]) <= float(row["p50_us"]) for row in table[:12])
    assert len(RunRecord.read(record).rows) == len(table)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--op", "allreduce"], "did you mean 'all_reduce'?"),
        (["--redop", "sume"], "reduction 'sume' is not known"),
        (["--dtype", "fp7"], "dtype 'fp7' is not known"),
        (["--impl", "ncl"], "implementation 'ncl' is not known"),
        (["--mode", "lazy"], "mode 'lazy' is not known"),
        (["--sizes", "1K", "-b", "1K"], "were both given"),
        (["--root", "2"], "the root 2 is not one of the 2 ranks"),
        (["--tp", "1"], "one rank has nobody to talk to"),
        (["--csv", "/nowhere/rows.csv"], "the folder '/nowhere' does not exist"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(asked: list[str], words: str) -> None:
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, CrosscutError)
    assert done.exception.exit_code == 2
    assert words in done.exception.message


def row(impl: str, size: int, in_place: bool, **extra: Any) -> Row:
    facts = {"redop": "sum", "in_place": in_place, "count": size // 2, "wrong": 0}
    return Row("all_reduce", impl, "graph", 2, "bfloat16", bytes=size, us=Times.of([3.0]), n=1,
               algbw_gbps=1.0, busbw_gbps=1.5, error=0.0, extra=facts | extra)  # fmt: skip


def wrong_record() -> RunRecord:
    rows = [row(impl, size, place) for size in (1024, 1 << 30) for impl in ("nccl", "crosscut") for place in (False, True)]
    rows[0].extra["wrong"] = 7
    where = {"op": "all_reduce", "redop": "sum", "below": "crosscut", "above": "nccl", "bytes": 1 << 20}
    crossing = Row("crossover", "crosscut", "graph", 2, "bfloat16", extra=where)
    return RunRecord("bench collectives", {"tp": 2, "correct": False}, Hardware("none", 2), {}, [*rows, crossing])


def test_implementations_get_a_table_each_and_columns_never_touch() -> None:
    shown = list(lines(wrong_record()))
    assert [line for line in shown if line.startswith("#")] == [
        "# all_reduce, nccl, graph, 2 ranks", "# all_reduce, crosscut, graph, 2 ranks", "# crossover sizes",
    ]  # fmt: skip
    assert shown[4].split() == [
        "1024",
        "512",
        "bfloat16",
        "sum",
        "-1",
        "3.00",
        "1.00",
        "1.50",
        "7",
        "3.00",
        "1.00",
        "1.50",
        "0",
    ]
    assert [line.split()[0] for line in shown[4:6]] == ["1024", str(1 << 30)]
    assert "all_reduce sum, graph: crosscut is faster below 1 MiB, nccl above" in shown


def test_wrong_elements_end_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscut.cli.bench_collectives.run_on_ranks", lambda *_: wrong_record())
    done = CliRunner().invoke(app, [])
    assert isinstance(done.exception, CrosscutError)
    assert (done.exception.exit_code, done.exception.code) == (1, "result-differs")


def test_json_is_the_record_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(wrong_record(), True, None, None)
    assert len(RunRecord.from_json(capsys.readouterr().out).rows) == 9


def test_help_and_flags_need_no_torch() -> None:
    code = (
        "import sys, crosscut.cli.bench_collectives as c; c.read_sizes('1', '2', None, None); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
