"""The host side of skinny.cu: which kernel for a shape, and a launch kept ready for every weight.

T tokens, N output and K input features: ``y [T, N] = x [T, K] w [N, K]^T + bias [N]``. A call may be captured into a CUDA
graph; ``y`` is written by the time the stream gets there.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from crosscut.kernels.compile import function
from crosscut.kernels.launch import MOST_SHARED, Launch, driver

TYPES = {torch.bfloat16: ("bf16", "Bf16"), torch.float16: ("fp16", "Fp16")}
WIDTHS = (8, 16, 32, 64, 96, 128)
"""Tokens that the streamed kernel is built for; a call takes the first that is enough."""
MOST_TOKENS = WIDTHS[-1]
SHARED, HALF_SHARED = MOST_SHARED, 110 << 10
"""Bytes of shared memory that a block may take of a multiprocessor's, alone and as one of two."""
MOST_STAGES = 24  # as in skinny.cu
MOST_MAPS = 64
"""Descriptions of x kept for a weight: the allocator hands few addresses out again and again."""
HOPPER = 9
"""The compute capability's major number for which the streamed kernel is written."""


class Call(ctypes.Structure):
    """The parameter block; skinny.cu says what each field means."""

    _fields_ = (
        ("x_map", c_uint64 * 16),
        ("w_map", c_uint64 * 16),
        *((name, c_uint64) for name in ("x", "w", "bias", "y")),
        *((name, c_uint32) for name in ("tokens", "n", "k", "early", "stages")),
        ("pad", c_uint32 * 3),  # the C side is aligned to 64 bytes
    )


@dataclass(frozen=True)
class Tile:
    """How the streamed kernel deals a shape out: ``tokens`` wide, ``groups`` warpgroups of 64 features a block.

    ``boxes`` of 64 k a stage, ``stages`` in flight, K dealt to the ``split`` blocks of a cluster.
    """

    tokens: int
    groups: int
    boxes: int
    stages: int
    split: int

    @property
    def threads(self) -> int:
        """Of a block: its warpgroups, and the warp that feeds them."""
        return 128 * self.groups + 32

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the ring, the sums that it ends with, and what alignment may take."""
        rows = 64 * self.groups
        ring = self.stages * self.boxes * 128 * (rows + self.tokens)
        sums = self.split * self.tokens * (rows // self.split + 4) * 4
        return (ring + sums if self.split > 1 else max(ring, sums)) + 1024

    def blocks(self, n: int) -> int:
        """The grid for ``n`` features."""
        return -(-n // (64 * self.groups)) * self.split


def tile(tokens: int, n: int, k: int, multiprocessors: int) -> Tile:
    """The tile for a shape, ``tokens`` at most 128.

    Up to 16 tokens the time is that of reading the weights: K is dealt out so that every multiprocessor has a block, with
    two half-size blocks on some. With more tokens x counts, which each block of 64 features reads again, and so do the sums
    that a cluster exchanges: few and large blocks are faster. Clusters of four large blocks no longer fill the chip.
    Measured on H200 for every split of 15 shapes.
    """
    width = next(width for width in WIDTHS if width >= tokens)
    groups = 1 if width <= 32 or n <= 64 * multiprocessors else 2
    boxes = 2 if width <= 32 else 1
    columns = -(-n // (64 * groups))
    room = {8: 1.5, 4: 1.5, 2: 1.5} if width <= 16 else {8: 0.5, 4: 0.75, 2: 1.0}
    parts = -(-k // (64 * boxes))
    split = next((s for s in (8, 4, 2) if s <= parts and columns * s <= room[s] * multiprocessors), 1)
    half = columns * split > multiprocessors or (split > 2 and width <= 16)
    steps = -(-parts // split)
    found = [Tile(width, groups, boxes, stages, split) for stages in range(min(steps, MOST_STAGES), 0, -1)]
    return next(tile for tile in found if tile.shared <= (HALF_SHARED if half else SHARED))


class Skinny:
    """The matmul of a weight at ``at`` of ``shape`` [N, K] with ``tokens``, complete but for the addresses of x, y, bias.

    ``device`` must be the current one. Not for several threads at once.
    """

    def __init__(self, at: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        n, k = shape
        properties = torch.cuda.get_device_properties(device)
        self._device = device.index
        short, name = TYPES[dtype]
        self._call = call = Call(w=at, tokens=tokens, n=n, k=k)
        self._hopper = properties.major == HOPPER
        if self._hopper:
            t = tile(tokens, n, k, properties.multi_processor_count)
            call.stages, numbers = t.stages, (t.tokens, t.groups, t.boxes, t.split)
            kernel = f"streamed_{short}_" + "_".join(map(str, numbers))
            line = f"STREAMED({kernel}, {t.threads}, {name}, {', '.join(map(str, numbers))})"
            code = function(line, kernel, 0, self._device, "skinny.cu")
            self._launch = Launch(code, call, cluster=t.split, shared=t.shared)
            self._launch.shape(t.blocks(n), t.threads)
            self._x_map = (k, tokens, dtype)
            ctypes.memmove(call.w_map, _map(call.w, k, n, 64 * t.groups, dtype), 128)
        else:
            tiles = min(-(-tokens // 8), 4)
            tiles = 4 if tiles == 3 else tiles
            kernel = f"plain_{short}_{tiles}"
            code = function(f"PLAIN({kernel}, {name}, {tiles})", kernel, 0, self._device, "skinny.cu")
            self._launch = Launch(code, call, programmatic=False)
            self._launch.shape(-(-n // 32), 256, -(-tokens // (8 * tiles)))
        self._seen: tuple[int, int] | None = None
        self._maps: dict[int, bytes] = {}
        self._stream = torch._C._cuda_getCurrentRawStream

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """``y`` = x w^T + bias, contiguous, x and y at multiples of 16 bytes; ``weight`` as prepared for."""
        call = self._call
        at = x.data_ptr()
        if at != call.x:
            call.x = at
            if self._hopper:
                found = self._maps.get(at) or self._new_map(at)
                ctypes.memmove(call.x_map, found, 128)
        call.y = y.data_ptr()
        call.bias = 0 if bias is None else bias.data_ptr()
        now = (id(weight), -1 if weight.is_inference() else weight._version)
        call.early = now == self._seen and now[1] >= 0 and type(weight) is Parameter
        self._seen = now
        self._launch.go(self._stream(self._device))

    def _new_map(self, at: int) -> bytes:
        k, tokens, dtype = self._x_map
        if len(self._maps) >= MOST_MAPS:
            self._maps.clear()
        found = self._maps[at] = _map(at, k, tokens, tokens, dtype)
        return found


def _map(at: int, k: int, rows: int, box: int, dtype: torch.dtype) -> bytes:
    """The copy engine's description of a tensor [rows, k] at ``at``, cut in boxes of ``box`` rows by 64 k, swizzled."""
    memory = ctypes.create_string_buffer(192)
    aligned = -(-ctypes.addressof(memory) // 64) * 64
    status = driver().cuTensorMapEncodeTiled(
        c_void_p(aligned), c_int(9 if dtype == torch.bfloat16 else 6), c_uint32(2), c_void_p(at),
        (c_uint64 * 2)(k, rows), (c_uint64 * 1)(2 * k), (c_uint32 * 2)(64, box), (c_uint32 * 2)(1, 1),
        c_int(0), c_int(3), c_int(2), c_int(0),  # not interleaved, swizzle of 128 bytes, L2 fetches 128, zeros outside
    )  # fmt: skip
    if status:
        raise RuntimeError(f"the CUDA driver refused the description of a tensor [{rows}, {k}]: error {status}")
    return ctypes.string_at(aligned, 128)
