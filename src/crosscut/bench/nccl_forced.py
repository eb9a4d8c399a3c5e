"""NCCL made to do what it is told: one algorithm, one protocol, one kind of link, each measured in fresh ranks.

NCCL reads its environment once, when a communicator is made, so every choice needs ranks of its own. Each is first tried
with NCCL's log on, which tells whether NCCL did what it was told (it ignores what it cannot do, or refuses), and then
timed without the log, whose lines would cost microseconds a call.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from crosscut.bench.collectives import CollectivesConfig
from crosscut.bench.extend import extend, measured
from crosscut.bench.nccl_log import ALGORITHMS, PROTOCOLS, Decision, explain, parse_costs, parse_decisions
from crosscut.distributed.join import LaunchConfig, place
from crosscut.env import exported, rank_env
from crosscut.errors import RankError, UsageError, choose
from crosscut.records import Row, RunRecord

LINKS: dict[str, dict[str, str | None]] = {
    "nvlink": {"NCCL_P2P_DISABLE": None, "NCCL_SHM_DISABLE": None, "NCCL_NET": None},
    "shm": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": None, "NCCL_NET": None, "NCCL_NVLS_ENABLE": "0"},
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0"},
}
"""nvlink: GPU to GPU, the best there is; shm: through host memory, as without P2P; socket: over TCP, as between hosts."""
CHOSEN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
"""The collectives that NCCL has algorithms for; it makes the others of sends and receives."""

Start = Callable[[CollectivesConfig], RunRecord | None]
"""Runs crosscut.bench.collectives.run in fresh ranks, and gives rank 0's record."""


@dataclass(frozen=True)
class Choice:
    """What NCCL is told. None: left to NCCL."""

    algorithm: str | None = None
    protocol: str | None = None
    link: str | None = None

    @property
    def label(self) -> str:
        """``'ring/ll128'``, ``'tree'``, ``'ring over shm'``, ``'shm'``."""
        told = "/".join(filter(None, (self.algorithm, self.protocol)))
        return " over ".join(filter(None, (told, self.link)))

    @property
    def environ(self) -> dict[str, str | None]:
        """The variables that tell NCCL; None unsets one, so that nothing of the user's own is mixed in."""
        return {"NCCL_ALGO": self.algorithm, "NCCL_PROTO": self.protocol} | (LINKS[self.link] if self.link else {})

    def obeyed(self, decision: Decision) -> bool:
        """Whether ``decision`` is what was told."""
        return self.algorithm in (None, decision.algorithm) and self.protocol in (None, decision.protocol)


def parse_choices(algo: str = "", proto: str = "", link: str = "") -> tuple[Choice, ...]:
    """``'ring,tree'``, ``'ll,ll128'``, ``'shm'`` as every combination; empty when all three are.

    Raises UsageError (``bad-option``) on a name that is not known.
    """
    chosen = (
        _names("NCCL algorithm", algo, ALGORITHMS),
        _names("NCCL protocol", proto, PROTOCOLS),
        _names("link", link, LINKS),
    )
    return tuple(Choice(*names) for names in product(*chosen) if any(names))


def _names(what: str, text: str, allowed: Iterable[str]) -> list[str | None]:
    known = list(allowed)
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    return list(dict.fromkeys(choose(what, name, known) for name in names)) or [None]


def need_nccl(tp: int, backend: str, device: str) -> None:
    """Refuse choices for NCCL where ranks talk over something else, or cannot be started anew.

    Raises UsageError (``no-backend``, and as crosscut.distributed.join.place).
    """
    env = rank_env()
    if env is not None:
        raise UsageError(
            f"each choice for NCCL needs fresh ranks, and this process is one of {env.launcher}'s",
            code="no-backend",
            fix=f"run the command without {env.launcher}",
        )
    carrier = place(LaunchConfig(tp, backend, device), 0, tp)[1]
    if carrier != "nccl":
        raise UsageError(
            f"--algo, --proto and --link choose what NCCL does, and these ranks talk over {carrier}",
            code="no-backend",
            fix="run it on GPUs, one for each rank; to see what an algorithm sends, use --simulate ring",
        )


def run(config: CollectivesConfig, choices: Sequence[Choice], start: Start) -> RunRecord | None:
    """Measure as ``config`` says, and NCCL again for each of ``choices``; one record of all.

    Rows of a choice have the impl ``nccl``, its label in ``extra.forced``, and the ``path`` that NCCL really took (what it
    was told, where the log does not say). Notes say what NCCL takes when left alone and why, and which choices it could
    not follow.
    """
    record = start(config)
    if record is None:
        return None
    alone = replace(config, impls=("nccl",), pairs=False)
    _, log = _logged(Choice(), alone, start)
    ops = dict.fromkeys(row.subject for row in measured(record) if row.impl == "nccl")
    notes = explain(parse_decisions(log), parse_costs(log), ops)
    rows: list[Row] = []
    for choice in choices:
        found, told = measure(choice, alone, start)
        rows += found
        notes += told
    return extend(record, rows, notes)


def measure(choice: Choice, config: CollectivesConfig, start: Start) -> tuple[list[Row], list[str]]:
    """Rows of ``choice`` in fresh ranks, and notes; no rows, and a note, where NCCL cannot do it at all."""
    if choice.algorithm or choice.protocol:
        ops = tuple(op for op in config.ops or CHOSEN if op in CHOSEN)
        if not ops:
            return [], [f"nccl {choice.label} was not run: NCCL has algorithms for {', '.join(CHOSEN)} alone."]
        config = replace(config, ops=ops)
    try:
        tried, log = _logged(choice, config, start)
        with exported(choice.environ):
            record = start(config) if tried is not None else None
    except RankError as error:
        if error.code not in ("rank-failed", "rank-timeout"):
            raise
        return [], [f"nccl {choice.label} cannot run here: {error.message.splitlines()[0]}"]
    if record is None:
        return [], []
    decisions = parse_decisions(log)
    own = [row for row in measured(record) if row.impl == "nccl"]
    rows, ignored = [], dict[str, None]()
    for row in own:
        taken = taken_for(row, decisions)
        if taken is not None and not choice.obeyed(taken):
            ignored[f"{row.subject} (took {taken.path})"] = None
            continue
        rows.append(_labelled(row, choice, taken))
    notes = [f"nccl {choice.label} was not followed for {', '.join(ignored)}: no such rows."] if ignored else []
    if not own:
        notes.append(f"nccl {choice.label} gave no result. " + " ".join(note for note in record.notes if "did not run" in note))
    return rows, notes


def taken_for(row: Row, decisions: Iterable[Decision]) -> Decision | None:
    """The decision on the op and size of ``row``; None where the log has none."""
    return next((d for d in decisions if d.op in (row.subject, None) and d.nbytes == row.bytes), None)


def _labelled(row: Row, choice: Choice, taken: Decision | None) -> Row:
    told = "/".join(filter(None, (choice.algorithm, choice.protocol)))
    path = taken.path if taken is not None else told or None
    return replace(row, path=path, extra=row.extra | {"forced": choice.label})


def _logged(choice: Choice, config: CollectivesConfig, start: Start) -> tuple[RunRecord | None, str]:
    """A short run with NCCL's log on, and the log of all its ranks."""
    short = replace(config, modes=("eager",), places=("out",), seconds=0.001, cold=False)
    with tempfile.TemporaryDirectory(prefix="crosscut-nccl-") as folder:
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
        with exported(choice.environ | log):
            record = start(short)
        return record, "\n".join(path.read_text(errors="replace") for path in sorted(Path(folder).iterdir()))
