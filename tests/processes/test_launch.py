"""Real processes: starting ranks, joining ranks that others started, and every way in which that ends badly."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import rank_functions
import torch.distributed as dist

from crosscut.distributed import join
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.distributed.rank_main import as_failure, is_echo
from crosscut.distributed.supervise import Death, Failure, Supervisor, first_failure
from crosscut.env import RankEnv, settings
from crosscut.errors import CollectiveTimeout, CrosscutError, RankError, UsageError

SCRIPT = Path(rank_functions.__file__)
SOON = 5.0
"""Seconds within which a failure must have ended everything."""
START = 30.0
"""Seconds that starting two ranks may take on a busy machine."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PMI", "OMPI_", "TORCHELASTIC_", "CROSSCUT_")


def _environ(**extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**clean, "PYTHONPATH": os.pathsep.join(sys.path), **extra}


@contextmanager
def _script(*args: str, command: tuple[str, ...] = (sys.executable,), **extra: str) -> Iterator[subprocess.Popen[str]]:
    """``rank_functions.py ARGS`` in a session of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(
        [*command, str(SCRIPT), *args],
        env=_environ(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=START)
    return process.returncode, out, err


def _session(leader: int) -> list[str]:
    """Names of the live processes of a session: /proc/PID/stat is 'PID (NAME) STATE PPID PGRP SESSION ...'."""
    names = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            head, _, tail = stat.read_text().rpartition(")")
            state, _, _, session = tail.split()[:4]
            if int(session) == leader and state not in "ZX":
                names.append(head.partition("(")[2])
    return names


def _wait_until_gone(leader: int, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (left := _session(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _wait_for_line(process: subprocess.Popen[str], words: str, times: int) -> None:
    assert process.stderr is not None
    seen = []
    while sum(words in line for line in seen) < times:
        seen.append(process.stderr.readline())
        assert seen[-1], f"ended before {words!r}: {seen}"


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _failure(capsys: pytest.CaptureFixture[str], name: str, *args: str) -> CrosscutError:
    """What ``run`` raises when a rank fails on purpose, which must end everything soon after it said so."""
    with pytest.raises(CrosscutError) as caught:
        run(getattr(rank_functions, name), args, LaunchConfig(2))
    end = time.monotonic()
    out, err = capsys.readouterr()
    said = re.fullmatch(r"\[rank [01]\] failing at (\S+)\n", err)
    assert said is not None, err
    assert end - float(said.group(1)) < SOON
    assert out == ""
    assert multiprocessing.active_children() == []
    return caught.value


def test_ranks_compute_print_and_report() -> None:
    with _script("tour", "2", "30") as process:
        code, out, err = _finish(process)
    assert code == 0, err
    cores = len(os.sched_getaffinity(0))
    result = json.loads(out)  # nothing but the result on standard output
    assert result == {
        "sum": 3.0,
        "name": "crosscut r0/2",
        "threads": int(os.environ.get("OMP_NUM_THREADS", max(1, cores // 2))),
        "backend": "gloo",
        "device": "cpu",
        "interface": "lo",
        "sigint_blocked": True,
    }
    lines = err.splitlines()
    for rank in (0, 1):
        for words in (f"out of {rank}", f"err of {rank}", "last words"):
            assert lines.count(f"[rank {rank}] {words}") == 1, err
    progress = [line for line in lines if line.startswith("progress")]
    assert progress[0] == "progress 0 rank 0 step 0"
    assert progress[-1] == "progress 1 rank 0 done"
    assert 3 <= len(progress) <= 10, "0.4 s at ten reports a second"
    assert len(lines) == 6 + len(progress), "no word of torch's own"


def test_one_rank_needs_no_process() -> None:
    assert run(rank_functions.add, (0.5,), LaunchConfig(1, device="cpu")) == [1, 1.5]
    with pytest.raises(RankError, match=r"rank 0 of 1 failed: TypeError") as caught:
        run(rank_functions.add, ("text",), LaunchConfig(1, device="cpu"))
    assert caught.value.code == "rank-failed"


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (LaunchConfig(0), "bad-option"),
        (LaunchConfig(2, backend="mpi"), "bad-option"),
        (LaunchConfig(2, device="tpu"), "bad-option"),
        (LaunchConfig(2, device="cpu", backend="nccl"), "no-backend"),
        (LaunchConfig(1024, device="cuda"), "tp-exceeds-gpus"),
    ],
)
def test_impossible_starts_are_refused_before_anything_starts(config: LaunchConfig, code: str) -> None:
    begin = time.monotonic()
    with pytest.raises(UsageError) as caught:
        run(rank_functions.add, (0.0,), config)
    assert caught.value.code == code
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("option", [{"backend": "nccll"}, {"device": "gpu"}, {"device": "cuda:1"}])
def test_a_world_of_one_refuses_what_more_ranks_would(option: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="is not known") as caught:
        join.init_mesh(**option)  # type: ignore[arg-type]
    assert caught.value.code == "bad-option"


def test_more_ranks_than_pipes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pipe(duplex: bool) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("crosscut.distributed.supervise.Pipe", no_pipe)
    with pytest.raises(UsageError, match="9999 ranks cannot be started on this host: Too many open files"):
        run(print, (), LaunchConfig(9999, device="cpu"))


def test_own_error_of_a_rank_arrives_whole(capsys: pytest.CaptureFixture[str]) -> None:
    error = _failure(capsys, "fail_in_one", "usage")
    assert type(error) is UsageError
    assert (error.message, error.code, error.fix) == ("the size is wrong", "bad-size", "take another")


def test_other_error_names_rank_kind_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    error = _failure(capsys, "fail_in_one", "error")
    assert type(error) is RankError
    assert error.code == "rank-failed"
    assert error.message.startswith("rank 1 of 2 failed: ZeroDivisionError: a rank divided by zero (")
    assert f"{SCRIPT}:" in error.message
    assert "Traceback" not in error.message


def test_killed_rank_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = _failure(capsys, "fail_in_one", "kill")
    assert (error.code, error.message) == ("rank-died", "rank 1 of 2 was killed by SIGKILL")
    assert "dmesg" in str(error.fix)


def test_rank_that_leaves_with_code_0_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    error = _failure(capsys, "fail_in_one", "0")
    assert (error.code, error.message) == ("rank-died", "rank 1 of 2 left without a word")


def test_ranks_that_all_leave_with_code_0_are_missed() -> None:
    with pytest.raises(RankError, match=r"rank [01] of 2 left without a word"):
        run(rank_functions.leave_silently, (), LaunchConfig(2))


def test_rank_that_ignores_sigterm_is_ended_too(capsys: pytest.CaptureFixture[str]) -> None:
    error = _failure(capsys, "refuse_to_stop")
    assert error.message.startswith("rank 0 of 2 failed: ValueError: rank 0 is done for")


def test_a_rank_that_works_on_when_another_is_done_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(2, None, patience=0.1)
    supervisor.start()
    try:
        supervisor.wires[0].messages.send(("started", os.getpid()))
        supervisor.wires[0].messages.send(("done",))
        time.sleep(0.8)
    finally:
        supervisor.close()
    assert capsys.readouterr().err == "still waiting for rank 1: another rank ended 0.1 s ago (Ctrl-C ends all)\n"


def test_missed_collective_ends_at_the_deadline() -> None:
    with pytest.raises(CollectiveTimeout) as caught:
        run(rank_functions.miss_a_collective, (), LaunchConfig(2, timeout=2))
    assert caught.value.code == "rank-timeout"
    assert caught.value.message.startswith("rank 0 of 2 waited more than 2 s for another rank")


def test_two_runs_side_by_side_end_on_ctrl_c_and_sigterm() -> None:
    with _script("linger", "2", "30") as first, _script("linger", "2", "30") as second:
        for process in (first, second):
            _wait_for_line(process, "ready 3.0", 2)
            assert sum(name.startswith("crosscut r") for name in _session(process.pid)) == 2
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to all processes of the group
        os.kill(second.pid, signal.SIGTERM)
        for process, name in ((first, "SIGINT"), (second, "SIGTERM")):
            begin = time.monotonic()
            code, out, err = _finish(process)
            assert time.monotonic() - begin < SOON
            assert _wait_until_gone(process.pid, 1) == []
            assert (code, out, err) == (1, "", f"interrupted: the run was ended by {name}\n")


def test_ranks_do_not_outlive_a_killed_parent() -> None:
    with _script("linger", "2", "30") as process:
        _wait_for_line(process, "ready 3.0", 2)
        process.kill()
        assert _wait_until_gone(process.pid, SOON) == []


def _like_env(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2"}


def _like_mpirun(rank: int) -> dict[str, str]:
    open_mpi = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in open_mpi.items()}


def _like_srun(rank: int) -> dict[str, str]:
    slurm = {"PROCID": str(rank), "NTASKS": "2", "LOCALID": str(rank), "STEP_ID": "0", "JOB_ID": "7"}
    return {f"SLURM_{name}": value for name, value in slurm.items()} | {"SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize("like", [_like_env, _like_mpirun, _like_srun])
def test_joins_the_ranks_that_others_started(like) -> None:  # type: ignore[no-untyped-def]
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    with _script("add", "2", "30", "1", **like(0), **there) as zero, _script("add", "2", "30", "1", **like(1), **there) as one:
        assert _finish(zero) == (0, "[2, 4.0]\n", "")
        assert _finish(one) == (0, "null\n", "")


def test_joins_torchrun_and_echoes_stay_silent() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with _script("add_twice", "2", "30", command=torchrun) as process:
        code, out, err = _finish(process)
    assert code == 0, err
    assert sorted(out.split("\n")) == ["", "[3.0, 3.0]", "null"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on the PATH")
def test_joins_mpirun() -> None:
    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    options = ["--allow-run-as-root", "--oversubscribe"]
    if "Open MPI" not in told:  # MPICH tells its ranks nothing of a meeting point
        options = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", _free_port()]
    with _script("add_twice", "2", "30", command=("mpirun", *options, "-n", "2", sys.executable)) as process:
        code, out, err = _finish(process)
    assert code == 0, err
    assert sorted(out.split("\n")) == ["", "[3.0, 3.0]", "null"]


def test_world_of_another_size_is_refused() -> None:
    with _script("add", "4", "30", "1", **_like_env(1), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500") as process:
        code, _, err = _finish(process)
    assert code == 2
    assert err.startswith("tp-mismatch: 4 ranks were asked for, but this process is one of 2 started by env\n")


def test_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with _script("add", "2", "30", "1", **_like_env(0), MASTER_ADDR="127.0.0.1", MASTER_PORT=port) as process:
            code, _, err = _finish(process)
    assert code == 2
    assert err.startswith(f"port-in-use: port {port} ")


def test_rank_that_never_comes_is_named() -> None:
    there = {"MASTER_ADDR": "127.0.0.1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (
        _script("add", "2", "1", "1", **_like_env(0), **there, MASTER_PORT=_free_port()) as zero,
        _script("add", "2", "1", "1", **_like_env(1), **there, MASTER_PORT=_free_port()) as one,
    ):
        code, _, err = _finish(zero)
        assert code == 1
        assert err.startswith("rank-timeout: rank 1 of 2 did not arrive at 127.0.0.1:")
        code, _, err = _finish(one)
        assert code == 1
        assert "rank-timeout: rank 0, which serves the rendezvous, did not arrive at 127.0.0.1:" in err


def _world(rank: int, port: int = 29500, attempt: int = 0) -> RankEnv:
    return RankEnv(rank, 2, rank, 2, "127.0.0.1", port, "env", attempt=attempt)


def test_ranks_that_are_started_anew_meet_in_a_store_that_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --max-restarts keeps its store; rank 1 died before it came the first time, so it has counted fewer runs."""
    store = dist.HashStore()
    monkeypatch.setattr(join, "_connect", lambda env, timeout: store)
    with pytest.raises(RankError, match="rank 1 of 2 did not arrive"):
        join._rendezvous(_world(0), 0.2)
    with ThreadPoolExecutor() as ranks:
        zero, one = ranks.map(lambda rank: join._rendezvous(_world(rank, attempt=1), 5), (0, 1))
    zero.set("word", "arrived")
    assert one.get("word") == b"arrived"


@pytest.mark.parametrize(("name", "value"), [("CROSSCUT_SCHEDULE", "pieces:4"), ("CROSSCUT_COLLECTIVES", "nccl")])
def test_ranks_with_other_settings_are_refused_on_all(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that exchanges in pieces and one that does not end each other without a sensible word."""
    store, rank = dist.HashStore(), threading.local()
    monkeypatch.setattr(join, "_connect", lambda env, timeout: store)
    monkeypatch.setattr(join, "settings", lambda: settings({name: value} if rank.mine else {}), raising=False)

    def meet(mine: int) -> str:
        rank.mine = mine
        with pytest.raises(UsageError, match=f"rank 0 runs with .*, and rank 1 with .*{name}={value}") as caught:
            join._rendezvous(_world(mine), 5)
        return caught.value.code

    with ThreadPoolExecutor() as ranks:
        assert list(ranks.map(meet, (0, 1))) == ["bad-env", "bad-env"]


def test_a_second_run_may_have_another_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 serves the store to the end of the process: the port is taken, by itself."""
    monkeypatch.setattr(join, "_STORES", {})
    env = _world(0, int(_free_port()))
    first = join._connect(env, 20)
    first.set("word", "kept")
    second = join._connect(env, 0.2)
    assert second.get("word") == b"kept"
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        second.get("nothing")
    assert time.monotonic() - begin < 5, "its own timeout holds"


_ERROR, _ECHO = RankError("own", code="rank-failed"), RankError("echo", code="rank-failed")


@pytest.mark.parametrize(
    ("failures", "death", "words"),
    [
        ([Failure(0, _ECHO, True, 0.0), Failure(1, _ERROR, False, 0.1)], Death(0, 1), "own"),
        ([Failure(0, _ECHO, True, 0.0)], Death(0, 1), "echo"),
        ([Failure(0, _ECHO, True, 0.0), Failure(1, None, False, 2.1)], Death(0, 1), "echo"),  # ended by torch's agent
        ([Failure(0, _ECHO, True, 0.0), Failure(1, None, False, 0.1)], Death(1, -9), "rank 1 of 2 was killed by SIGKILL"),
        ([Failure(1, None, False, 0.0), Failure(0, _ECHO, True, 0.1)], Death(0, 1), "rank 1 of 2 left without a word"),
        ([Failure(1, None, False, 0.0), Failure(0, None, False, 2.6)], Death(0, -9), "rank 1 of 2 left without a word"),
        ([Failure(1, None, False, 0.0)], Death(1, 3), "rank 1 of 2 exited with code 3 without a word"),
        ([], Death(1, 1), "rank 1 of 2 exited with code 1 before it started"),
        ([], Death(0, -99), "rank 0 of 2 was killed by signal 99"),
    ],
)
def test_first_failure_wins_and_echoes_come_last(failures: list[Failure], death: Death, words: str) -> None:
    assert first_failure(failures, death, 2).message == words


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4132"), True),
        (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), True),
        (dist.DistNetworkError("anything"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (CollectiveTimeout("late", code="rank-timeout"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("timeout must be positive"), False),
        (UsageError("connection closed", code="bad-size"), False),
    ],
)
def test_echoes_are_told_from_causes(error: Exception, echo: bool) -> None:
    assert is_echo(error) is echo


def test_a_lost_connection_is_told_in_plain_words() -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11188. GLHF!")
    shown = as_failure(error, 0, 2, 60.0, debug=False)
    assert shown.message == "rank 0 of 2 lost its connection to another rank, which ended or was killed (RuntimeError)"
    assert "pair.cc:553" in as_failure(error, 0, 2, 60.0, debug=True).message
    backend = dist.DistBackendError("NCCL error: unhandled system error")
    assert "unhandled system error" in as_failure(backend, 0, 2, 60.0, debug=False).message


def test_a_rank_out_of_memory_is_told_what_to_do() -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert "ask for less" in str(as_failure(error, 0, 2, 1.0, debug=False).fix)
    assert as_failure(ValueError("no"), 0, 2, 1.0, debug=False).fix is None


def test_debug_shows_the_traceback() -> None:
    try:
        raise ZeroDivisionError("here")
    except ZeroDivisionError as error:
        shown = as_failure(error, 1, 2, 60.0, debug=True)
    assert "Traceback (most recent call last)" in shown.message
    assert shown.message.endswith("ZeroDivisionError: here")
