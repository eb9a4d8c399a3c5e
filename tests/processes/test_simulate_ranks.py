"""Simulations on real processes: every plan gives the right result, the counts are the plan's, a planted fault is located."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.bench.schedules import ALGORITHMS, formula, ops, schedule
from crosscut.bench.simulate import SimulateConfig, simulate
from crosscut.cli import bench_simulate
from crosscut.distributed.join import RankContext
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.errors import MismatchError
from crosscut.records import Row, RunRecord

UNEVEN = 4 * 1003


def every_plan(ctx: RankContext, world: int, nbytes: int) -> list[Row]:
    """One row for each algorithm and op, and at the end two of a broken plan: a message left out, a sum overwritten."""
    configs = [SimulateConfig(algorithm, op, world, nbytes) for algorithm in ALGORITHMS for op in ops(algorithm)]
    rows = [simulate(ctx, config).rows[0] for config in configs]
    dropped = schedule("ring", "all_reduce", world, nbytes)
    del dropped[-1][1]
    copied = schedule("one-shot", "all_reduce", world, nbytes)
    copied[0][0] = replace(copied[0][0], reduce=False)
    rows.append(simulate(ctx, configs[0], dropped).rows[0])
    rows.append(simulate(ctx, SimulateConfig("one-shot", "all_reduce", world, nbytes), copied).rows[0])
    return rows


def test_every_plan_on_three_ranks() -> None:
    rows = run(every_plan, (3, UNEVEN), LaunchConfig(3, "gloo", "cpu"))
    assert rows is not None
    *right, dropped, copied = rows
    assert len(right) == 11
    for row in right:
        algorithm, op = row.impl, row.extra["op"]
        assert row.error == 0, f"{algorithm} {op}: {row.extra.get('first_wrong')}"
        plan = schedule(algorithm, op, 3, UNEVEN)
        assert row.extra["steps"] == [
            [{"src": m.src, "dst": m.dst, "bytes": m.nbytes} for m in sorted(step, key=lambda m: (m.src, m.dst))]
            for step in plan
        ]
        assert sum(row.extra["sent"]) == sum(row.extra["received"]) == sum(m.nbytes for step in plan for m in step)
        assert len(row.extra["steps"]) == row.extra["formula"]["steps"] == formula(algorithm, op, 3, UNEVEN).steps
    # left out: the last step's message to rank 2, which so keeps an unfinished chunk
    assert dropped.extra["first_wrong"]["rank"] == 2
    assert dropped.extra["wrong"] in (334, 335)
    # rank 0's message to rank 1 overwrites what should have been added to
    assert copied.extra["first_wrong"]["rank"] == 1
    assert copied.extra["first_wrong"]["index"] == 0
    assert copied.error == float("inf")


def test_more_ranks_than_cores_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_simulate.simulate("ring", "all_reduce", 4, "4K", False, tmp_path / "ring.json")
    shown = capsys.readouterr().out
    assert "ring all_reduce: 4 KiB in 4 chunks of 1 KiB" in shown
    assert "6 steps and 24 messages were counted" in shown
    assert "Every element of the result is right" in shown
    row = RunRecord.read(tmp_path / "ring.json").rows[0]
    assert row.extra["sent"] == [6 * 1024] * 4
    assert (row.subject, row.impl, row.world, row.bytes, row.error) == ("simulate", "ring", 4, 4096, 0.0)


def test_a_wrong_result_ends_in_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Row("simulate", "ring", "host", 2, "float32", bytes=64, extra={"op": "all_reduce", "wrong": 3})
    record = RunRecord("bench collectives", {}, None, {}, [broken])  # type: ignore[arg-type]
    monkeypatch.setattr(bench_simulate, "run_on_ranks", lambda *_: record)
    with pytest.raises(MismatchError, match="3 elements of the result are wrong"):
        bench_simulate.simulate("ring", "all_reduce", 2, "64", True, None)
    assert '"wrong": 3' in capsys.readouterr().out
