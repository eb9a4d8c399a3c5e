"""What NCCL itself writes of its choices: the lines of ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING``, read and explained.

NCCL models the time of a collective as latency + size / bandwidth for each pair of algorithm and protocol, writes that
table when a communicator is made, and one line for each collective with the pair that it took. Pure functions of text.

The forms, by version (each line behind ``host:pid:tid [gpu] NCCL INFO``):

- 2.18 to 2.21: ``N Bytes -> Algo 1 proto 2 time 28.6``; 2.22: the same behind ``AllReduce:``
- from 2.23 on: ``AllReduce: N Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}``
- symmetric kernels, from 2.27 on: ``AllReduce [Symmetric]: N Bytes -> Kernel NAME nchannels ...``
- the table: one line ``Latency/AlgBw | Tree/ LL | ...``, or since 2.19 two lines ``Algorithm`` and ``Protocol``
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crosscut.units import format_size, format_us

ALGORITHMS = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
"""By NCCL's number."""
PROTOCOLS = ("ll", "ll128", "simple")
"""By NCCL's number."""

_DECISION = re.compile(
    r"(?:(?P<op>[A-Za-z]+): )?(?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)"
    r"(?: time (?P<time>[\d.]+))?(?: channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\})?"
)
_SYMMETRIC = re.compile(
    r"(?P<op>[A-Za-z]+) \[Symmetric\]: (?P<bytes>\d+) Bytes -> Kernel (?P<kernel>\w+)(?: nchannels (?P<n>\d+))?"
)
_COST = re.compile(r"\s*([\d.]+)\s*/\s*([\d.]+)\s*")


@dataclass(frozen=True)
class Decision:
    """What NCCL took for one size. ``op`` is None in logs before NCCL 2.22, ``protocol`` None for a symmetric kernel."""

    op: str | None
    nbytes: int
    algorithm: str
    protocol: str | None = None
    channels: int | None = None
    us: float | None = None
    """What NCCL expected it to take, where it says so."""

    @property
    def path(self) -> str:
        """``'ring/ll128'``, or the name of a symmetric kernel."""
        return self.algorithm if self.protocol is None else f"{self.algorithm}/{self.protocol}"


@dataclass(frozen=True)
class Cost:
    """One entry of NCCL's table: time = ``latency_us`` + bytes / ``gbps``. ``gbps`` 0: not available."""

    op: str
    path: str
    latency_us: float
    gbps: float

    def us(self, nbytes: int) -> float:
        """The model's time, without NCCL's corrections for size."""
        return self.latency_us + nbytes / self.gbps / 1e3


def parse_decisions(text: str) -> list[Decision]:
    """Every choice in the log ``text``, each once, in order. Lines that say nothing of one are passed over."""
    found: dict[Decision, None] = {}
    for line in text.splitlines():
        symmetric, plain = _SYMMETRIC.search(line), _DECISION.search(line)
        if symmetric is not None:
            channels = int(symmetric["n"]) if symmetric["n"] else None
            found[Decision(_op(symmetric["op"]), int(symmetric["bytes"]), symmetric["kernel"], channels=channels)] = None
        elif plain is not None:
            decision = Decision(
                op=_op(plain["op"]) if plain["op"] else None,
                nbytes=int(plain["bytes"]),
                algorithm=_name(plain["algo"], ALGORITHMS),
                protocol=_name(plain["proto"], PROTOCOLS),
                channels=int(plain["high"]) - int(plain["low"]) + 1 if plain["high"] else None,
                us=float(plain["time"]) if plain["time"] else None,
            )
            found[decision] = None
    return list(found)


def parse_costs(text: str) -> list[Cost]:
    """NCCL's table of latency and bandwidth in the log ``text``; of several communicators the last one's."""
    found: dict[tuple[str, str], Cost] = {}
    paths: list[str] = []
    algorithms: list[str] = []
    for line in text.splitlines():
        head, *cells = (cell.strip() for cell in line.split("|"))
        title, cells = head.rpartition("NCCL INFO")[2].strip(), [cell for cell in cells if cell]
        if title == "Latency/AlgBw":
            paths = ["/".join(part.strip().lower() for part in cell.split("/")) for cell in cells]
        elif title == "Algorithm":
            algorithms = [cell.lower() for cell in cells]
        elif title == "Protocol" and algorithms:
            each = max(1, len(cells) // len(algorithms))
            paths = [f"{algorithms[i // each]}/{cell.lower()}" for i, cell in enumerate(cells) if i // each < len(algorithms)]
        else:
            numbers = [_COST.fullmatch(cell) for cell in cells]
            if numbers and len(numbers) == len(paths):
                for path, number in zip(paths, numbers, strict=True):
                    if number is not None:
                        found[title, path] = Cost(_op(title), path, float(number[1]), float(number[2]))
    return list(found.values())


def explain(decisions: Sequence[Decision], costs: Sequence[Cost], ops: Iterable[str]) -> list[str]:
    """One sentence for each of ``ops``: what NCCL takes from which size on, and how its own model ranks the candidates."""
    return [said for op in ops for said in [_explain(op, decisions, costs)] if said]


def _explain(op: str, decisions: Sequence[Decision], costs: Sequence[Cost]) -> str:
    taken = sorted((d for d in decisions if d.op in (op, None)), key=lambda d: d.nbytes)
    starts = [d for i, d in enumerate(taken) if i == 0 or d.path != taken[i - 1].path]
    if not starts:
        return ""
    parts = ", ".join(f"{d.path} from {format_size(d.nbytes)} on" for d in starts)
    ranked = [(format_size(d.nbytes), _ranking(op, d, costs)) for d in starts]
    said = "; ".join(f"at {size} {ranking}" for size, ranking in ranked if ranking)
    why = f" Its own model (latency + size / bandwidth) says: {said}." if said else ""
    return f"Left alone, NCCL takes for {op}: {parts}.{why}"


def _ranking(op: str, taken: Decision, costs: Sequence[Cost]) -> str:
    """``'ring/ll 7 us, tree/ll 7.2 us'``: the three fastest by the model, and the one taken when it is not among them."""
    able = sorted((cost for cost in costs if cost.op == op and cost.gbps > 0), key=lambda cost: cost.us(taken.nbytes))
    shown = able[:3] + [cost for cost in able[3:] if cost.path == taken.path]
    return ", ".join(f"{cost.path} {format_us(cost.us(taken.nbytes))}" for cost in shown)


def _op(name: str) -> str:
    """``'AllReduce'`` -> ``'all_reduce'``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _name(text: str, names: Sequence[str]) -> str:
    if text.isdigit():
        return names[int(text)] if int(text) < len(names) else text
    return text.lower().replace("_", "")
