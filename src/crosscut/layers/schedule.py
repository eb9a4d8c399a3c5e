"""When to cut a multiply into pieces so that its communication runs under it: a pure rule with its reason, no torch.

The rule compares two estimates. Their constants come from figures measured on two H200 joined by 18 NVLinks, and are taken
so that the piecewise estimate is never below what was measured; docs/overlap.md shows the arithmetic. A size at which no
overlap has been measured to win stays plain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from crosscut.hardware import Wire, find_gpu

OPS = ("gather_multiply", "multiply_scatter", "multiply_gather", "multiply_reduce")
"""Tokens gathered before; sums scattered to tokens, output features gathered, or sums given to all ranks, after."""

COUNTS = (1, 2, 3, 4, 6, 8)
"""Numbers of pieces that the rule considers."""

LEAST_HIDDEN = 0.4
"""Share of what the plain path spends beside its multiply that the estimate must save."""

LEAST_GAIN = 1.03
"""How many times faster the whole must be by estimate."""

LEAST_MULTIPLY_US = 80.0
"""Shortest multiply that is cut: the shortest that an overlap was measured to gain on took 89 us (at 24 us it lost)."""

LEAST_PIECE = 512
"""Fewest tokens of a piece: a smaller multiply does not fill the GPU."""

PIECE_US = 12.0
"""What a piece costs: launches, flags, the end of a multiply that leaves multiprocessors idle. With it, the estimates for
2048 and 8192 tokens lie above the measured 127.7 and 835 us."""

LIBRARY_US = 22.0
"""What a call of NCCL costs beside its bytes: the intercept of all-gather, reduce-scatter and all-reduce over 16-256 MiB."""

STEAL = 0.2
"""Share of the multiprocessors that NCCL's kernels take from a multiply while they run (24 of 132 channels, rounded up)."""

_SUSTAINED = 0.75  # of the data sheet's dense rate: 720-770 of 989 TFLOP/s measured for these halves with cuBLAS
_COPY_RATE = 0.75  # of the link: a copy engine's pull reached 337 of 450 GB/s at 16 MiB
_MEMORY_RATE = 0.8
_TWO_RANKS = {"gather_multiply": 0.55, "multiply_scatter": 0.55, "multiply_gather": 0.55, "multiply_reduce": 0.69}
_MORE_RANKS = 0.8  # NCCL's published peaks on 4 and 8 H100: taken for every size, which favours the plain path


@dataclass(frozen=True)
class Machine:
    """What the estimate needs to know of a GPU and its link."""

    bf16_tflops: float
    link_gbps: float
    memory_gbps: float


@dataclass(frozen=True)
class Case:
    """One multiply with its exchange. ``inner`` and ``outer``: input and output features of the largest rank's multiply."""

    op: str
    tokens: int
    inner: int
    outer: int
    tp: int
    itemsize: int


@dataclass(frozen=True)
class Schedule:
    """How to run it: 0 pieces is plain, else so many; ``carrier``: who moves them, ``library`` or ``copies``."""

    pieces: int
    reason: str
    carrier: str = "library"

    def __str__(self) -> str:
        what = "plain" if self.pieces == 0 else f"{self.pieces} piece{'s' * (self.pieces > 1)} by {self.carrier}"
        return f"{what}: {self.reason}"


PLAIN = Schedule(0, "nothing to overlap")


def plain(reason: str) -> Schedule:
    """Multiply, then communicate (or the other way round)."""
    return Schedule(0, reason)


def machine(device: str, link: Wire) -> Machine | str:
    """The figures of ``device`` behind ``link``, or why there are none."""
    gpu = find_gpu(device)
    if gpu is None or link.kind != "nvlink" or not link.gbps:
        return f"no overlap has been measured on {device} over {link.kind}"
    return Machine(gpu.bf16_tflops, link.gbps, gpu.memory_gbps)


def forced_pieces(setting: str) -> int | None:
    """What CROSSCUT_SCHEDULE asks for: a number of pieces, 0 for plain, None for auto."""
    if setting == "auto":
        return None
    return 0 if setting == "plain" else int(setting.partition(":")[2] or 2)


@lru_cache(4096)
def choose(case: Case, known: Machine | str, forced: int | None = None, carriers: tuple[str, ...] = ("library",)) -> Schedule:
    """The schedule of ``case``, the same on every rank that asks with the same figures.

    ``known``: a Machine, or why there is none. ``forced``: see :func:`forced_pieces`. ``carriers``: who could move the
    pieces; a forced schedule takes the last one.
    """
    assert case.op in OPS, f"unknown operation {case.op!r}"
    if case.tp == 1:
        return plain("a group of one does not communicate")
    if case.tokens == 0 or forced == 0:
        return plain("no tokens" if case.tokens == 0 else "CROSSCUT_SCHEDULE=plain")
    if forced is not None:
        return Schedule(min(forced, case.tokens), "CROSSCUT_SCHEDULE", carriers[-1])
    if isinstance(known, str):
        return plain(known)
    if case.itemsize > 4:
        return plain("no overlap has been measured in float64")
    multiply, whole = multiply_us(case, known), plain_us(case, known)
    if multiply < LEAST_MULTIPLY_US:
        return plain(f"the multiply is too short: {multiply:.0f} us by estimate, of at least {LEAST_MULTIPLY_US:.0f}")
    ways = [(pieces_us(case, known, pieces, by), pieces, by) for pieces, by in _options(case, carriers)]
    best, pieces, carrier = min(ways, default=(whole, 0, ""))
    words = f"{best:.0f} us against {whole:.0f} plain, by estimate and not measured here"
    if (whole - best) / (whole - multiply) < LEAST_HIDDEN or whole < LEAST_GAIN * best:
        return plain(f"pieces would not clearly gain: {words}")
    return Schedule(pieces, words, carrier)


def _options(case: Case, carriers: tuple[str, ...]) -> Iterable[tuple[int, str]]:
    for pieces in COUNTS:
        if pieces * LEAST_PIECE <= case.tokens and (pieces > 1 or case.op == "gather_multiply"):
            yield from ((pieces, carrier) for carrier in carriers)


def multiply_us(case: Case, known: Machine) -> float:
    """The multiply alone, at three quarters of the data sheet's rate; float32 as if it were TF32, half of bf16's."""
    rate = known.bf16_tflops * (_SUSTAINED if case.itemsize <= 2 else _SUSTAINED / 2)
    return 2 * case.tokens * case.inner * case.outer / (rate * 1e6)


def sent_bytes(case: Case) -> float:
    """Bytes that leave one rank through its port."""
    out = case.tokens * case.outer * case.itemsize
    return {
        "gather_multiply": (case.tp - 1) / case.tp * case.tokens * case.inner * case.itemsize,
        "multiply_scatter": (case.tp - 1) / case.tp * out,
        "multiply_gather": (case.tp - 1) * out,
        "multiply_reduce": 2 * (case.tp - 1) / case.tp * out,
    }[case.op]


def room_bytes(case: Case) -> int:
    """The most shared memory that the pieces of one rank take, rounded up piece by piece, however tokens are dealt."""
    features = case.inner if case.op == "gather_multiply" else case.outer
    return case.tokens * features * case.itemsize + 16 * 256


def plain_us(case: Case, known: Machine) -> float:
    """Multiply and exchange one after the other, by NCCL; a gather of features interleaves its parts with one more copy."""
    return multiply_us(case, known) + _library_us(case, known, 1) + _local_us(case, known, "library")


def pieces_us(case: Case, known: Machine, pieces: int, carrier: str) -> float:
    """The pipeline: while one piece is multiplied another travels. See docs/overlap.md for the drawing of each."""
    multiply, local = multiply_us(case, known), _local_us(case, known, carrier)
    if carrier == "copies":
        travel = sent_bytes(case) / (_COPY_RATE * known.link_gbps * 1e3) / pieces
    else:
        travel = _library_us(case, known, pieces)
        multiply += STEAL * travel * pieces
    if case.op != "gather_multiply":  # local: the share of the last piece is not hidden; a sum hides nothing of itself
        exposed = local if carrier == "copies" else local / pieces
        each = multiply / pieces + PIECE_US
        return each + (pieces - 1) * max(each, travel) + travel + exposed
    done, rest = multiply / case.tp + PIECE_US, multiply * (case.tp - 1) / case.tp / pieces + PIECE_US
    for piece in range(1, pieces + 1):
        done = max(done, piece * travel) + rest
    return done


def _library_us(case: Case, known: Machine, pieces: int) -> float:
    share = _TWO_RANKS[case.op] if case.tp == 2 else _MORE_RANKS
    return LIBRARY_US + sent_bytes(case) / pieces / (share * known.link_gbps * 1e3)


def _local_us(case: Case, known: Machine, carrier: str) -> float:
    """Passes over device memory that the exchange adds on the multiprocessors."""
    whole = case.tokens * case.outer * case.itemsize
    passes = {"gather_multiply": 0.0, "multiply_scatter": 0.0, "multiply_gather": 0.0, "multiply_reduce": 0.0}
    if carrier == "copies":  # sums: each rank reads what it pulled and its own, and writes the result
        passes |= {"multiply_scatter": (case.tp + 1) / case.tp, "multiply_reduce": 3.0}
    else:  # the gathered parts are read and written once more
        passes["multiply_gather"] = 2.0 * case.tp
    return passes[case.op] * whole / (_MEMORY_RATE * known.memory_gbps * 1e3)
