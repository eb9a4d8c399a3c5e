"""The host side of exchange.cu: which kernel, which grid, and one prepared launch for each.

An :class:`Exchange` belongs to one rank of one group. Calls must come in the same order on every rank of the group, as
with NCCL; a call may be captured into a CUDA graph. Outputs are written by the time the stream gets there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crosscut.kernels.compile import function
from crosscut.kernels.launch import Launch
from crosscut.kernels.order import Aside, Order
from crosscut.kernels.workspace import Workspace

TYPES = {torch.bfloat16: ("bf16", "Bf16"), torch.float16: ("fp16", "Fp16"), torch.float32: ("fp32", "Fp32")}
REDUCTIONS = {"sum": "Sum", "max": "Max"}
LANE_THREADS, BLOCK_THREADS = 128, 512
MOST_PREPARED = 1024
"""Launches kept ready for all-reduces of a certain size; a program with more sizes than that prepares them again."""


class Prepared(Launch):
    """The launch of the kernel ``name``. ``fresh``: it has not run yet, and waits longer for its peers."""

    name: str
    fresh: bool


class Exchange:
    """Collectives of one group over its :class:`Workspace`.

    ``algorithm`` is ``lanes`` (the data is its own flag, lowest latency) or ``blocks`` (staged chunks, the wire's rate);
    all-reduce adds ``two_shot`` to either (``lanes_two_shot``, ``blocks_two_shot``).
    """

    def __init__(self, workspace: Workspace, device: torch.device, grid: int = 32) -> None:
        self.workspace, self.device = workspace, device
        self.size, self.rank = workspace.layout.size, workspace.rank
        self.grid = min(grid, workspace.layout.blocks)
        self.order = Order(device)
        self._launches: dict[str, Prepared] = {}
        self._reductions: dict[tuple[torch.dtype, int, str, str], Prepared] = {}
        self._settled: set[str] = set()  # kernels that have been launched since the deadlines were set
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._current: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._stream: Callable[[int], int] = self._current
        self._failed = workspace.failed

    def patience(self, deadline: float, first: float) -> None:
        """From now on a wait may take ``deadline`` seconds, and ``first`` in the first launch of each kernel.

        A kernel's first launch is where a peer may still be compiling it. What a CUDA graph has captured keeps its own.
        """
        self.workspace.deadline, self.workspace.first = deadline, max(first, deadline)
        for known in (self._launches, self._reductions, self._settled):
            known.clear()

    def most(self, op: str, algorithm: str) -> float:
        """The most bytes of a part (all_reduce: of the whole) that ``algorithm`` carries; blocks have no limit."""
        if algorithm.startswith("blocks"):
            return float("inf")
        lanes = self.workspace.layout.lanes
        if op in ("all_reduce", "all_reduce_norm"):
            return lanes * 16 * (self.size if algorithm == "lanes_two_shot" else 1)
        return lanes * 8

    def all_reduce(self, x: Tensor, out: Tensor, op: str = "sum", algorithm: str = "lanes") -> Tensor:
        """``out`` = reduction of all ranks' ``x`` (sum or max; bf16, fp16, fp32; contiguous; any length; ``out`` may be x).

        Sums are taken in float32 in the order of the ranks, so every rank gets the same bits.
        """
        nbytes = x.nbytes
        if nbytes:
            key = (x.dtype, nbytes, op, algorithm)
            self.reduce(self._reductions.get(key) or self.reduction(*key), x, out)
        return out

    def reduce(self, launch: Prepared, x: Tensor, out: Tensor) -> None:
        """:meth:`all_reduce` with its ``launch`` already looked up (:meth:`reduction`): the hottest call of all."""
        call = launch.call
        call.input, call.output = x.data_ptr(), out.data_ptr()
        self._queue(launch)

    def reduction(self, dtype: torch.dtype, nbytes: int, op: str, algorithm: str) -> Prepared:
        """The launch of an all-reduce of ``nbytes``, complete but for the two addresses."""
        short, name = TYPES[dtype]
        types = f"{name}, {REDUCTIONS[op]}"
        kernel, body = {
            "lanes": ("one_shot", f"one_shot<{types}>(c)"),
            "lanes_two_shot": ("two_shot", f"two_shot<{types}>(c, total_bytes)"),
            "blocks": ("one_shot_blocks", f"blocks<BLOCK_ONE_SHOT, {types}>(c)"),
            "blocks_two_shot": ("two_shot_blocks", f"blocks_two_shot<{types}>(c, total_bytes)"),
        }[algorithm]
        launch = self._prepare(f"{kernel}_{short}_{op}", body, "all_reduce")
        part = -(-nbytes // (16 * self.size)) * 16 if algorithm.endswith("two_shot") else nbytes
        launch.total.value = nbytes
        self._spread(launch, algorithm, part, 16)
        if len(self._reductions) >= MOST_PREPARED:
            self._reductions.clear()
        self._reductions[dtype, nbytes, op, algorithm] = launch
        return launch

    def all_gather(self, x: Tensor, out: Tensor, algorithm: str = "lanes", row: int | None = None) -> Tensor:
        """``out`` = all ranks' ``x`` one after the other, any dtype, bit for bit; both contiguous.

        ``row``: bytes of a row of ``x`` when ``out`` joins them along the last dim: out [T, size * F], x [T, F].
        """
        return self._move("all_gather", x, out, algorithm, x.nbytes, row)

    def all_to_all(self, x: Tensor, out: Tensor, algorithm: str = "lanes", row: int | None = None) -> Tensor:
        """Part q of ``out`` = part ``rank`` of rank q's ``x``, any dtype, bit for bit; parts lie one after the other."""
        return self._move("all_to_all", x, out, algorithm, x.nbytes // self.size, row)

    def broadcast(self, x: Tensor, out: Tensor, root: int, algorithm: str = "lanes") -> Tensor:
        """``out`` = the ``x`` of rank ``root``, any dtype, bit for bit; ``out`` may be ``x``."""
        return self._move("broadcast", x, out, algorithm, x.nbytes, None, root)

    def reduce_scatter(
        self, x: Tensor, out: Tensor, op: str = "sum", algorithm: str = "lanes", row: int | None = None
    ) -> Tensor:
        """``out`` = part ``rank`` of the reduction of all ranks' ``x`` (sum or max; bf16, fp16, fp32).

        ``row``: bytes of a row of ``out`` when parts lie along the last dim: x [T, size * F], out [T, F].
        """
        short, name = TYPES[x.dtype]
        template = "flagged<SCATTER" if algorithm == "lanes" else "blocks<BLOCK_SCATTER"
        body = f"{template}, {name}, {REDUCTIONS[op]}>(c)"
        launch = self._launch(f"reduce_scatter_{algorithm}_{short}_{op}", body, "reduce_scatter")
        launch.call.input, launch.call.output = x.data_ptr(), out.data_ptr()
        launch.call.row = row or out.nbytes
        return self._go(launch, algorithm, out.nbytes, out)

    def all_reduce_norm(
        self,
        x: Tensor,
        residual: Tensor,
        gamma: Tensor,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
        bias: Tensor | None = None,
        beta: Tensor | None = None,
        layer_norm: bool = False,
    ) -> Tensor:
        """The tail of a row-parallel layer in one kernel; all of ``x, residual, out, residual_out`` are [T, H], contiguous.

        ``residual_out`` = residual + sum over ranks of x + bias; ``out`` = RMSNorm (or LayerNorm) of it, times gamma,
        plus beta. Needs H a multiple of 16 bytes, at most 4096 vectors of 16 bytes, and all T tokens in the lanes.
        """
        short, name = TYPES[x.dtype]
        tokens, hidden = x.shape
        width = hidden * x.element_size() // 16
        vectors = next(v for v in (1, 2, 4) if width <= 1024 * v)
        kind = "layer" if layer_norm else "rms"
        body = f"tail<{name}, {vectors}, {'true' if layer_norm else 'false'}>(c)"
        launch = self._launch(f"{kind}_tail_{vectors}_{short}", body, "all_reduce_norm")
        call = launch.call
        call.input, call.residual, call.gamma = x.data_ptr(), residual.data_ptr(), gamma.data_ptr()
        call.output, call.residual_out = out.data_ptr(), residual_out.data_ptr()
        call.bias = 0 if bias is None else bias.data_ptr()
        call.beta = 0 if beta is None else beta.data_ptr()
        call.hidden, call.eps = hidden, eps
        launch.shape(tokens, -(-width // (32 * vectors)) * 32)
        self._queue(launch)
        return out

    def aside(self, body: Callable[[], Tensor | None], x: Tensor) -> tuple[Tensor, Aside] | None:
        """Run ``body``, which makes at most one call of this exchange, so that its kernel goes to the side stream.

        The kernel starts after all that the current stream holds; the current stream does not wait for it. ``x``: its input.
        Returns the result with what to wait for, or None when ``body`` does.
        """
        self._stream = self.order.fork
        try:
            result = body()
        finally:
            self._stream = self._current
        return None if result is None else (result, Aside(self.order, (x, result)))

    @property
    def is_aside(self) -> bool:
        """Whether the call is one of :meth:`aside`."""
        return self._stream is not self._current

    def mover(self, op: str, algorithm: str) -> Prepared:
        """The launch of all_gather, all_to_all or broadcast. Asking for it compiles the kernel."""
        kind = "GATHER" if op == "all_gather" else op.upper()
        template = f"flagged<{kind}" if algorithm == "lanes" else f"blocks<BLOCK_{kind}"
        return self._launch(f"{op}_{algorithm}", f"{template}, Fp32, Sum>(c)", op)

    def _move(self, op: str, x: Tensor, out: Tensor, algorithm: str, part: int, row: int | None, root: int = 0) -> Tensor:
        launch = self.mover(op, algorithm)
        call = launch.call
        call.input, call.output, call.row, call.root = x.data_ptr(), out.data_ptr(), row or part, root
        return self._go(launch, algorithm, part, out)

    def _launch(self, name: str, body: str, op: str) -> Prepared:
        launch = self._launches.get(name)
        if launch is None:
            launch = self._launches[name] = self._prepare(name, body, op)
        return launch

    def _prepare(self, name: str, body: str, op: str) -> Prepared:
        threads = BLOCK_THREADS if "blocks" in name else 1024
        line = f"KERNEL({name}, {threads}, ({body}))"
        launch = Prepared(function(line, name, self.size, self._index), self.workspace.call(op))
        launch.name, launch.fresh = name, name not in self._settled
        if launch.fresh:
            launch.call.deadline = int(self.workspace.first * 1e9)
        return launch

    def _go(self, launch: Prepared, algorithm: str, part: int, out: Tensor) -> Tensor:
        if part:
            self._spread(launch, algorithm, part, 8)
            self._queue(launch)
        return out

    def _spread(self, launch: Prepared, algorithm: str, part: int, lane: int) -> None:
        """Set the grid for parts of ``part`` bytes; ``lane``: bytes that one thread of a lanes kernel moves."""
        launch.call.bytes = part
        if algorithm.startswith("lanes"):
            launch.shape(-(-part // (lane * LANE_THREADS)), LANE_THREADS)
        else:
            launch.shape(min(self.grid, -(-part // self.workspace.layout.chunk)), BLOCK_THREADS)

    def _queue(self, launch: Prepared) -> None:
        if self._failed[0]:
            self.workspace.check()
        stream = self._stream(self._index)
        if stream != self.order.last:
            self.order.follow(stream)
        launch.go(stream)
        if launch.fresh:
            self._settle(launch)

    def _settle(self, launch: Prepared) -> None:
        launch.fresh = False
        launch.call.deadline = int(self.workspace.deadline * 1e9)
        self._settled.add(launch.name)
