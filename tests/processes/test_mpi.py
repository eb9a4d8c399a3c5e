"""Collectives over a real MPI: every case right, faults found, and no failure of a rank, of mpirun or of mpi4py left untold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from crosscut.bench import mpi
from crosscut.bench.collective_cases import CASES
from crosscut.bench.mpi import MpiConfig, measure
from crosscut.bench.mpi_rank import jobs
from crosscut.errors import CollectiveTimeout, RankError, UsageError

SOURCE = Path(__file__).parents[2] / "src"
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="no mpirun on the PATH, or no mpi4py"
)
QUICK = MpiConfig(2, ("all_reduce",), (1024,), seconds=0.001, timeout=30.0)


@pytest.fixture(autouse=True)
def ranks_find_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))


def patched_rank(folder: Path, monkeypatch: pytest.MonkeyPatch, patch: str) -> None:
    """Have mpirun start ranks in which ``patch`` (Python, sees ``mpi_rank``) has run."""
    script = folder / "rank.py"
    lines = ["import os, sys, time", "from crosscut.bench import mpi_rank", *patch.splitlines(), "sys.exit(mpi_rank.main())"]
    script.write_text("\n".join(lines))
    monkeypatch.setattr(mpi, "RANK", (sys.executable, str(script)))


def still_running(folder: Path) -> list[str]:
    """Command lines of processes that belong to the patched ranks in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@needs_mpi
def test_a_hypercube_is_right_on_four_ranks() -> None:
    rows, _ = measure(MpiConfig(4, ("hypercube",), (4096,), ("float32",), ("sum",), (False,), 0, 0.001), lambda *_: None)
    assert [(row.subject, row.world, row.error, row.extra["wrong"]) for row in rows] == [("hypercube", 4, 0.0, 0)]


@needs_mpi
def test_every_case_is_right_on_three_ranks() -> None:
    told: list[float] = []
    config = MpiConfig(3, tuple(CASES), (4096,), ("float32", "int8"), ("max", "avg"), (False, True), 2, 0.001)
    rows, notes = measure(config, lambda fraction, text: told.append(fraction))
    assert {row.subject for row in rows} == set(CASES) - {"hypercube"}
    for row in rows:
        right = None if row.subject == "barrier" else 0.0
        assert (row.error, row.extra["wrong"]) == (right, 0), f"{row.subject} {row.dtype}: {row.extra}"
        assert (row.impl, row.world, row.mode) == ("mpi", 3, "eager")
        assert row.us is not None
        assert 0 < row.us.p10 <= row.us.p50 <= row.us.p99
        assert len(row.extra["ranks_us"]) == 3
    reduced = [row for row in rows if row.subject == "all_reduce"]
    assert {(row.extra["redop"], row.extra["in_place"], row.dtype) for row in reduced} == {
        (redop, in_place, dtype) for redop in ("max", "avg") for in_place in (False, True) for dtype in ("float32", "int8")
    }
    one = next(row for row in reduced if row.bytes == 4096)
    assert one.us is not None
    assert one.algbw_gbps == pytest.approx(4096 / one.us.p50 / 1e3)
    assert one.busbw_gbps == pytest.approx(4096 / one.us.p50 / 1e3 * 4 / 3)
    assert {row.extra["root"] for row in rows if row.subject in ("broadcast", "reduce", "gather", "scatter")} == {2}
    assert [row.bytes for row in rows if row.subject == "barrier"] == [None] * 2  # once for each dtype
    assert any("reduce_scatter in place is left out" in note for note in notes)
    assert told == sorted(told)
    assert len(told) == len(rows)


@needs_mpi
def test_a_planted_wrong_element_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched_rank(
        tmp_path,
        monkeypatch,
        "right = mpi_rank.CALLS['all_reduce']\n"
        "def wrong(call):\n"
        "    right(call)\n"
        "    if call.place.rank == 1: call.receive[7] += 1\n"
        "mpi_rank.CALLS['all_reduce'] = wrong",
    )
    record = mpi.run(QUICK)
    assert record is not None
    row = record.rows[0]
    first = row.extra["first_wrong"]
    assert (first["rank"], first["index"], first["got"] - first["expected"]) == (1, 7, 1.0)
    assert row.extra["wrong"] >= 1
    assert row.error is not None
    assert row.error > 0
    assert record.config["correct"] is False
    assert any(
        note.startswith("WRONG: all_reduce by mpi (eager, 1 KiB): ") and "element 7 on rank 1" in note for note in record.notes
    )


@needs_mpi
def test_a_rank_that_hangs_is_ended_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched_rank(
        tmp_path,
        monkeypatch,
        "def hang(call):\n    if call.place.rank == 1: time.sleep(100)\n    call.comm.Barrier()\n"
        "mpi_rank.CALLS['all_reduce'] = hang",
    )
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"2 ranks of mpirun were silent for 6 s") as caught:
        measure(MpiConfig(**{**asdict(QUICK), "timeout": 6.0}))
    assert caught.value.code == "rank-timeout"
    assert time.monotonic() - start < 6 + mpi.GRACE + 3
    assert still_running(tmp_path) == []


@needs_mpi
def test_a_rank_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched_rank(
        tmp_path,
        monkeypatch,
        "def fail(call):\n    if call.place.rank == 1: raise ZeroDivisionError('planted')\n    call.comm.Barrier()\n"
        "mpi_rank.CALLS['all_reduce'] = fail",
    )
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: ZeroDivisionError: planted \(.*rank\.py:\d+\)"):
        measure(QUICK)
    assert still_running(tmp_path) == []


@needs_mpi
def test_a_rank_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched_rank(
        tmp_path,
        monkeypatch,
        "def die(call):\n    os.kill(os.getpid(), 9)\nmpi_rank.CALLS['all_reduce'] = die",
    )
    with pytest.raises(RankError, match=r"mpirun ended with code \d+: .*signal 9") as caught:
        measure(QUICK)
    assert caught.value.code == "rank-failed"


@needs_mpi
def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text("import os, sys, time\nopen(sys.argv[0] + '.started', 'w')\ntime.sleep(100)\n")
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys\nfrom crosscut.bench import mpi\n"
        f"mpi.RANK = (sys.executable, {str(rank)!r})\n"
        "mpi.measure(mpi.MpiConfig(2, ('all_reduce',), (1024,)))\n"
    )
    with subprocess.Popen([sys.executable, str(parent)]) as process:
        wait_until((tmp_path / "rank.py.started").exists)
        process.kill()
    wait_until(lambda: still_running(tmp_path) == [])


@needs_mpi
def test_under_mpirun_its_own_world_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import sys\n"
        "from mpi4py import MPI\n"
        "from crosscut.bench.mpi import MpiConfig, measure\n"
        "rows, notes = measure(MpiConfig(2, ('all_gather', 'barrier'), (1024,), seconds=0.001))\n"
        "with open(f'{sys.argv[1]}/{MPI.COMM_WORLD.rank}', 'w') as out:\n"
        "    out.write(str([(row.subject, row.error, row.world) for row in rows]))\n"
    )
    command = mpi.mpirun_command(QUICK)
    ranks = [*command[: command.index("-n") + 2], sys.executable, str(script), str(tmp_path)]
    subprocess.run(ranks, capture_output=True, check=True, timeout=60)
    assert (tmp_path / "0").read_text() == "[('all_gather', 0.0, 2), ('barrier', None, 2)]"
    assert (tmp_path / "1").read_text() == "[]"


def test_users_mistakes_are_told_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="did you mean 'all_reduce'") as caught:
        measure(MpiConfig(2, ("all_redcue",), (1024,)))
    assert (caught.value.code, caught.value.exit_code) == ("bad-option", 2)
    with pytest.raises(UsageError, match="root 5 of 2 ranks"):
        measure(MpiConfig(2, ("broadcast",), (1024,), root=5))


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="mpi4py, which is not installed") as caught:
        measure(QUICK)
    assert (caught.value.code, caught.value.fix) == ("extra-missing", "pip install 'crosscut[mpi]'")
    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="mpirun, which is not on the PATH") as caught:
        measure(QUICK)
    assert "openmpi-bin" in str(caught.value.fix)


def test_ranks_of_other_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="ranks that env started") as caught:
        measure(QUICK)
    assert caught.value.code == "no-backend"
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="2 ranks were asked for, but this process is one of 3"):
        measure(QUICK)


def test_mpirun_that_cannot_start_ranks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'HYDRA' && exit 0\necho 'no slots' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    assert mpi.mpirun_command(QUICK)[:3] == [str(fake), "-n", "2"]  # not Open MPI: none of its options
    with pytest.raises(RankError, match="mpirun ended with code 3: no slots"):
        measure(QUICK)


def test_lines_that_are_no_messages_are_passed_over() -> None:
    assert mpi._message(b"[host:1] Read -1, expected 65536\n") == {}
    assert mpi._message(b"[1, 2]") == {}
    assert mpi._message(b'{"note": "x"}') == {"note": "x"}


def test_what_mpi_cannot_do_is_left_out_with_a_note() -> None:
    notes: list[str] = []
    config = MpiConfig(
        4, ("all_reduce", "all_gather", "scatter"), (1024, 1 << 40), ("bfloat16", "float32"), in_place=(False, True)
    )
    found = jobs(config, lambda kind, value: notes.append(value))
    assert {(job.case.name, job.count, job.in_place) for job in found if str(job.dtype) == "torch.bfloat16"} == {
        ("all_gather", 128, False), ("all_gather", 128, True), ("scatter", 128, False),
    }  # fmt: skip
    assert sum("MPI does not compute in bfloat16" in note for note in notes) == 1
    assert any("all_gather of more than 2147483647 elements" in note for note in notes)
    assert any("scatter in place" in note for note in notes)
