"""A million collectives of mixed kinds, sizes and types on virtual ranks of one GPU: not one wrong element may come out.

Two groups share the ranks' streams. Each rank replays its own CUDA graphs, with random delays between them and eager calls
in between, some of those from a second stream. A third of the calls, in graphs and outside, are started on the group's side
stream and waited for after the call that follows. Not started are calls of which the waiting ranks' blocks would lie on every
multiprocessor: seven ranks that waited so, on streams of high priority, kept the kernels of the eighth from starting. Ranks
with GPUs of their own cannot get in each other's way like that. Inputs change with every call, on the GPU, so that data of
an earlier call shows as an error. Every element of every output is compared on the GPU.

Run: PYTHONPATH=src python benchmarks/soak.py --calls 1000000 --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import os
import random as dice
import sys
import time
from pathlib import Path

os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # loading code waits for running kernels, and these wait for each other
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
from virtual_ranks import VirtualRanks

from crosscut.kernels.exchange import LANE_THREADS, Exchange
from crosscut.kernels.order import Aside
from crosscut.records import Hardware, Row, RunRecord, base_versions, now, source_commit

KINDS = (
    ("all_reduce", "lanes"), ("all_reduce", "lanes_two_shot"), ("all_reduce", "blocks"), ("all_reduce", "blocks_two_shot"),
    ("all_gather", "lanes"), ("all_gather", "blocks"), ("reduce_scatter", "lanes"), ("reduce_scatter", "blocks"),
    ("broadcast", "lanes"), ("broadcast", "blocks"), ("all_to_all", "lanes"), ("all_to_all", "blocks"),
)  # fmt: skip
SIZES = (1, 3, 8, 63, 512, 1000, 2048, 4097, 8192)
MULTIPROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0
MODULUS = 7  # small integers: sums are exact in every type


class Slot:
    """One call of a graph on one rank: it moves its inputs on, calls, and counts wrong elements, all on the GPU."""

    def __init__(self, roll: dice.Random, group: VirtualRanks, rank: int, number: int) -> None:
        self.op, self.algorithm = roll.choice(KINDS)
        self.group, self.rank, self.root = group, rank, number % group.size
        started = roll.random() < 1 / 3
        size, dtype = roll.choice(SIZES), roll.choice((torch.bfloat16, torch.float16, torch.float32))
        blocks = -(-size * dtype.itemsize // (8 * LANE_THREADS))  # of one rank, at most: a lane is 8 or 16 bytes
        self.started = started and blocks * (group.size - 1) < MULTIPROCESSORS
        parts = group.size if self.op in ("reduce_scatter", "all_to_all") else 1
        places = torch.arange(parts * size, device="cuda")
        self.everyone = torch.stack([(places * (r + 2) + number + r) % MODULUS for r in range(group.size)]).to(dtype)
        self.everyone = self.everyone.view(group.size, parts, size)
        self.x = self.everyone[rank].clone()
        shape = {"all_gather": (group.size, 1, size), "reduce_scatter": (1, size)}.get(self.op, tuple(self.x.shape))
        self.out = torch.empty(shape, dtype=dtype, device="cuda")

    def expected(self) -> Tensor:
        if self.op == "all_reduce":
            return self.everyone.float().sum(0)
        if self.op == "all_gather":
            return self.everyone
        if self.op == "broadcast":
            return self.everyone[self.root]
        mine = self.everyone[:, self.rank]
        return mine.float().sum(0, keepdim=True) if self.op == "reduce_scatter" else mine

    def issue(self) -> Aside | None:
        """Move the inputs on and call. What to wait for, None when the call is not started aside."""
        for tensor in (self.x, self.everyone):
            tensor.add_(1).remainder_(MODULUS)
        if not self.started:
            self._call()
            return None
        begun = self.group.ranks[self.rank].aside(self._call, self.x)
        assert begun is not None
        return begun[1]

    def check(self, wrong: Tensor) -> None:
        wrong.add_((self.out != self.expected()).sum())

    def _call(self) -> Tensor:
        exchange: Exchange = self.group.ranks[self.rank]
        if self.op == "all_reduce":
            return exchange.all_reduce(self.x, self.out, "sum", self.algorithm)
        if self.op == "all_gather":
            return exchange.all_gather(self.x, self.out, self.algorithm)
        if self.op == "reduce_scatter":
            return exchange.reduce_scatter(self.x, self.out, "sum", self.algorithm)
        if self.op == "broadcast":
            return exchange.broadcast(self.x, self.out, self.root, self.algorithm)
        return exchange.all_to_all(self.x, self.out, self.algorithm)


def play(slots: list[Slot], wrong: Tensor) -> None:
    """Call them in order; each is waited for and checked after the next one has been issued."""
    late: tuple[Slot, Aside | None] | None = None
    for slot in [*slots, None]:
        issued = None if slot is None else (slot, slot.issue())
        if late is not None:
            if late[1] is not None:
                late[1].wait()
            late[0].check(wrong)
        late = issued


def soak(world: int, calls: int, seed: int) -> tuple[int, int, float]:
    """(calls made, wrong elements, seconds) of ``world`` ranks."""
    roll = dice.Random(seed)
    groups = [VirtualRanks(world, deadline=30), VirtualRanks(world, deadline=30)]
    streams, others = groups[0].streams, [torch.cuda.Stream() for _ in range(world)]
    slots_per_graph, graphs_per_rank = 24, 3
    plans = [[roll.randrange(1 << 30) for _ in range(slots_per_graph)] for _ in range(graphs_per_rank)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(world)]
    slots = [
        [[Slot(dice.Random(s), groups[s % 2], rank, i) for i, s in enumerate(plan)] for plan in plans] for rank in range(world)
    ]
    for number in range(graphs_per_rank):  # compile and warm, one call at a time on all ranks
        for place in range(slots_per_graph):
            for rank in range(world):
                with torch.cuda.stream(streams[rank]):
                    play([slots[rank][number][place]], wrong[rank])
            torch.cuda.synchronize()
    graphs: list[list[torch.cuda.CUDAGraph]] = []
    for rank in range(world):
        mine = []
        for number in range(graphs_per_rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=streams[rank]):
                play(slots[rank][number], wrong[rank])
            mine.append(graph)
        graphs.append(mine)
    torch.cuda.synchronize()
    made, start, step = graphs_per_rank * slots_per_graph, time.monotonic(), 0
    while made < calls:
        number = roll.randrange(graphs_per_rank)
        eager, first = step % 20 == 0, roll.randrange(slots_per_graph - 2)
        elsewhere = step % 40 == 0
        for rank in roll.sample(range(world), world):
            with torch.cuda.stream(streams[rank]):
                if roll.random() < 0.2:
                    torch.cuda._sleep(roll.randrange(100_000))
                if eager:
                    here = torch.cuda.current_stream()
                    there = others[rank] if elsewhere else here
                    there.wait_stream(here)
                    with torch.cuda.stream(there):
                        play(slots[rank][number][first : first + 3], wrong[rank])
                    here.wait_stream(there)
                else:
                    graphs[rank][number].replay()
        made += 3 if eager else slots_per_graph
        step += 1
        if step % 20 == 0:
            torch.cuda.synchronize()  # a few dozen graphs in flight, not thousands
    torch.cuda.synchronize()
    for group in groups:
        for exchange in group.ranks:
            exchange.workspace.check()
    return made, sum(int(count) for count in wrong), time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    started, rows = now(), []
    for world in map(int, args.worlds.split(",")):
        made, wrong, seconds = soak(world, args.calls, args.seed)
        print(f"world {world}: {made} calls, {wrong} wrong elements, {seconds:.0f} s", flush=True)
        extra = {"calls": made, "wrong": wrong, "seconds": round(seconds, 1), "seed": args.seed}
        rows.append(Row("soak", "crosscut", "graph", world, "mixed", note="virtual ranks of one GPU", extra=extra))
    hardware = Hardware(torch.cuda.get_device_name(), 1)
    versions = base_versions() | {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    config = {"calls": args.calls, "worlds": args.worlds, "seed": args.seed}
    record = RunRecord("benchmarks/soak.py", config, hardware, versions, rows, source_commit(), started)
    if args.out:
        record.write(args.out)
    return int(any(row.extra["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
