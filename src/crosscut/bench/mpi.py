"""The collectives over MPI: mpirun is started here, its ranks measure (:mod:`crosscut.bench.mpi_rank`), the rows come back.

A process that mpirun itself started measures in the world that it is part of. Rank 0 writes one line of JSON for each
row, so a silence longer than the deadline means that a rank hangs: then mpirun, and with it every rank, is ended.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import IO, Any

from crosscut.bench.collective_cases import CASES
from crosscut.bench.context import hardware, versions
from crosscut.bench.extend import extend
from crosscut.distributed.mesh import make_mesh
from crosscut.distributed.progress import OnProgress
from crosscut.env import rank_env
from crosscut.errors import CollectiveTimeout, CrosscutError, RankError, UsageError, choose
from crosscut.records import Row, RunRecord, Times, now, source_commit

RANK = (sys.executable, "-m", "crosscut.bench.mpi_rank")
"""The command that mpirun starts, before its configuration."""
_BOUND = (
    sys.executable,
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])",
)
"""Becomes the command behind it, which then gets SIGTERM when this process dies (PR_SET_PDEATHSIG)."""
GRACE = 5.0
"""Seconds that mpirun has to end its ranks before it is killed; they die with it."""


@dataclass(frozen=True)
class MpiConfig:
    """What to measure: every op with every dtype, reduction (where it has one), size and place."""

    world: int
    ops: tuple[str, ...]
    """Names of bench.collective_cases.CASES."""
    sizes: tuple[int, ...]
    """In bytes, as nccl-tests counts them."""
    dtypes: tuple[str, ...] = ("float32",)
    redops: tuple[str, ...] = ("sum",)
    in_place: tuple[bool, ...] = (False,)
    root: int = 0
    seconds: float = 0.1
    """How long each case is sampled, about."""
    seed: int = 0
    device: str = "cpu"
    """cuda: the tensors lie on GPUs, and MPI's calls include the copies to and from host memory."""
    timeout: float = 60.0
    """Seconds that any one case may take before a rank counts as hung."""


Found = tuple[list[Row], list[str]]
"""Rows, and notes on what was left out or staged."""


def run(config: MpiConfig, record: RunRecord | None = None, on_progress: OnProgress | None = None) -> RunRecord | None:
    """``record`` (of the same run's other implementations) with MPI's rows, or without one a new record of MPI alone.

    None on the ranks of mpirun other than rank 0. Raises as :func:`measure`.
    """
    started = now()
    rows, notes = measure(config, on_progress)
    env = rank_env()
    if env is not None and env.rank != 0:
        return None
    mesh = make_mesh(device="cpu")
    base = record or RunRecord(
        command="bench collectives",
        config=asdict(config) | {"tp": config.world, "backend": "mpi"},
        hardware=replace(hardware(mesh), count=config.world),
        versions=versions(mesh) | {"mpi4py": version("mpi4py")},
        rows=[],
        commit=source_commit(),
        started=started,
    )
    return extend(base, rows, notes)


def measure(config: MpiConfig, on_progress: OnProgress | None = None) -> Found:
    """Measure over MPI: rows as ``crosscut bench collectives`` has them, with impl ``mpi``, and notes.

    In a process that mpirun started all ranks call this alike; rank 0 gets the rows, the others none. To be called where
    no process group is waiting: not inside the ranks that crosscut or torchrun started.
    Raises UsageError: ``extra-missing`` (mpi4py or mpirun), ``tp-mismatch`` (the world of mpirun has another size),
    ``no-backend`` (these ranks were started by something else), ``bad-option`` (an unknown op, a root that is no rank);
    RankError (``rank-failed``) and CollectiveTimeout (``rank-timeout``).
    """
    for op in config.ops:
        choose("collective", op, CASES)
    if not 0 <= config.root < config.world:
        raise UsageError(
            f"root {config.root} of {config.world} ranks", code="bad-option", fix=f"use a rank from 0 to {config.world - 1}"
        )
    _need_mpi4py()
    env = rank_env()
    if env is None:
        return _started(config, on_progress)
    if env.launcher not in ("mpirun", "pmi"):
        raise UsageError(
            f"MPI cannot be measured by ranks that {env.launcher} started",
            code="no-backend",
            fix=f"run the command without {env.launcher} (crosscut starts mpirun itself), or under mpirun",
        )
    if env.world_size != config.world:
        raise UsageError(
            f"{config.world} ranks were asked for, but this process is one of {env.world_size} started by {env.launcher}",
            code="tp-mismatch",
            fix=f"start {config.world} ranks with {env.launcher}, or ask for {env.world_size}",
        )
    from crosscut.bench.mpi_rank import measure_here

    return measure_here(config)


def _need_mpi4py() -> None:
    if find_spec("mpi4py") is None:
        raise UsageError("MPI needs mpi4py, which is not installed", code="extra-missing", fix="pip install 'crosscut[mpi]'")


def mpirun_command(config: MpiConfig) -> list[str]:
    """The command line that starts the ranks. Raises UsageError (``extra-missing``) when there is no mpirun."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise UsageError(
            "MPI needs mpirun, which is not on the PATH",
            code="extra-missing",
            fix="install an MPI: on Debian and Ubuntu apt-get install openmpi-bin",
        )
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    options: list[str] = []
    if "Open MPI" in told or "OpenRTE" in told:  # MPICH knows none of these, and needs none
        options = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    return [mpirun, *options, "-n", str(config.world), *RANK, json.dumps(asdict(config))]


def _started(config: MpiConfig, on_progress: OnProgress | None) -> Found:
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryFile() as errors, _process(mpirun_command(config), errors) as process:
        for line in _lines(process, config):
            message = _message(line)
            if "row" in message:
                rows.append(Row(**{**message["row"], "us": Times(**message["row"]["us"])}))
            elif "note" in message:
                notes.append(message["note"])
            elif "progress" in message and on_progress is not None:
                on_progress(*message["progress"])
            elif "error" in message:
                raise _as_error(message["error"])
        code = process.wait()
        if code != 0:
            raise RankError(f"mpirun ended with code {code}: {_last_words(errors)}", code="rank-failed")
    return rows, notes


@contextmanager
def _process(command: list[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """mpirun, which is ended with all its ranks when the block is left, however that happens."""
    process = subprocess.Popen(
        [*_BOUND, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _lines(process: subprocess.Popen[bytes], config: MpiConfig) -> Iterator[bytes]:
    """What the ranks write, line by line. Raises CollectiveTimeout when nothing comes for ``config.timeout`` seconds."""
    assert process.stdout is not None, "mpirun's output is a pipe"
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        deadline = time.monotonic() + config.timeout
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise CollectiveTimeout(
                    f"the {config.world} ranks of mpirun were silent for {config.timeout:g} s: one of them hangs",
                    code="rank-timeout",
                    fix="if the case is only slow, raise CROSSCUT_TIMEOUT; else try mpirun with another program",
                )
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            deadline = time.monotonic() + config.timeout
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def _message(line: bytes) -> dict[str, Any]:
    """One line as a message; empty for what an MPI library itself writes."""
    with suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    return {}


def _as_error(told: dict[str, Any]) -> CrosscutError:
    kind = UsageError if told["usage"] else RankError
    return kind(told["message"], code=told["code"], fix=told["fix"])


def _last_words(errors: IO[bytes]) -> str:
    """The last lines of what mpirun and the ranks wrote to standard error, without Open MPI's rulers."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
    told = [line for line in lines if line and not set(line) <= {"-"}]
    return " / ".join(told[-6:]) or "no message"
