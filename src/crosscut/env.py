"""The only reader of environment variables: crosscut's own settings, and who started this rank.

A setting with a wrong value raises; a ``CROSSCUT_`` variable that is not one of ours raises too, because a typo that is
silently ignored costs an afternoon.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from crosscut.errors import UsageError, choose, nearest

PREFIX = "CROSSCUT_"


def quiet_torch() -> None:
    """Keep torch's C++ warnings off the user's screen unless the user set a level; call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def exported(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset them) for what is started inside the block, and put back what was there before."""
    before = {name: os.environ.get(name) for name in values}
    _export(values)
    try:
        yield
    finally:
        _export(before)


def _export(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def cache_folder() -> Path:
    """Where compiled kernels and measured thresholds are kept: XDG_CACHE_HOME/crosscut, by default ~/.cache/crosscut."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crosscut"


@dataclass(frozen=True)
class Settings:
    """Values of the CROSSCUT_* variables."""

    timeout: float = 60.0
    """CROSSCUT_TIMEOUT: seconds any single wait may take (a start, a collective) before it becomes an error."""
    kernel_timeout: float = 30.0
    """CROSSCUT_KERNEL_TIMEOUT: the same inside crosscut's kernels, once they have run; unset, at most ``timeout``."""
    collectives: str = "auto"
    """CROSSCUT_COLLECTIVES: auto; nccl (never crosscut's kernels); kernels (always, an error where they cannot run)."""
    commit: str | None = None
    """CROSSCUT_COMMIT: what a record says of the source when crosscut runs from a copy without its git history."""
    log: str = "warning"
    """CROSSCUT_LOG: debug, info, warning or error: how much a run says on standard error."""
    schedule: str = "auto"
    """CROSSCUT_SCHEDULE: auto; plain (multiply, then communicate); pieces or pieces:N, N up to 16 (communicate under it)."""
    matmul: str = "auto"
    """CROSSCUT_MATMUL: auto; cublas; skinny (for few tokens without gradients, wherever that kernel can run)."""


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the CROSSCUT_* variables. Raises UsageError (``bad-env``) on an unknown name or a wrong value."""
    environ = os.environ if environ is None else environ
    names = {PREFIX + f.name.upper(): f.name for f in fields(Settings)}
    for name in environ:
        if name.startswith(PREFIX) and name not in names and not name.startswith(PREFIX + "INTERNAL_"):
            raise UsageError(
                f"the environment variable {name} is not one of crosscut's{nearest(name, names)}",
                code="bad-env",
                fix=f"unset it, or use one of: {', '.join(names)}",
            )
    timeout = _seconds(environ, "CROSSCUT_TIMEOUT", Settings.timeout)

    def one_of(name: str, otherwise: str, *allowed: str) -> str:
        return choose(name, environ.get(name, otherwise).lower(), allowed, code="bad-env")

    return Settings(
        timeout=timeout,
        kernel_timeout=_seconds(environ, "CROSSCUT_KERNEL_TIMEOUT", min(Settings.kernel_timeout, timeout)),
        commit=environ.get("CROSSCUT_COMMIT") or None,
        collectives=one_of("CROSSCUT_COLLECTIVES", Settings.collectives, "auto", "nccl", "kernels"),
        log=one_of("CROSSCUT_LOG", Settings.log, "debug", "info", "warning", "error"),
        schedule=one_of(
            "CROSSCUT_SCHEDULE", Settings.schedule, "auto", "plain", "pieces", *(f"pieces:{n}" for n in range(1, 17))
        ),
        matmul=one_of("CROSSCUT_MATMUL", Settings.matmul, "auto", "cublas", "skinny"),
    )


def _seconds(environ: Mapping[str, str], name: str, otherwise: float) -> float:
    given = environ.get(name, str(otherwise))
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise UsageError(
            f"{name}={given!r} is not a number of seconds",
            code="bad-env",
            fix="set it to seconds, above 0 and at most 86400",
        )
    return seconds


def socket_folder(environ: Mapping[str, str] | None = None) -> str:
    """Where torch's symmetric memory puts the sockets over which the ranks of a host hand memory to each other."""
    environ = os.environ if environ is None else environ
    return next((environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in environ), "/tmp")


@dataclass(frozen=True)
class RankEnv:
    """Who this process is in the world that a launcher started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    """torchrun, srun, mpirun (Open MPI), pmi (MPICH and its kin) or env (plain RANK and WORLD_SIZE)."""
    store_hosted: bool = False
    """The launcher itself serves the rendezvous at master_addr:master_port (torchrun's agent does); else rank 0 does."""
    attempt: int = 0
    """How often the launcher has started these ranks anew (torchrun --max-restarts)."""
    own_gpu: bool = False
    """Each rank sees only the GPUs that are its own (srun --gpus-per-task), so the first one is its own."""


@dataclass(frozen=True)
class _Launcher:
    """Where one launcher writes who a rank is: candidates for each value, the first that is set wins."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...]  # together unlike any other job's: a port is derived from them
    fix: str


_ENV = _Launcher(
    "env", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), (),
    "export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 for every rank",
)  # fmt: skip
_OPEN_MPI = _Launcher(
    "mpirun", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ...",
)  # fmt: skip
_PMI = _Launcher(
    "pmi", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",),
    ("PMI_JOBID", "PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    "mpirun -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500 ...",
)  # fmt: skip
_SLURM = _Launcher(
    "srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (),
    ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEPID"),
    "export MASTER_ADDR and MASTER_PORT before srun",
)  # fmt: skip


def rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """Who this process is when a launcher started it as one of several ranks, else None.

    Looked for in this order: RANK and WORLD_SIZE (torchrun when TORCHELASTIC_RUN_ID is set too, otherwise what a
    Kubernetes operator or a shell exports), Open MPI's OMPI_COMM_WORLD_*, srun's SLURM_*, PMI_*. Rules:

    - A world of one is nobody's rank: None, whoever started it.
    - srun is believed only inside a step that it started. The shell of a batch script or of salloc has
      SLURM_PROCID=0 and SLURM_NTASKS=N too, but no SLURM_STEP_ID, or one of the reserved ids from 0xfffffff0.
      A PMI_SIZE unlike srun's own count means that MPICH's mpirun runs inside the step: PMI is believed then.
    - Without a local rank and local size: all ranks are on this host when MASTER_ADDR is this host itself
      (localhost, 127.*) or is not needed; otherwise there is one rank a host (Kubernetes).
    - MASTER_ADDR, else 127.0.0.1 when all ranks are on this host, else srun's first host. MASTER_PORT, else a port in
      20000-59999 derived from the id of the job (and step).

    Raises UsageError (``bad-env``) when the values are missing, not whole numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    for launcher in (_ENV, _OPEN_MPI, _SLURM, _PMI):
        names = (*launcher.rank, *launcher.size)
        if not any(name in environ for name in names) or (launcher is _SLURM and not _in_srun_step(environ)):
            continue
        rank, world = _required(environ, launcher, launcher.rank), _required(environ, launcher, launcher.size)
        if not 0 <= rank < world:
            raise _bad_env(f"rank {rank} does not exist in a world of {world}", environ, names, launcher.fix)
        if world > 1:
            return _rank_env(environ, launcher, rank, world)
    return None


def _rank_env(environ: Mapping[str, str], launcher: _Launcher, rank: int, world: int) -> RankEnv:
    local_rank, local_size = _local(environ, launcher, rank, world)
    return RankEnv(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_size,
        master_addr=_master_addr(environ, launcher, all_here=local_size == world),
        master_port=_master_port(environ, launcher),
        launcher="torchrun" if launcher is _ENV and "TORCHELASTIC_RUN_ID" in environ else launcher.name,
        store_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_optional(environ, ("TORCHELASTIC_RESTART_COUNT",)) or 0,
        own_gpu=launcher is _SLURM and "SLURM_GPUS_PER_TASK" in environ,
    )


def _local(environ: Mapping[str, str], launcher: _Launcher, rank: int, world: int) -> tuple[int, int]:
    """(local rank, local world size); see the rules of :func:`rank_env`."""
    local_rank, local_size = _optional(environ, launcher.local_rank), _optional(environ, launcher.local_size)
    if launcher is _SLURM:
        local_size = _slurm_tasks_here(environ)
    addr = environ.get("MASTER_ADDR", "127.0.0.1")
    all_here = addr == "localhost" or addr.startswith("127.") or addr == "::1"
    if local_size is None and (all_here or local_rank is None):
        local_size = world if all_here else 1
    if local_rank is None and local_size in (1, world):
        local_rank = 0 if local_size == 1 else rank
    names = (*launcher.rank, *launcher.size, *launcher.local_rank, *launcher.local_size, "MASTER_ADDR")
    if local_rank is None or local_size is None:
        raise _bad_env("only one of local rank and local size is known", environ, names, "set both, or neither")
    if not 0 <= local_rank < local_size <= world:
        found = f"local rank {local_rank} of {local_size} does not fit a world of {world}"
        raise _bad_env(found, environ, names, launcher.fix)
    return local_rank, local_size


def _master_addr(environ: Mapping[str, str], launcher: _Launcher, all_here: bool) -> str:
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if all_here and launcher is not _ENV:
        return "127.0.0.1"
    if launcher is _SLURM and hosts:
        return first_host(hosts)
    raise _bad_env("MASTER_ADDR, the host of rank 0, is not set", environ, (*launcher.rank, *launcher.size), launcher.fix)


def _master_port(environ: Mapping[str, str], launcher: _Launcher) -> int:
    job = [environ[name] for name in launcher.job if name in environ]
    port = _optional(environ, ("MASTER_PORT",))
    if port is None and job:
        port = 20000 + zlib.crc32(".".join(job).encode()) % 40000
    if port is None or not 0 < port < 65536:
        raise _bad_env("MASTER_PORT must be a port number", environ, ("MASTER_PORT",), launcher.fix)
    return port


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: ``'node[003-005,9],gpu1'`` -> ``'node003'``."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert entry is not None, "the pattern matches the empty string"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", entry.group())


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    step = _optional(environ, ("SLURM_STEP_ID", "SLURM_STEPID"))
    if step is None or step >= 0xFFFFFFF0:
        return False
    return environ.get("PMI_SIZE") in (None, environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")))


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node from a list such as ``'2(x3),1'`` (three nodes of two tasks, then one of one)."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return None
    counts: list[int] = []
    for tasks, _, nodes in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(nodes or 1)
    node = _optional(environ, ("SLURM_NODEID",)) or 0
    if not 0 <= node < len(counts):
        names = ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        raise _bad_env("the number of tasks on this node cannot be told", environ, names, _SLURM.fix)
    return counts[node]


def _optional(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The whole number in the first of ``names`` that is set; None when none is."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    if not re.fullmatch(r"\d+", environ[name].strip()):
        raise _bad_env(f"{name} is not a whole number", environ, (name,), f"unset {name}, or set it to a whole number")
    return int(environ[name])


def _required(environ: Mapping[str, str], launcher: _Launcher, names: tuple[str, ...]) -> int:
    value = _optional(environ, names)
    if value is None:
        raise _bad_env(
            f"{names[0]} is not set although its counterpart is",
            environ,
            (*launcher.rank, *launcher.size),
            f"set both {launcher.rank[0]} and {launcher.size[0]}, or neither",
        )
    return value


def _bad_env(what: str, environ: Mapping[str, str], names: tuple[str, ...], fix: str) -> UsageError:
    found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ) or "nothing"
    return UsageError(f"{what} (found in the environment: {found})", code="bad-env", fix=fix)


def omp_threads_given(environ: Mapping[str, str] | None = None) -> bool:
    """Whether OMP_NUM_THREADS is set, so that the number of CPU threads is the user's own choice."""
    return bool((os.environ if environ is None else environ).get("OMP_NUM_THREADS"))
