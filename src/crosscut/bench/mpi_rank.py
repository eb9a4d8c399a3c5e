"""What a rank of mpirun does for ``crosscut bench collectives --impl mpi``: the cases of collective_cases over MPI's calls.

``python -m crosscut.bench.mpi_rank CONFIG`` (JSON of :class:`crosscut.bench.mpi.MpiConfig`), started by
:mod:`crosscut.bench.mpi`. Rank 0 writes one JSON object a line: ``row``, ``note``, ``progress`` or ``error``.

MPI's buffers are host memory. Data that is only moved travels as integers of the same width, so every dtype can; sums
need a number format that MPI knows.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crosscut.bench.collective_cases import CASES, Buffers, Case, Numbers, Piece, Place, uneven
from crosscut.bench.collective_timing import compare, poison, put_together
from crosscut.bench.mpi import Found, MpiConfig
from crosscut.bench.timing import Sampling
from crosscut.distributed.join import set_threads
from crosscut.distributed.rank_main import as_failure
from crosscut.env import settings
from crosscut.errors import UsageError
from crosscut.records import Row, Times
from crosscut.units import format_size, gbps

if TYPE_CHECKING:
    from mpi4py import MPI

Tell = Callable[[str, Any], None]
"""(kind, value): passes a row, note or progress on."""

MOST_COUNT = (1 << 31) - 1
"""MPI 3 counts elements in a C int."""
MOST_CALLS, SLOT_BYTES = 64, 256 << 20
"""Calls of a sample, each on buffers of its own, and what these buffers may take together."""
SUMMED = (torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8)
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPS = {"sum": "SUM", "avg": "SUM", "max": "MAX", "min": "MIN", "prod": "PROD"}


@dataclass(frozen=True)
class Job:
    """One case at one size. ``count`` is NCCL's count argument."""

    case: Case
    dtype: torch.dtype
    redop: str | None
    count: int
    in_place: bool


@dataclass(frozen=True)
class Call:
    """An MPI call and its arguments: numpy views of this rank's buffers in host memory."""

    comm: MPI.Comm
    place: Place
    in_place: bool
    send: Any
    receive: Any
    op: Any
    in_place_mark: Any
    """MPI.IN_PLACE."""

    @property
    def source(self) -> Any:
        """What a call that knows MPI.IN_PLACE is given to send."""
        return self.in_place_mark if self.in_place else self.send

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.place.rank == self.place.root

    @property
    def at_root(self) -> tuple[Any, Any]:
        """(send, receive) of a call that only the root receives from."""
        return (self.source, self.receive) if self.is_root else (self.send, None)


def _broadcast(c: Call) -> None:
    if c.is_root and not c.in_place:
        c.receive[:] = c.send
    c.comm.Bcast(c.receive, c.place.root)


def _uneven(c: Call) -> None:
    rank, n, count = c.place.rank, c.place.world, c.place.count
    out = [uneven(rank, peer, n, count) for peer in range(n)]
    back = [uneven(peer, rank, n, count) for peer in range(n)]
    c.comm.Alltoallv([c.send, out], [c.receive, back])


def _send_recv(c: Call) -> None:
    rank, n = c.place.rank, c.place.world
    c.comm.Sendrecv(c.send, (rank + 1) % n, recvbuf=c.receive, source=(rank - 1) % n)


def _incast(c: Call) -> None:
    """Every rank to the root at once, by messages."""
    if not c.is_root:
        c.comm.Send(c.send, c.place.root)
        return
    others, count = [rank for rank in range(c.place.world) if rank != c.place.root], c.place.count
    waiting = [c.comm.Irecv(c.receive[i * count : (i + 1) * count], rank) for i, rank in enumerate(others)]
    for request in waiting:
        request.Wait()


def _multicast(c: Call) -> None:
    """The root to every rank at once, by messages."""
    if not c.is_root:
        c.comm.Recv(c.receive, c.place.root)
        return
    for request in [c.comm.Isend(c.send, rank) for rank in range(c.place.world) if rank != c.place.root]:
        request.Wait()


def _hypercube(c: Call) -> None:
    """An all-gather in log2(n) steps, as in collective_cases."""
    rank, count, width = c.place.rank, c.place.count, 1
    c.receive[rank * count : (rank + 1) * count] = c.send
    while width < c.place.world:
        here = rank & ~(width - 1)
        mine, theirs = (c.receive[first * count : (first + width) * count] for first in (here, here ^ width))
        c.comm.Sendrecv(mine, rank ^ width, recvbuf=theirs, source=rank ^ width)
        width *= 2


CALLS: dict[str, Callable[[Call], None]] = {
    "all_reduce": lambda c: c.comm.Allreduce(c.source, c.receive, c.op),
    "all_gather": lambda c: c.comm.Allgather(c.source, c.receive),
    "reduce_scatter": lambda c: c.comm.Reduce_scatter_block(c.send, c.receive, c.op),
    "broadcast": _broadcast,
    "reduce": lambda c: c.comm.Reduce(*c.at_root, c.op, c.place.root),
    "gather": lambda c: c.comm.Gather(*c.at_root, c.place.root),
    "scatter": lambda c: c.comm.Scatter(c.send if c.is_root else None, c.receive, c.place.root),
    "all_to_all": lambda c: c.comm.Alltoall(c.send, c.receive),
    "all_to_all_uneven": _uneven,
    "send_recv": _send_recv,
    "incast": _incast,
    "multicast": _multicast,
    "hypercube": _hypercube,
    "barrier": lambda c: c.comm.Barrier(),
}
"""MPI's call for each case of collective_cases; a case without an entry is left out with a note."""


def jobs(config: MpiConfig, tell: Tell) -> list[Job]:
    """What of ``config`` MPI can do, in order; ``tell`` gets a note for each kind of thing that it cannot."""
    found: list[Job] = []
    notes: dict[str, None] = {}
    for op, name, size, in_place in product(config.ops, config.dtypes, config.sizes, config.in_place):
        case, dtype = CASES[op], getattr(torch, name)
        if in_place and case.in_place is None:
            continue
        for redop in config.redops if case.reduces else (None,):
            job = Job(case, dtype, redop, case.count(size, config.world, dtype.itemsize), in_place)
            why = _cannot(job, config.world)
            if why:
                notes[f"mpi: {why}"] = None
            elif job not in found:
                found.append(job)
    for note in notes:
        tell("note", note)
    return found


def _cannot(job: Job, world: int) -> str:
    """Why MPI cannot do ``job``; the empty string when it can."""
    case, name = job.case, str(job.dtype).removeprefix("torch.")
    if case.name not in CALLS:
        return f"{case.name} is not among MPI's calls"
    if case.powers_of_two and world & (world - 1):
        return f"{case.name} is left out: it needs a number of ranks that is a power of two, not {world}"
    if case.reduces and job.dtype not in SUMMED:
        return f"{case.name} is left out: MPI does not compute in {name}"
    if job.in_place and case.in_place == "output in input":
        return f"{case.name} in place is left out: MPI does not leave the result at the rank's own part of the input"
    if job.count * (world if case.parts else 1) > MOST_COUNT:
        return f"{case.name} of more than {MOST_COUNT} elements is left out: MPI 3 counts in 32 bits"
    return ""


class Slot:
    """The buffers of one call, on the device and in host memory (the same ones on CPU), and the call."""

    def __init__(self, comm: MPI.Comm, job: Job, place: Place, device: torch.device) -> None:
        from mpi4py import MPI

        self.buffers = _buffers(job, place, device)
        self._staged = device.type != "cpu"
        self._host = _buffers(job, place, torch.device("cpu"), pinned=True) if self._staged else self.buffers
        self._job, self._call = job, CALLS[job.case.name]
        op = getattr(MPI, _OPS[job.redop or "sum"])
        send, receive = _view(self._host.input, job), _view(self._host.output, job)
        self._arguments = Call(comm, place, job.in_place, send, receive, op, MPI.IN_PLACE)

    def run(self) -> None:
        """The MPI call; with tensors on a GPU the copies to and from host memory belong to it."""
        if self._staged:
            self._host.input.copy_(self.buffers.input)
        self._call(self._arguments)
        if self._job.redop == "avg":
            whole = not self._host.output.is_floating_point()
            self._host.output.div_(self._arguments.place.world, rounding_mode="floor" if whole else None)
        if self._staged:
            self.buffers.output.copy_(self._host.output)


def _buffers(job: Job, place: Place, device: torch.device, pinned: bool = False) -> Buffers:
    """Uninitialised buffers; in place the shorter one is a part of the longer one."""

    def empty(count: int) -> Tensor:
        return torch.empty(count, dtype=job.dtype, device=device, pin_memory=pinned)

    sends, receives = job.case.sends(place), sum(piece.length for piece in job.case.receives(place))
    if not job.in_place or not sends or not receives:
        return Buffers(empty(sends), empty(receives), place.world)
    output = empty(receives)
    start = 0 if job.case.in_place == "same" else place.rank * place.count
    return Buffers(output[start : start + sends], output, place.world)


def _view(tensor: Tensor, job: Job) -> Any:
    """A numpy view that MPI understands."""
    return (tensor if job.case.reduces else tensor.view(_SAME_WIDTH[tensor.element_size()])).numpy()


def measure(comm: MPI.Comm, config: MpiConfig, tell: Tell) -> None:
    """Measure on the ranks of ``comm``, which all call this; ``tell`` gets the rows and notes, the same on every rank.

    Raises UsageError (``bad-dtype``) on a reduction over so many ranks that it has no exact inputs.
    """
    from mpi4py import MPI

    assert comm.size == config.world, "who started the ranks has seen to that"
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    set_threads(None, here.size)
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", here.rank % max(torch.cuda.device_count(), 1))
        tell("note", "mpi: the tensors lie on GPUs; the times include their copies to and from host memory, where MPI works.")
    todo = jobs(config, tell)
    for index, job in enumerate(todo):
        size = format_size(job.case.nbytes(job.count, comm.size, job.dtype.itemsize))
        tell("progress", (index / len(todo), f"{job.case.name}, {size}, mpi"))
        tell("row", _measure(comm, config, job, device))


def _measure(comm: MPI.Comm, config: MpiConfig, job: Job, device: torch.device) -> Row:
    place = Place(comm.rank, comm.size, job.count, config.root)
    numbers = job.case.numbers(comm.size, job.dtype, job.redop or "sum", config.seed, device)
    slots = [Slot(comm, job, place, device)]
    _reset(slots, numbers, job, place)
    sampling = Sampling(config.seconds, least=5)
    _sample(comm, slots)
    roughly = max(comm.allgather(_sample(comm, slots * 3)))
    each = max(2 * job.case.nbytes(job.count, comm.size, job.dtype.itemsize), 1)
    calls = int(min(max(sampling.sample_us / roughly, 1), MOST_CALLS, max(1, SLOT_BYTES // each)))
    slots += [Slot(comm, job, place, device) for _ in range(calls - 1)]
    reps = int(min(max(sampling.seconds * 1e6 / (roughly * calls), sampling.least), sampling.most))
    _reset(slots, numbers, job, place)
    _sample(comm, slots)
    samples = []
    for rep in range(reps):
        if rep == reps - 1:  # the last timed calls are the checked ones
            _reset(slots, numbers, job, place)
        samples.append(_sample(comm, slots))
    wanted = job.case.receives(place)
    mistakes = put_together(comm.allgather(compare([slot.buffers for slot in slots], numbers, wanted)))
    everyone: list[list[float]] = comm.allgather(samples)
    return _row(job, config, everyone, calls * reps, mistakes)


def _reset(slots: list[Slot], numbers: Numbers, job: Job, place: Place) -> None:
    for slot in slots:
        poison(slot.buffers.output)
        numbers.write(slot.buffers.input, [Piece(place.rank, 0, job.case.sends(place))])


def _sample(comm: MPI.Comm, slots: list[Slot]) -> float:
    """Microseconds a call, on this rank's clock; all ranks begin together."""
    comm.Barrier()
    start = time.perf_counter_ns()
    for slot in slots:
        slot.run()
    return max((time.perf_counter_ns() - start) / 1e3 / len(slots), 0.01)


def _row(job: Job, config: MpiConfig, everyone: list[list[float]], calls: int, mistakes: Any) -> Row:
    """``everyone [rank][sample]`` in microseconds."""
    case, world = job.case, config.world
    us = Times.of([max(sample) for sample in zip(*everyone, strict=True)])
    nbytes = case.nbytes(job.count, world, job.dtype.itemsize) if case.sized else None
    rate = None if nbytes is None else gbps(nbytes, us.p50)
    extra = {
        "redop": job.redop,
        "in_place": job.in_place,
        "root": config.root if case.rooted else None,
        "count": job.count,
        "wrong": mistakes.wrong,
        "first_wrong": mistakes.first,
        "wire_gbps": None if rate is None else rate * case.wire_factor(world),
        "ranks_us": [round(median(samples), 3) for samples in everyone],
        "spread": (us.p90 - us.p10) / us.p50,
        "cold": False,
    }
    return Row(
        subject=case.name,
        impl="mpi",
        mode="eager",
        world=world,
        dtype=str(job.dtype).removeprefix("torch."),
        bytes=nbytes,
        us=us,
        n=calls,
        algbw_gbps=rate,
        busbw_gbps=None if rate is None else rate * case.busbw(world),
        error=mistakes.error if case.sized else None,
        note="through host memory" if config.device == "cuda" else None,
        extra={name: value for name, value in extra.items() if value is not None},
    )


def measure_here(config: MpiConfig) -> Found:
    """Measure in the MPI world that this process is part of. Rows and notes on rank 0, nothing elsewhere."""
    found: dict[str, list[Any]] = {"row": [], "note": []}

    def tell(kind: str, value: Any) -> None:
        if kind in found:
            found[kind].append(value)

    comm = _world()
    measure(comm, config, tell)
    return (found["row"], found["note"]) if comm.rank == 0 else ([], [])


def _world() -> MPI.Comm:
    """All ranks. Raises UsageError (``extra-missing``) when mpi4py finds no MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py cannot load an MPI library: {str(error).splitlines()[0]}",
            code="extra-missing",
            fix="install an MPI: on Debian and Ubuntu apt-get install openmpi-bin; then pip install --force-reinstall mpi4py",
        ) from None
    return MPI.COMM_WORLD


def _write(kind: str, value: Any) -> None:
    sys.stdout.write(json.dumps({kind: asdict(value) if isinstance(value, Row) else value}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Entry of a rank that mpirun started for crosscut. Any failure is told, and ends all ranks."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: die with mpirun
    given: dict[str, Any] = json.loads(sys.argv[1])
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    config = MpiConfig(**given)
    comm = None
    try:
        comm = _world()
        measure(comm, config, _write if comm.rank == 0 else lambda kind, value: None)
        return 0
    except Exception as error:
        rank = 0 if comm is None else comm.rank
        told = as_failure(error, rank, config.world, config.timeout, settings().log == "debug")
        _write("error", {"message": told.message, "code": told.code, "fix": told.fix, "usage": isinstance(told, UsageError)})
    if comm is not None:
        comm.Abort(1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
