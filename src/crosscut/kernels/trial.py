"""A trial of the shared memory before anything depends on it: do writes between these GPUs arrive, and arrive right?

The driver can say that two GPUs reach each other and be wrong: with an IOMMU or PCIe access control in between, writes can
get lost or land elsewhere, and every later result is garbage (vLLM copies a buffer and looks at it for the same reason). So
each rank sends known patterns by all three protocols of the kernels, more rounds than there are buffers, and the host looks
at what came.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crosscut.kernels.exchange import Exchange

SECONDS = 5.0
"""That a wait of the trial may take. The ranks have met just before, with all kernels loaded."""
ROUNDS = 5
LANES = 4096  # of 8 bytes: 32 blocks of threads
CHUNKS = 48  # more than one for each block of the grid


class Trial:
    """One rank's part: :meth:`run` on all ranks, then :meth:`findings`. Making it compiles the kernels and sends nothing."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        size = {"lanes": LANES, "blocks": CHUNKS * exchange.workspace.layout.chunk // 8}
        self._moves = [(algorithm, step, size[algorithm]) for step in range(ROUNDS) for algorithm in ("lanes", "blocks")]
        self.inputs = [pattern(exchange.rank, step, n).to(exchange.device) for _, step, n in self._moves]
        self.addends = [addend(exchange.rank, step).to(exchange.device) for step in range(ROUNDS)]
        self._moved: list[Tensor] = []
        self._sums: list[Tensor] = []
        for algorithm in size:
            exchange.mover("all_gather", algorithm)
        exchange.reduction(torch.float32, self.addends[0].nbytes, "sum", "lanes")

    def run(self) -> None:
        """Queue the exchanges on the current stream."""
        exchange = self.exchange
        for (algorithm, _, n), x in zip(self._moves, self.inputs, strict=True):
            self._moved.append(exchange.all_gather(x, x.new_zeros(exchange.size, n), algorithm))
        self._sums = [exchange.all_reduce(x, torch.zeros_like(x), "sum", "lanes") for x in self.addends]

    def findings(self) -> str:
        """Wait for the exchanges. What is wrong, the empty string when all is right."""
        torch.cuda.synchronize(self.exchange.device)
        me, size = self.exchange.rank, self.exchange.size
        missing = self.exchange.workspace.missing()
        if missing:
            return f"P2P write from rank {missing[0]} to rank {me} did not arrive within {self.exchange.workspace.first:g} s"
        for (algorithm, step, n), out in zip(self._moves, self._moved, strict=True):
            for peer, got in enumerate(out.cpu()):
                wrong = (got != pattern(peer, step, n)).nonzero()
                if len(wrong):
                    return f"P2P write from rank {peer} to rank {me} arrived wrong ({algorithm}, word {int(wrong[0])} of {n})"
        for step, total in enumerate(self._sums):
            if not torch.equal(total.cpu(), torch.stack([addend(peer, step) for peer in range(size)]).sum(0)):
                return f"a sum of P2P writes came out wrong on rank {me}"
        return ""


def pattern(rank: int, step: int, n: int) -> Tensor:
    """What ``rank`` sends in round ``step``: ``n`` words of 64 bits, each unlike all others of all ranks and rounds."""
    odd = -7046029254386353131  # multiplying by an odd number maps no two words to one
    return (torch.arange(n) + ((rank * ROUNDS + step + 1) << 32)) * odd


def addend(rank: int, step: int) -> Tensor:
    """Small whole numbers, so that their sum is exact."""
    return ((torch.arange(LANES) * (rank + 2) + step) % 251).float()


def prove(exchange: Exchange, tell: Callable[[str], list[str]], seconds: float = SECONDS) -> str:
    """Try ``exchange`` on all ranks together; what the first of them found wrong, the empty string when nothing was.

    ``tell`` gives every rank's string, in the order of the ranks, by other means than the exchange. A rank whose peer stays
    silent comes back after ``seconds``, so all ranks come to the same answer.
    """
    workspace = exchange.workspace
    deadline, first = workspace.deadline, workspace.first
    exchange.patience(seconds, seconds)
    trial, problem = _loaded(exchange)
    problem = _first(tell(problem))  # the ranks meet here, with their kernels loaded
    if trial is not None and not problem:
        trial.run()
        problem = _first(tell(trial.findings()))
    exchange.patience(deadline, first)
    return problem


def _loaded(exchange: Exchange) -> tuple[Trial | None, str]:
    try:
        return Trial(exchange), ""
    except RuntimeError as error:
        return None, f"the kernels cannot be loaded on rank {exchange.rank}: {str(error).splitlines()[0]}"


def _first(findings: list[str]) -> str:
    return next((finding for finding in findings if finding), "")
