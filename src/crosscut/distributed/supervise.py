"""The parent's ear: everything that started ranks say, print or fail to say, heard by one thread.

Each rank has two pipes to the parent. What it prints comes out on the parent's standard error, line by line, named by
rank; standard output stays free for results. Its messages (started, progress, failed, done) are kept, and the end of the
pipe without a last word means that the rank died. A pipe, unlike a log file, loses nothing when its writer is killed.

Torch's agent ends the other ranks when one fails, but may wait half a minute for each; :class:`Supervisor` does not.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from crosscut.distributed.progress import OnProgress
from crosscut.distributed.rank_main import HOLD, Wire
from crosscut.errors import CrosscutError, RankError

GRACE = HOLD + 0.5
"""Seconds that ranks have to leave after the first one failed; an echoing rank holds on for HOLD of them."""


@dataclass(frozen=True)
class Failure:
    """The end of one rank that did not end well. ``error`` is None when it died without a word."""

    rank: int
    error: CrosscutError | None
    echo: bool
    when: float
    """When it was heard of, in seconds of time.monotonic()."""


@dataclass(frozen=True)
class Death:
    """The first rank that torch's agent saw leave with a code other than 0 (below 0: minus the signal's number)."""

    rank: int
    exit_code: int


class Supervisor(threading.Thread):
    """Listens to ``nproc`` ranks until all their pipes have ended; ends them itself when a stop takes too long.

    ``patience``: seconds after which it says which ranks still work while others are done. They may have reason to.
    """

    def __init__(self, nproc: int, on_progress: OnProgress | None, patience: float) -> None:
        super().__init__(name="crosscut-supervisor", daemon=True)
        self.failures: list[Failure] = []
        """In the order in which they were heard of."""
        self.callback_error: Exception | None = None
        """What ``on_progress`` raised, if it did: it is not called again."""
        self.gave_up = False
        """Whether :meth:`run` had to interrupt the main thread, because torch's agent waits for answers of dead ranks."""
        self._on_progress = on_progress
        outputs, messages = [Pipe(duplex=False) for _ in range(nproc)], [Pipe(duplex=False) for _ in range(nproc)]
        self.wires = tuple(Wire(output=o[1], messages=m[1]) for o, m in zip(outputs, messages, strict=True))
        self._outputs = {reader: rank for rank, (reader, _) in enumerate(outputs)}
        self._messages = {reader: rank for rank, (reader, _) in enumerate(messages)}
        self._unfinished_line = [b""] * nproc
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()
        self._deadline: float | None = None
        self._patience = patience
        self._notice: float | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Thread body."""
        while self._outputs or self._messages:
            ready = [r for r in wait([*self._messages, *self._outputs], timeout=0.1) if isinstance(r, Connection)]
            for reader in ready:
                if reader in self._outputs:
                    self._copy_output(reader)
                else:
                    self._hear(reader)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._kill()
            if self._notice is not None and time.monotonic() > self._notice:
                self._name_late()
            if self._over.is_set() and not ready:
                return  # a rank's own child still holds a pipe
        if self.failures and not self._over.wait(GRACE):  # they left with exit code 0: no failure to torch's agent
            self.gave_up = True
            _thread.interrupt_main(signal.SIGTERM)

    def stop(self) -> None:
        """Give the ranks GRACE seconds from now (or from the first call) to leave."""
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    def close(self) -> None:
        """To be called when no rank is left: takes in the rest and ends the thread. Nothing is lost."""
        self._kill()
        self._close_write_ends()
        self._over.set()
        self.join()
        for rank, rest in enumerate(self._unfinished_line):
            self._print(rank, [rest] if rest else [])
        for reader in (*self._outputs, *self._messages):
            reader.close()

    def _hear(self, reader: Connection) -> None:
        rank = self._messages[reader]
        try:
            kind, *rest = reader.recv()
        except (EOFError, OSError):  # ended, perhaps in the middle of a message
            del self._messages[reader]
            reader.close()
            if rank not in self._ended and rank in self._pids:
                self._fail(rank, None, echo=False)
            return
        if kind == "started":
            self._pids[rank] = rest[0]
            if len(self._pids) == len(self.wires):
                self._close_write_ends()
        elif kind == "progress":
            self._report(*rest)
        else:
            self._ended.add(rank)
            if kind == "failed":
                self._fail(rank, *rest)
            elif self._notice is None:
                self._notice = time.monotonic() + self._patience

    def _fail(self, rank: int, error: CrosscutError | None, echo: bool) -> None:
        self.failures.append(Failure(rank, error, echo, time.monotonic()))
        self.stop()

    def _name_late(self) -> None:
        """Once: a rank that hangs where nobody waits for it, or was stopped, would else hold up the end without a word."""
        self._notice = float("inf")
        late = ", ".join(str(rank) for rank in range(len(self.wires)) if rank not in self._ended)
        if late and not self.failures:
            self._say(f"still waiting for rank {late}: another rank ended {self._patience:g} s ago (Ctrl-C ends all)\n")

    def _report(self, fraction: float, text: str) -> None:
        if self._on_progress is not None and self.callback_error is None:
            try:
                self._on_progress(fraction, text)
            except Exception as error:
                self.callback_error = error

    def _copy_output(self, reader: Connection) -> None:
        rank = self._outputs[reader]
        data = os.read(reader.fileno(), 1 << 16)
        if not data:
            del self._outputs[reader]
            reader.close()
            return
        *lines, self._unfinished_line[rank] = (self._unfinished_line[rank] + data).split(b"\n")
        self._print(rank, lines)

    def _print(self, rank: int, lines: list[bytes]) -> None:
        self._say("".join(f"[rank {rank}] {line.decode(errors='replace')}\n" for line in lines))

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads our standard error any more
            sys.stderr.write(text)
            sys.stderr.flush()

    def _close_write_ends(self) -> None:
        """Let the pipes end with their ranks; only once every rank has its own copies of all of them."""
        for wire in self.wires:
            wire.output.close()
            wire.messages.close()

    def _kill(self) -> None:
        for rank, pid in self._pids.items():
            if _is_rank(pid, rank):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def first_failure(failures: list[Failure], death: Death | None, world_size: int) -> CrosscutError:
    """The error to report: the first that is no echo of another, a death without a word included, else the first echo.

    ``failures`` in the order in which they were heard of; ``death`` as torch's agent saw it (None: it saw none).
    """
    told = {failure.rank for failure in failures if failure.error is not None}
    # An echoing rank holds on for HOLD seconds; who dies without a word after that was ended by torch's agent.
    own = [f for f in failures if not f.echo and (f.error is not None or f.when < failures[0].when + HOLD / 2)]
    if own and own[0].error is not None:
        return own[0].error
    if death is not None and death.rank not in told:
        started = death.rank in {failure.rank for failure in failures}
        # One that died later was ended by us, because another left with exit code 0, which is no death to torch's agent.
        if not started or not own or death.rank in {failure.rank for failure in own}:
            return _died(death, world_size, started)
    if own:
        return RankError(f"rank {own[0].rank} of {world_size} left without a word", code="rank-died")
    error = failures[0].error
    assert error is not None, "a failure that is an echo has an error"
    return error


def _died(death: Death, world_size: int, started: bool) -> RankError:
    who = f"rank {death.rank} of {world_size}"
    if death.exit_code < 0:
        number = -death.exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        fix = "see what it printed last"
        if number == signal.SIGKILL:
            fix = (
                "if nobody killed it, the host ran out of memory: look into `dmesg`, and lower the size or the number of ranks"
            )
        return RankError(f"{who} was killed by {name}", code="rank-died", fix=fix)
    if started:
        return RankError(f"{who} exited with code {death.exit_code} without a word", code="rank-died")
    return RankError(
        f"{who} exited with code {death.exit_code} before it started",
        code="rank-died",
        fix="see what it printed; a script that starts ranks does so under `if __name__ == '__main__':`",
    )


def _is_rank(pid: int, rank: int) -> bool:
    """Whether ``pid`` still is the process that named itself so (rank_main), not a later one with the same id."""
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8") as comm:
        return comm.read().startswith(f"crosscut r{rank}/")
    return False
