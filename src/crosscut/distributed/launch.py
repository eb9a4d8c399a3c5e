"""One function for every way to become ranks: start them here, or be one that another launcher started.

Local ranks are started by torch's own elastic launcher: it hands out RANK and the rendezvous, and ends all ranks when one
fails. This module adds what a command-line tool owes its user: the first failure in the failing rank's own words, one
message instead of several tracebacks, nothing left behind after Ctrl-C, SIGTERM or SIGKILL, and a clean standard output.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from crosscut.distributed.join import LaunchConfig, RankContext, alone, place
from crosscut.distributed.progress import OnProgress, Progress
from crosscut.distributed.rank_main import Task, joined_rank, only_rank, started_rank
from crosscut.distributed.supervise import Death, Supervisor, first_failure
from crosscut.env import RankEnv, rank_env, settings
from crosscut.errors import RankError, UsageError

__all__ = ["LaunchConfig", "RankContext", "run"]

T = TypeVar("T")

_CHATTER = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


def run(fn: Callable[..., T], args: tuple[Any, ...], config: LaunchConfig, on_progress: OnProgress | None = None) -> T | None:
    """Call ``fn(ctx, *args)`` in ``config.nproc`` ranks and return rank 0's value.

    Three ways, chosen by what is there (``ctx`` is a :class:`RankContext`):

    - This process already is a rank (:func:`crosscut.env.rank_env`): it joins its world, calls ``fn`` and returns its
      value on rank 0 and None elsewhere.
    - ``nproc`` is 1: ``fn`` is called here, without a process group.
    - Otherwise ``nproc`` local ranks are started. ``fn`` (a module-level function), ``args`` and the value are pickled.
      What ranks print comes out on standard error behind ``[rank N]``. No rank outlives this call or this process.

    ``on_progress`` receives rank 0's reports, in a thread of its own when ranks are started.

    Raises UsageError before anything starts: ``tp-mismatch`` (the world that was joined has another size),
    ``tp-exceeds-gpus``, ``no-backend``, ``bad-option``, ``bad-env``, and when joining ``port-in-use``. Raises the error
    of the rank that failed first: a CrosscutError as it was raised, else RankError: ``rank-failed``, ``rank-died``,
    ``rank-timeout``, and ``interrupted`` after Ctrl-C or SIGTERM.
    """
    debug = settings().log == "debug"
    env = rank_env()
    if env is not None:
        _check_world(env, config)
        progress = Progress(on_progress if env.rank == 0 else None)
        return joined_rank(fn, args, env, config, progress, debug)
    if config.nproc < 1:
        raise UsageError(f"{config.nproc} ranks cannot be started", code="bad-option", fix="ask for at least 1")
    if config.nproc == 1:
        return only_rank(fn, args, alone(config, on_progress), config, debug)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "ranks cannot be started while a rank is loading this script",
            code="bad-option",
            fix="start ranks under `if __name__ == '__main__':`, so that they can load the script without running it",
        )
    place(config, 0, config.nproc)  # refuses what cannot work before anything starts
    return _start(fn, args, config, on_progress, debug)


def _check_world(env: RankEnv, config: LaunchConfig) -> None:
    if env.world_size != config.nproc:
        raise UsageError(
            f"{config.nproc} ranks were asked for, but this process is one of {env.world_size} started by {env.launcher}",
            code="tp-mismatch",
            fix=f"start {config.nproc} ranks with {env.launcher}, or ask for {env.world_size}",
        )


def _start(
    fn: Callable[..., T], args: tuple[Any, ...], config: LaunchConfig, on_progress: OnProgress | None, debug: bool
) -> T | None:
    try:
        supervisor = Supervisor(config.nproc, on_progress, config.timeout)
    except OSError as error:
        raise UsageError(
            f"{config.nproc} ranks cannot be started on this host: {error.strerror}",
            code="bad-option",
            fix="ask for fewer, or raise the limit on open files (ulimit -n): four for each rank",
        ) from None
    task = Task(pickle.dumps((fn, args)), config, os.getpid(), supervisor.wires, debug)
    supervisor.start()
    answers, died = {}, None
    try:
        with _signals(supervisor) as received, _environment(), _quiet(debug):
            answers = elastic_launch(_elastic_config(config.nproc), started_rank)(task)
    except ChildFailedError as error:
        rank, process = next(iter(error.failures.items()))
        died = Death(rank, process.exitcode)
    except SignalException:
        if not supervisor.gave_up:
            name = signal.Signals(received[0]).name
            raise RankError(f"the run was ended by {name}", code="interrupted") from None
    finally:
        supervisor.close()
    if not answers:
        raise first_failure(supervisor.failures, died, config.nproc)
    if supervisor.callback_error is not None:
        raise supervisor.callback_error
    result: T | None = pickle.loads(answers[0])
    return result


def _elastic_config(nproc: int) -> ElasticConfig:
    return ElasticConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        logs_specs=_NoLogs(),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port
        rdzv_configs={"is_host": True},
        local_addr="127.0.0.1",  # spares a look-up of this host's own name, which may not resolve
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        signals_to_handle="",  # they are ours: see _signals
    )


class _NoLogs(LogsSpecs):
    """No log files: the ranks' output comes through the supervisor's pipes."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environ in envs.values():
            environ["TORCHELASTIC_ERROR_FILE"] = ""
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)


@contextmanager
def _signals(supervisor: Supervisor) -> Iterator[list[int]]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into an orderly end of all ranks; yields the list of those that came.

    SIGINT is blocked in this thread, so that ranks, which inherit that, never see a Ctrl-C: not even while they load.
    The supervisor's thread, started before, takes it in; Python runs the handler in the main thread all the same.
    """
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        supervisor.stop()
        raise SignalException("asked to stop", signal.SIGTERM)  # what torch's agent then sends to the ranks

    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {s: signal.signal(s, stop) for s in ours if signal.getsignal(s) is not signal.SIG_IGN}
    resource_tracker.ensure_running()  # its own start, which else comes with the first rank's, unblocks SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _environment() -> Iterator[None]:
    """Spare the ranks torch's C++ warnings (unless asked for); undo what torch's launcher leaves in the environment."""
    before = dict(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Keep torch's launcher from logging about failures that this module reports itself."""
    loggers = [] if debug else [logging.getLogger(name) for name in _CHATTER]
    before = [logger.propagate for logger in loggers]
    nowhere = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nowhere)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nowhere)
