"""Few tokens: crosscut's skinny matmul beside cuBLAS and the time that memory needs for the weights, on one GPU.

Weights rotate over more than the L2 cache holds, in one CUDA graph a case. A matmul is timed in three surroundings, because
what comes before and after decides how much of its start and end is hidden:

  none         matmuls alone, one after the other
  elementwise  an ordinary kernel (x is copied) before each
  exchange     crosscut's all-reduce + residual + RMSNorm after each, of a rank whose peer answers at once (its mailbox is
               this GPU's own memory): all of a row-parallel layer but the wire

Each output is checked against float64.

Run: PYTHONPATH=src python benchmarks/skinny.py --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import crosscut as cc
from crosscut.bench.context import make_record
from crosscut.bench.timing import captured, clock
from crosscut.kernels.exchange import Exchange
from crosscut.kernels.workspace import Layout, Workspace
from crosscut.layers import matmul
from crosscut.records import Row, Times, now

SHAPES = (
    "4096x4096,2048x4096,7168x4096,4096x7168,14336x8192,8192x14336,512x1024,3072x4096,1024x4096,1024x1024,8192x4096,"
    "5120x5120,2560x5120,4096x2048,6144x4096"
)
TOKENS = "1,2,4,8,16,24,32,33,48,64,72,96,112,128"
NO_CACHE_HOLDS = 256 << 20
SURROUNDINGS = ("none", "elementwise", "exchange")
Multiply = Callable[[Tensor, Tensor], Tensor]


def echo(device: torch.device) -> Exchange:
    """A rank of two whose peer's mailbox is its own: what it sends is what it receives, at once."""
    layout = Layout(2)
    own = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    mine = own.data_ptr()
    return Exchange(Workspace("echo", 0, layout, own, (mine, mine + layout.lanes * 16), 5.0), device)


class Case:
    """One shape and number of tokens: inputs, weights in rotation, and what surrounds the multiply."""

    def __init__(self, pool: Tensor, n: int, k: int, tokens: int, exchange: Exchange) -> None:
        copies = max(2, min(NO_CACHE_HOLDS // (n * k * 2), 512))
        self.weights = [Parameter(pool[i * n * k : (i + 1) * n * k].view(n, k), requires_grad=False) for i in range(copies)]
        self.source = torch.randn(tokens, k, device=pool.device).to(pool.dtype)
        self.x, self.exchange = self.source.clone(), exchange
        self.n, self.k, self.tokens = n, k, tokens
        self.residual, self.gamma = torch.zeros(tokens, n, device=pool.device, dtype=pool.dtype), torch.ones_like(pool[:n])
        self.fits = tokens * n * 2 <= exchange.workspace.layout.lanes * 16 and n // 8 <= 4096
        self.reference = self.source.double() @ self.weights[0].double().t()

    def calls(self, multiply: Multiply, surroundings: str) -> list[Callable[[], Tensor]]:
        def call(weight: Tensor) -> Tensor:
            if surroundings == "elementwise":
                self.x.copy_(self.source)
            y = multiply(self.x, weight)
            if surroundings == "exchange":
                out, residual = torch.empty_like(y), torch.empty_like(y)
                self.exchange.all_reduce_norm(y, self.residual, self.gamma, 1e-6, out, residual)
            return y

        return [lambda w=w: call(w) for w in self.weights]  # type: ignore[misc]

    def measure(self, impl: str, multiply: Multiply, mode: str, surroundings: str, samples: int) -> Row:
        calls = self.calls(multiply, surroundings)
        for call in islice(cycle(calls), len(calls) + 2):
            call()
        inner = max(len(calls), 24)
        again = list(islice(cycle(calls), inner))
        if mode == "graph":
            run, outputs = captured(calls[0], lambda: [call() for call in again], self.x.device)
            for output in outputs:
                output.fill_(float("nan"))
        else:

            def run() -> None:
                for call in again:
                    call()

            outputs = [calls[0]()]
        run()
        times = [clock(run, self.x.device) / inner for _ in range(samples)]
        error = float((outputs[0].double() - self.reference).norm() / self.reference.norm())
        shape = {"tokens": self.tokens, "in": self.k, "out": self.n}
        extra = {"surroundings": surroundings, "copies": len(self.weights)}
        return Row("linear", impl, mode, 1, "bfloat16", shape, us=Times.of(times), n=inner * samples, error=error, extra=extra)


def measured(args: argparse.Namespace, device: torch.device, bandwidth: float) -> Iterator[Row]:
    pool = torch.randn(NO_CACHE_HOLDS, device=device, dtype=torch.bfloat16)
    exchange = echo(device)
    for shape in args.shapes.split(","):
        n, k = map(int, shape.split("x"))
        floor = n * k * 2 / bandwidth * 1e6
        yield Row("linear", "floor", "graph", 1, "bfloat16", {"in": k, "out": n}, us=Times.of([floor]), note="weights alone")
        for tokens in map(int, args.tokens.split(",")):
            case = Case(pool, n, k, tokens, exchange)
            found: dict[tuple[str, str], float] = {}
            for impl, multiply in (("cublas", F.linear), ("skinny", matmul.linear)):
                for surroundings in SURROUNDINGS:
                    if surroundings != "exchange" or case.fits:
                        row = case.measure(impl, multiply, "graph", surroundings, args.samples)
                        assert row.us is not None
                        found[impl, surroundings] = row.us.p50
                        yield row
                if (n, k, tokens) == (4096, 4096, 1):
                    yield case.measure(impl, multiply, "eager", "none", args.samples)
            cells = [(found.get(("cublas", s)), found.get(("skinny", s))) for s in SURROUNDINGS]
            print(f"{shape:>12} {tokens:>4} {floor:6.1f}", *(_cell(*cell) for cell in cells), flush=True)
    exchange.workspace.check()


def _cell(cublas: float | None, skinny: float | None) -> str:
    return f"{'':>22}" if cublas is None or skinny is None else f" {cublas:7.2f} {skinny:7.2f} {cublas / skinny:6.3f}"


def read_rate(device: torch.device) -> float:
    """Bytes a second of a kernel that only reads."""
    memory = torch.zeros(1 << 28, dtype=torch.int32, device=device)
    run, _ = captured(memory.amax, lambda: [memory.amax() for _ in range(4)], device)
    times = [clock(run, device) / 4 for _ in range(9)]
    return memory.nbytes / sorted(times)[4] * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="outxin, ...")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    os.environ["CROSSCUT_MATMUL"] = "skinny"
    mesh, started = cc.init_mesh(), now()
    bandwidth = read_rate(mesh.device)
    print(f"memory is read at {bandwidth / 1e12:.2f} TB/s; microseconds of cuBLAS, of skinny, and their ratio")
    print(f"{'out x in':>12} {'T':>4} {'floor':>6}", *(f"{s:>22}" for s in SURROUNDINGS))
    with torch.no_grad():
        rows = list(measured(args, mesh.device, bandwidth))
    worst = max(row.error / max(1e-9, 2**-9) for row in rows if row.error is not None)
    notes = [f"memory is read at {bandwidth / 1e12:.2f} TB/s", "times of elementwise and exchange hold the other kernel too"]
    config = {"shapes": args.shapes, "tokens": args.tokens, "samples": args.samples, "correct": worst < 4}
    record = make_record("benchmarks/skinny.py", config, mesh, rows, started, notes)
    if args.out:
        record.write(args.out)
    return 0 if worst < 4 else 1


if __name__ == "__main__":
    sys.exit(main())
