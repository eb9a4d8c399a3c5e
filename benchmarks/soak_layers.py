"""100,000 multiplies in pieces of mixed shapes: not one wrong element may come out, and nothing may hang.

On a CPU the ranks are threads: half of the calls go through the collective library's asynchronous calls, half through the
copies' protocol with host memory in place of the engines. On a GPU they are virtual ranks, whose pieces go by copy engines;
each rank replays its own CUDA graphs with random delays between them and eager calls in between. Inputs change with every
call, so that data of an earlier call shows as an error; every element of every output is compared.

Run: PYTHONPATH=src python benchmarks/soak_layers.py --device cuda --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import os
import platform
import random as dice
import sys
import time
from pathlib import Path
from typing import Any

os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # loading code waits for running kernels, and these wait for each other
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
from virtual_copies import Virtual

from crosscut.distributed.mesh import Mesh
from crosscut.layers.carry import Library
from crosscut.layers.engines import Engines
from crosscut.records import Hardware, Row, RunRecord, base_versions, now, source_commit
from pieces_soak import draw, soak, wrong
from rank_threads import run_ranks
from thread_copies import Shared, ThreadCopies

CASES, GRAPHS = 8, 6  # calls of a graph, graphs of a rank


def on_threads(world: int, calls: int, seed: int) -> tuple[int, int]:
    """(calls made, wrong elements)."""
    made = bad = 0
    while made < calls:
        shared, count = Shared(world), min(250, (calls - made + 1) // 2)  # a thread's life is short of its kill timer

        def body(mesh: Mesh, shared: Shared = shared, count: int = count, start: int = seed + made) -> int:
            copies: Any = ThreadCopies(shared, mesh.tp.rank)
            return soak(mesh.tp, lambda: Library(mesh.tp), count, start) + soak(
                mesh.tp, lambda: Engines(copies, mesh.tp), count, start + 1
            )

        bad += sum(run_ranks(world, body))
        made += 2 * count
    return made, bad


def on_virtual_ranks(world: int, calls: int, seed: int) -> tuple[int, int]:
    """(calls made, wrong elements)."""
    roll, virtual = dice.Random(seed), Virtual(world, deadline=30)
    cases = [
        [[draw(group, seed + 1000 * graph + case, 28) for case in range(CASES)] for graph in range(GRAPHS)]
        for group in virtual.groups
    ]
    totals = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(world)]

    def call(rank: int, graph: int, case: int) -> None:
        totals[rank].add_(wrong(cases[rank][graph][case].flip().run(virtual.engines(rank))))

    graphs: list[list[torch.cuda.CUDAGraph]] = [[] for _ in range(world)]
    for number in range(GRAPHS):
        for case in range(CASES):
            virtual.run(lambda rank, number=number, case=case: call(rank, number, case))
        for rank in range(world):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=virtual.streams[rank]):
                for case in range(CASES):
                    call(rank, number, case)
            graphs[rank].append(graph)
    for total in totals:
        total.zero_()
    torch.cuda.synchronize()
    made = step = 0
    while made < calls:
        number, eager = roll.randrange(GRAPHS), step % 20 == 0
        for rank in roll.sample(range(world), world):
            with torch.cuda.stream(virtual.streams[rank]):
                if roll.random() < 0.2:
                    torch.cuda._sleep(roll.randrange(100_000))
                if eager:
                    call(rank, number, step // 20 % CASES)
                else:
                    graphs[rank][number].replay()
        made += 1 if eager else CASES
        step += 1
        if step % 10 == 0:
            torch.cuda.synchronize()  # a few graphs in flight, not thousands
    torch.cuda.synchronize()
    for copies in virtual.copies:
        copies.check()
    return made, sum(int(total) for total in totals)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU")
    started, rows, gpu = now(), [], args.device == "cuda"
    for world in map(int, args.worlds.split(",")):
        start = time.monotonic()
        made, bad = (on_virtual_ranks if gpu else on_threads)(world, args.calls, args.seed)
        seconds = time.monotonic() - start
        print(f"world {world}: {made} calls, {bad} wrong elements, {seconds:.0f} s", flush=True)
        extra = {"calls": made, "wrong": bad, "seconds": round(seconds, 1), "seed": args.seed}
        note = "virtual ranks of one GPU" if gpu else "rank threads"
        rows.append(Row("soak", "crosscut", "graph" if gpu else "eager", world, "fp32", note=note, extra=extra))
    hardware = Hardware(torch.cuda.get_device_name() if gpu else f"CPU, {platform.machine()}", 1)
    versions = base_versions() | {"torch": torch.__version__}
    config = {key: str(getattr(args, key)) for key in ("device", "calls", "worlds", "seed")}
    record = RunRecord("benchmarks/soak_layers.py", config, hardware, versions, rows, source_commit(), started)
    if args.out:
        record.write(args.out)
    return int(any(row.extra["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
