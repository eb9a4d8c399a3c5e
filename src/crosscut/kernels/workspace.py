"""The memory that the ranks of a group share: mailboxes, flags and staging, mapped into every rank's GPU.

One allocation a group, made once through torch's symmetric memory, so that user tensors need no registration and nothing
in a CUDA graph can go stale. Beside it each rank keeps counters of its own and, in host memory, a record that a kernel
fills when a wait runs out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.errors import CollectiveTimeout
from crosscut.kernels.launch import RANKS, Call

BUFFERS, SLOTS, CHANNELS = 4, 4, 2  # as in exchange.cu
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "all_reduce_norm")


@dataclass(frozen=True)
class Layout:
    """Where things lie in a workspace of ``size`` ranks. ``lanes``, ``blocks``: capacity; ``chunk``: bytes of a slot."""

    size: int
    lanes: int = 65536
    blocks: int = 64
    staging: int = 128 << 10

    @property
    def chunk(self) -> int:
        """Bytes of one staging slot: smaller with more ranks, so that the whole stays the same."""
        return self.staging // (1 << (self.size - 1).bit_length())

    @property
    def flagged_at(self) -> int:
        """Offset of the flagged lanes, after the sentinel lanes."""
        return BUFFERS * self.size * self.lanes * 16

    @property
    def flags_at(self) -> int:
        """Offset of the blocks' flags."""
        return self.flagged_at + 2 * self.size * self.lanes * 16

    @property
    def staging_at(self) -> int:
        """Offset of the blocks' staging slots."""
        return self.flags_at + -(-CHANNELS * self.blocks * self.size * 4 // 256) * 256

    @property
    def nbytes(self) -> int:
        """Bytes of a workspace on each rank."""
        return self.staging_at + CHANNELS * self.blocks * SLOTS * self.size * self.chunk

    @property
    def counters(self) -> int:
        """Number of a rank's own counters."""
        return 2 * self.lanes + CHANNELS * self.blocks


class Workspace:
    """One rank's end of the shared memory: every rank's mailbox address, its own counters and its own record.

    ``deadline``: seconds that a wait in a kernel may take; ``first``: the same for the first launch of each kernel, when a
    peer may still compile, load or set up (None: no longer than the others).
    """

    def __init__(
        self,
        name: str,
        rank: int,
        layout: Layout,
        own: Tensor,
        addresses: Sequence[int],
        deadline: float,
        first: float | None = None,
    ) -> None:
        assert layout.size <= RANKS, "more ranks than a kernel's parameters hold"
        assert own.nbytes >= layout.nbytes, "memory smaller than its layout"
        self.name, self.rank, self.layout = name, rank, layout
        self.deadline, self.first = deadline, deadline if first is None else max(first, deadline)
        self._own: Tensor | None = own
        self._addresses = tuple(addresses)
        own[: layout.flagged_at].fill_(0xFF)
        own[layout.flagged_at :].zero_()
        self._counters = torch.ones(layout.counters, dtype=torch.int32, device=own.device)
        self._counters[2 * layout.lanes :] = 0
        self._record = torch.zeros(4 + RANKS, dtype=torch.int32).pin_memory()
        self._seen = self._record.numpy()  # a view: reading it costs no launch
        self.failed = memoryview(self._seen)  # type: ignore[arg-type]
        """Item 0 is not 0 when a wait ran out: what :meth:`check` looks at, for who has not the time to call it."""
        torch.cuda.synchronize(own.device)

    def call(self, op: str) -> Call:
        """A parameter block with all that does not change from call to call."""
        layout = self.layout
        call = Call(
            epochs=self._counters.data_ptr(), record=self._record.data_ptr(), deadline=int(self.deadline * 1e9),
            flagged_at=layout.flagged_at, flags_at=layout.flags_at, staging_at=layout.staging_at, rank=self.rank,
            lanes=layout.lanes, blocks=layout.blocks, chunk=layout.chunk, op=OPS.index(op),
        )  # fmt: skip
        for peer, address in enumerate(self._addresses):
            call.mail[peer] = address
        return call

    def check(self) -> None:
        """Raise CollectiveTimeout (``rank-timeout``) if a wait of an earlier call ran out; costs 0.1 us.

        The group is of no use after that: the ranks no longer agree on what has been exchanged.
        """
        if self._seen[0]:
            who = ", ".join(str(peer) for peer in self.missing()) or "unknown"
            op = OPS[int(self._seen[1])]
            raise CollectiveTimeout(
                f"rank {self.rank} of group {self.name!r} waited more than {int(self._seen[3]) / 1000:g} s in {op} "
                f"(exchange {int(self._seen[2]) & 0xFFFFFFFF}); nothing came from rank {who} of the group",
                code="rank-timeout",
                fix="see what those ranks do: not called, called with another size, busy, or dead; then start the ranks anew "
                "(if they are only slow, with a larger CROSSCUT_KERNEL_TIMEOUT)",
            )

    def missing(self) -> list[int]:
        """The ranks from which nothing came in a wait that ran out; empty while none has."""
        return [peer for peer in range(self.layout.size) if self._seen[4 + peer]]

    def close(self) -> None:
        """Free the memory. No kernel of the group may be running on any rank."""
        self._own = None


def host_identity(socket_folder: str, proc: Path = Path("/proc")) -> str:
    """What two processes have in common when torch's rendezvous can pass memory between them.

    The kernel's boot id tells hosts apart, also such as share a name or a disk image. Containers of one host share it; torch
    hands file descriptors over through sockets named by process id in ``socket_folder``, so they must also share the
    namespace of process ids and that folder. Where they do not, a rank would wait for ever for a descriptor that went to
    another container's process of the same id, so this is asked before the rendezvous and not found out in it.
    """
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink(proc / "self/ns/pid")
    except OSError:  # no such /proc: the name is the best there is
        boot, processes = os.uname().nodename, ""
    try:
        folder = os.stat(socket_folder)
    except OSError:
        return f"{boot} {processes} {socket_folder}"
    return f"{boot} {processes} {folder.st_dev}:{folder.st_ino}"


def shared_workspace(
    name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    deadline: float,
    first: float | None,
    tell: Callable[[str], list[str]],
) -> Workspace:
    """This rank's workspace of ``group``, whose ranks must all call this. Raises RuntimeError when the GPUs cannot share.

    ``tell`` gives every rank's string: a rank without memory for it must not leave the others waiting in the rendezvous.
    """
    import torch.distributed._symmetric_memory as symmetric

    layout = Layout(group.size())
    own: Tensor | None = None
    problem = ""
    try:
        own = symmetric.empty(layout.nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        problem = f"rank {group.rank()}: {str(error).splitlines()[0]}"
    problem = next(filter(None, tell(problem)), "")
    if own is None or problem:
        raise RuntimeError(problem)
    handle = symmetric.rendezvous(own, group.group_name)
    workspace = Workspace(name, group.rank(), layout, own, handle.buffer_ptrs, deadline, first)
    dist.barrier(group)  # nobody writes before everybody has cleared
    return workspace


def virtual_workspaces(
    size: int, device: torch.device, deadline: float = 30.0, layout: Layout | None = None, first: float | None = None
) -> list[Workspace]:
    """Workspaces of ``size`` ranks on one GPU, for tests and trials: each rank's calls go to a stream of its own."""
    layout = layout or Layout(size)
    memory = [torch.empty(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(size)]
    addresses = [part.data_ptr() for part in memory]
    return [Workspace("virtual", rank, layout, memory[rank], addresses, deadline, first) for rank in range(size)]
