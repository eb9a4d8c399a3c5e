"""What runs inside a rank: it joins its world, calls the function, and tells the parent how that went.

A failure is told before anything is torn down, so that the parent hears the culprit before its peers notice. A rank
whose own error only echoes another's (a connection that broke, a wait that ran out) waits a moment before it leaves:
whoever supervises the ranks ends them all at the first exit, and that should be the culprit's.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from crosscut.distributed.join import LaunchConfig, RankContext, world
from crosscut.distributed.progress import Progress
from crosscut.env import RankEnv, rank_env
from crosscut.errors import CollectiveTimeout, CrosscutError, RankError

HOLD = 2.0
"""Seconds that a rank with an echo of another's failure waits before it leaves."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # <linux/prctl.h>

_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote (process|peer) (exited|closed)", re.IGNORECASE
)


@dataclass(frozen=True)
class Wire:
    """The write ends of one rank's two pipes to the parent: what it prints, and its messages."""

    output: Connection
    messages: Connection


@dataclass(frozen=True)
class Task:
    """What the parent sends to each rank it starts."""

    call: bytes
    """The function and its arguments, pickled: a rank that cannot load them can still say so."""
    config: LaunchConfig
    parent: int
    wires: tuple[Wire, ...]
    debug: bool


def started_rank(task: Task) -> Any:
    """Entry of a rank that the parent started. Returns rank 0's result, None in the others; leaves by exit 1 on failure."""
    env = rank_env()
    assert env is not None, "the launcher sets RANK and WORLD_SIZE"
    _die_with(task.parent)
    _set_name(f"crosscut r{env.rank}/{env.world_size}")
    messages = _take_wire(task, env.local_rank)
    messages.send(("started", os.getpid()))
    progress = Progress(lambda fraction, text: messages.send(("progress", fraction, text))) if env.rank == 0 else Progress()
    try:
        fn, args = pickle.loads(task.call)
        with world(env, task.config, progress) as context:
            result = fn(context, *args)
        answer = pickle.dumps(result) if env.rank == 0 else pickle.dumps(None)
    except BaseException as error:
        failure = as_failure(error, env.rank, env.world_size, task.config.timeout, task.debug)
        echo = is_echo(error)
        messages.send(("failed", failure, echo))
        _leave(HOLD if echo else 0.0)
    messages.send(("done",))
    return answer


def joined_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], env: RankEnv, config: LaunchConfig, progress: Progress, debug: bool
) -> Any:
    """Call ``fn`` as a rank that another launcher started. Returns its value on rank 0 and None elsewhere.

    Raises what :func:`as_failure` makes of the error, after :data:`HOLD` seconds if it is an echo of another rank's.
    """
    try:
        with world(env, config, progress) as context:
            result = fn(context, *args)
    except (Exception, KeyboardInterrupt) as error:
        if is_echo(error):
            time.sleep(HOLD)
        raise as_failure(error, env.rank, env.world_size, config.timeout, debug) from error
    return result if env.rank == 0 else None


def only_rank(fn: Callable[..., Any], args: tuple[Any, ...], context: RankContext, config: LaunchConfig, debug: bool) -> Any:
    """Call ``fn`` in this process as the only rank there is."""
    try:
        return fn(context, *args)
    except (Exception, KeyboardInterrupt) as error:
        raise as_failure(error, 0, 1, config.timeout, debug) from error


def as_failure(error: BaseException, rank: int, world_size: int, timeout: float, debug: bool) -> CrosscutError:
    """``error`` as the user should read it. crosscut's own errors stay as they are; a wait that ran out becomes
    CollectiveTimeout (``rank-timeout``), all else RankError (``rank-failed``): that a peer is gone, or the error with the
    place where it was raised, or with the whole traceback when ``debug``."""
    if isinstance(error, CrosscutError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return RankError("the run was ended by SIGINT", code="interrupted")
    who = f"rank {rank} of {world_size}"
    words = str(error).strip() or "no message"
    fix = "ask for less: smaller sizes, fewer tokens, or a narrower dtype" if out_of_memory(error) else None
    if is_echo(error) and _TIMED_OUT.search(words):
        return CollectiveTimeout(
            f"{who} waited more than {timeout:g} s for another rank: {words.splitlines()[0]}",
            code="rank-timeout",
            fix="see which rank printed nothing or is still busy; if it is only slow, raise CROSSCUT_TIMEOUT",
        )
    if isinstance(error, RuntimeError) and _BROKEN.search(words) and not debug:
        return RankError(
            f"{who} lost its connection to another rank, which ended or was killed ({type(error).__name__})",
            code="rank-failed",
            fix="read what that rank printed, or what ended it; CROSSCUT_LOG=debug shows this rank's whole traceback",
        )
    if debug:
        where = "\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    else:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return RankError(f"{who} failed: {type(error).__name__}: {words}{where}", code="rank-failed", fix=fix)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch's CPU allocator and a size beyond 2^64 bytes have no error of their own."""
    words = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)


def is_echo(error: BaseException) -> bool:
    """Whether ``error`` is what a rank sees when another one fails: torch's communication errors, by type or by words."""
    if isinstance(error, CrosscutError):
        return error.code == "rank-timeout"
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    words = str(error)
    return isinstance(error, (RuntimeError, OSError)) and bool(_TIMED_OUT.search(words) or _BROKEN.search(words))


def _take_wire(task: Task, index: int) -> Connection:
    """Let go of the other ranks' pipes, print into this rank's, return its messages."""
    for other, wire in enumerate(task.wires):
        if other != index:
            wire.output.close()
            wire.messages.close()
    own = task.wires[index]
    sys.stdout.flush()
    os.dup2(own.output.fileno(), 1)
    os.dup2(own.output.fileno(), 2)
    own.output.close()
    os.set_inheritable(own.messages.fileno(), False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return own.messages


def _die_with(parent: int) -> None:
    """Have the kernel kill this rank when its parent is gone, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _set_name(name: str) -> None:
    """What ps and top show; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _leave(after: float) -> NoReturn:
    """Exit at once: the destructors of a process group with a dead peer can wait for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(after)
    os._exit(1)
