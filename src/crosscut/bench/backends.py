"""Who carries a collective in ``crosscut bench collectives``: torch.distributed, NCCL's symmetric memory, torch's, crosscut's.

Each implementation gives out the buffers it wants to work on, says what it does not do, and issues a
:class:`~crosscut.bench.collective_cases.Case`. They are built once for a run, on all ranks alike; one that cannot be
built here is left out with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.bench.collective_cases import Ask, Buffers, Case, Works
from crosscut.collectives import all_agree, barrier
from crosscut.collectives.fast import choice, fast
from crosscut.collectives.select import ALGORITHMS
from crosscut.distributed.mesh import Group
from crosscut.errors import CrosscutError
from crosscut.kernels.exchange import REDUCTIONS, TYPES, Exchange

IMPLS = ("nccl", "nccl_symmetric", "torch_one_shot", "torch_two_shot", "crosscut", "gloo")
"""Implementations of torch's world, by the name that a record gives them."""

ALIGN = 512
SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter")


class Unavailable(Exception):
    """An implementation cannot run on this rank; says why."""


class Implementation:
    """torch.distributed on ``group``'s own backend, and what the others share with it.

    ``room``: bytes that its buffers may take at a time. ``starts``: whether a call can be issued now and waited for later.
    """

    starts = True

    def __init__(self, name: str, group: Group, room: int) -> None:
        self.name, self.group, self.room = name, group, room

    def refuses(self, case: Case, dtype: torch.dtype, redop: str | None, in_place: bool) -> str:
        """Why it does not do this; the empty string when it does, or only a try can tell."""
        return ""

    def algorithm(self, case: Case, nbytes: int) -> str | None:
        """The algorithm that carries ``nbytes`` of the whole tensor, where it is known."""
        return None

    def kind(self, algorithm: str | None) -> str:
        """What a port carries in ``algorithm``: a key of :attr:`Case.wire`."""
        return "ring"

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer ``[count]``; valid until :meth:`release`."""
        return torch.empty(count, dtype=dtype, device=self.group.device)

    def release(self) -> None:
        """Take back all buffers."""

    def close(self) -> None:
        """Give back what the run no longer needs; all ranks call this together."""

    def issue(self, case: Case, ask: Ask, buffers: Buffers) -> Works:
        """Start, or unless ``ask.later`` do, the collective."""
        return case.call(ask, buffers)


class _InArena(Implementation):
    """Buffers are cut from one large block, because registering memory is slow and all ranks must do it together."""

    def __init__(self, name: str, group: Group, room: int) -> None:
        super().__init__(name, group, room)
        self._arena, self._used = self._allocate(room + 64 * ALIGN), 0

    def _allocate(self, nbytes: int) -> Tensor:
        raise NotImplementedError

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        nbytes = count * dtype.itemsize
        start, self._used = self._used, self._used + -(-nbytes // ALIGN) * ALIGN
        assert self._used <= len(self._arena), "more buffers than the arena holds"
        return self._arena[start : start + nbytes].view(dtype)

    def release(self) -> None:
        self._used = 0


class NcclSymmetric(_InArena):
    """NCCL on memory of its own allocator, registered as a symmetric window (NCCL 2.27, torch 2.9 and newer)."""

    def _allocate(self, nbytes: int) -> Tensor:
        process_group: Any = self.group.process_group
        barrier(self.group)  # the communicator must be there before memory is registered with it
        backend = process_group._get_backend(self.group.device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            arena = torch.empty(nbytes, dtype=torch.uint8, device=self.group.device)
        backend.register_mem_pool(self._pool, symm=True)
        return arena

    def close(self) -> None:
        torch.cuda.synchronize(self.group.device)
        barrier(self.group)  # nobody may still write to memory that is about to go
        process_group: Any = self.group.process_group
        process_group._get_backend(self.group.device).deregister_mem_pool(self._pool)

    def refuses(self, case: Case, dtype: torch.dtype, redop: str | None, in_place: bool) -> str:
        return "" if case.name in SYMMETRIC else f"NCCL has symmetric kernels for {', '.join(SYMMETRIC)}"


class TorchSymmetric(_InArena):
    """PyTorch's own kernels over symmetric memory (torch.ops.symm_mem): all_reduce alone."""

    starts = False

    @property
    def _two_shot(self) -> bool:
        return self.name == "torch_two_shot"

    def _allocate(self, nbytes: int) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory

        process_group: Any = self.group.process_group
        self._ops, self._group_name = torch.ops.symm_mem, process_group.group_name
        arena = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.group.device)
        symmetric_memory.rendezvous(arena, process_group)
        return arena

    def refuses(self, case: Case, dtype: torch.dtype, redop: str | None, in_place: bool) -> str:
        if case.name != "all_reduce" or redop != "sum" or dtype not in (torch.bfloat16, torch.float32):
            return "it sums bfloat16 and float32 in all_reduce, nothing else"
        return "it does not work in place" if in_place and not self._two_shot else ""

    def algorithm(self, case: Case, nbytes: int) -> str | None:
        return "two-shot" if self._two_shot else "one-shot"

    def kind(self, algorithm: str | None) -> str:
        return "ring" if self._two_shot else "one-shot"

    def issue(self, case: Case, ask: Ask, buffers: Buffers) -> Works:
        if not self._two_shot:
            self._ops.one_shot_all_reduce_out(buffers.input, "sum", self._group_name, buffers.output)
        else:
            self._ops.two_shot_all_reduce_(buffers.to_output(), "sum", self._group_name)
        return ()


class Kernels(Implementation):
    """crosscut's own kernels at every size: the algorithm that the table names, and where it names NCCL, their largest."""

    starts = False

    def __init__(self, name: str, group: Group, room: int) -> None:
        found = fast(group)
        if found is None:
            raise Unavailable(choice("all_reduce", 0, group).reason)
        super().__init__(name, group, room)
        self._fast = found

    def refuses(self, case: Case, dtype: torch.dtype, redop: str | None, in_place: bool) -> str:
        if case.name not in ALGORITHMS:
            return f"the kernels carry {', '.join(ALGORITHMS)}"
        if case.reduces and (dtype not in TYPES or redop not in REDUCTIONS):
            return f"the kernels reduce {', '.join(short for short, _ in TYPES.values())} by {' and '.join(REDUCTIONS)}"
        return "the kernels work in place for all_reduce and broadcast alone" if in_place and case.in_place != "same" else ""

    def algorithm(self, case: Case, nbytes: int) -> str | None:
        part = nbytes // self.group.size if case.parts else nbytes
        chosen = self._fast.algorithm(case.name, nbytes, part)
        return chosen or ("blocks_two_shot" if case.name == "all_reduce" and self.group.size > 2 else "blocks")

    def kind(self, algorithm: str | None) -> str:
        return "ring" if algorithm is not None and algorithm.endswith("two_shot") else "one-shot"

    def issue(self, case: Case, ask: Ask, buffers: Buffers) -> Works:
        size = ask.place.count * buffers.output.element_size() * (self.group.size if case.parts else 1)
        algorithm = self.algorithm(case, size)
        assert algorithm is not None
        _LAUNCH[case.name](self._fast.exchange, ask, buffers, algorithm)
        return ()


_LAUNCH: dict[str, Callable[[Exchange, Ask, Buffers, str], Tensor]] = {
    "all_reduce": lambda e, a, b, how: e.all_reduce(b.input, b.output, a.redop or "sum", how),
    "all_gather": lambda e, a, b, how: e.all_gather(b.input, b.output, how),
    "reduce_scatter": lambda e, a, b, how: e.reduce_scatter(b.input, b.output, a.redop or "sum", how),
    "broadcast": lambda e, a, b, how: e.broadcast(b.input if b.input.numel() else b.output, b.output, a.place.root, how),
    "all_to_all": lambda e, a, b, how: e.all_to_all(b.input, b.output, how),
}


def host_group(group: Group) -> Group:
    """The same ranks over gloo, with tensors in host memory. All ranks call this together."""
    if group.backend == "gloo" and group.device.type == "cpu":
        return group
    ranks = dist.new_group(list(group.ranks), backend="gloo")
    return replace(group, backend="gloo", device=torch.device("cpu"), process_group=ranks, cache={})


def build(names: Sequence[str], group: Group, room: int) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations of ``names`` that all ranks can build, and why each of the others is missing."""
    built, missing = list[Implementation](), dict[str, str]()
    for name in names:
        try:
            found, why = _make(name, group, room), ""
        except (Unavailable, RuntimeError, AttributeError, TypeError, ImportError) as error:
            if isinstance(error, CrosscutError):
                raise
            found, why = None, first_line(error)
        if all_agree(group, found is not None):
            assert found is not None
            built.append(found)
        else:
            missing[name] = why or "another rank cannot build it"
    return built, missing


def _make(name: str, group: Group, room: int) -> Implementation:
    on_gpu = group.device.type == "cuda" and group.backend == "nccl"
    if name == group.backend and (name != "gloo" or group.device.type == "cpu"):
        return Implementation(name, group, room)
    if name == "gloo":
        return Implementation(name, host_group(group), room)
    if name == "crosscut":
        return Kernels(name, group, room)
    if not on_gpu:
        raise Unavailable("it needs a GPU for each rank and NCCL")
    return (NcclSymmetric if name == "nccl_symmetric" else TorchSymmetric)(name, group, room)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def free_memory(device: torch.device, ranks_here: int) -> int:
    """Bytes that buffers of one rank may take: most of what the GPU has free, half of a rank's share of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.8)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 30
    return math.floor(free / 2 / ranks_here)
