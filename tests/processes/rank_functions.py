"""What the ranks of the process tests run. Module-level functions, because started ranks find them by name."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from crosscut.distributed.launch import LaunchConfig, RankContext, run
from crosscut.errors import CrosscutError, UsageError


def _sum_of_ranks(ctx: RankContext) -> float:
    values = torch.full((4,), float(ctx.rank + 1), device=ctx.device)
    if ctx.world_size > 1:
        dist.all_reduce(values)
    return float(values[0])


def add(ctx: RankContext, extra: float) -> list[float]:
    """[world size, sum of rank + 1 over all ranks, plus ``extra``]."""
    return [ctx.world_size, _sum_of_ranks(ctx) + extra]


def add_twice(ctx: RankContext) -> list[float]:
    """Two collectives, with a wait between them in which the slower rank falls behind."""
    first = _sum_of_ranks(ctx)
    time.sleep(0.2 * ctx.rank)
    return [first, _sum_of_ranks(ctx)]


def tour(ctx: RankContext) -> dict[str, object]:
    """Compute, print on both streams (the last line without its end), report, and say what a rank finds around itself."""
    total = _sum_of_ranks(ctx)
    print(f"out of {ctx.rank}")
    sys.stderr.write(f"err of {ctx.rank}\nlast words")
    for step in range(20):
        ctx.progress(step / 20, f"rank {ctx.rank} step {step}")
        time.sleep(0.02)
    ctx.progress(1.0, f"rank {ctx.rank} done")
    with open("/proc/self/comm", encoding="utf-8") as comm:
        name = comm.read().strip()
    return {
        "sum": total,
        "name": name,
        "threads": torch.get_num_threads(),
        "backend": ctx.backend,
        "device": str(ctx.device),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "sigint_blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []),
    }


def fail_in_one(ctx: RankContext, kind: str) -> float:
    """Rank 1 fails in the way named ``kind`` while the others wait for it in an all_reduce."""
    if ctx.rank == 1:
        time.sleep(0.3)  # until the others are in the all_reduce
        print(f"failing at {time.monotonic()}")
        _fail(kind)
    return _sum_of_ranks(ctx)


def _fail(kind: str) -> NoReturn:
    if kind == "usage":
        raise UsageError("the size is wrong", code="bad-size", fix="take another")
    if kind == "error":
        raise ZeroDivisionError("a rank divided by zero")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(kind))


def leave_silently(ctx: RankContext) -> NoReturn:
    """All ranks leave with exit code 0 and without an answer."""
    os._exit(0)


def miss_a_collective(ctx: RankContext) -> float:
    """Rank 1 never joins the all_reduce."""
    if ctx.rank == 1:
        time.sleep(60)
    return _sum_of_ranks(ctx)


def refuse_to_stop(ctx: RankContext) -> None:
    """Rank 0 fails; rank 1 ignores SIGTERM."""
    if ctx.rank == 0:
        time.sleep(0.3)
        print(f"failing at {time.monotonic()}")
        raise ValueError("rank 0 is done for")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def linger(ctx: RankContext) -> None:
    """Say what an all_reduce gave, then wait for longer than any test."""
    print(f"ready {_sum_of_ranks(ctx)}")
    time.sleep(60)


def main(name: str, nproc: str, timeout: str, *args: str) -> int:
    """``rank_functions.py NAME NPROC TIMEOUT [JSON ...]``: one run; the result as JSON, or the error's code and words."""

    def show(fraction: float, text: str) -> None:
        sys.stderr.write(f"progress {fraction:g} {text}\n")

    try:
        config = LaunchConfig(int(nproc), timeout=float(timeout))
        result = run(globals()[name], tuple(json.loads(arg) for arg in args), config, show)
    except CrosscutError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(result) + "\n")  # in one piece: ranks share the pipe
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
