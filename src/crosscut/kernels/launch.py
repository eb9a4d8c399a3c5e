"""Launching a kernel from Python in about 4 us: everything but the changing fields is prepared, one ctypes call remains.

The C side of a kernel's parameters is a ``struct Call``; :class:`Call` mirrors that of exchange.cu field by field, and
skinny.py has that of skinny.cu. Kernels are launched with programmatic stream serialisation (programmatic dependent launch
of the CUDA programming guide), so that their start overlaps the end of the kernel before; they wait for its results
themselves.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

MOST_SHARED = 220 << 10
"""Bytes of dynamic shared memory that every kernel which asks for more than 48 KiB is allowed: a permission belongs to the
kernel, and a launch that asked for less would take it from one that needs more."""

RANKS = 8
"""The most ranks that a workspace can have."""


class Call(ctypes.Structure):
    """The one parameter block of every kernel of exchange.cu, which says what each field means."""

    _fields_ = (
        *((name, c_uint64) for name in ("input", "output", "residual", "bias", "gamma", "beta", "residual_out")),
        ("mail", c_uint64 * RANKS),
        *((name, c_uint64) for name in ("epochs", "record", "bytes", "row", "deadline")),
        *((name, c_uint64) for name in ("flagged_at", "flags_at", "staging_at")),
        *((name, c_uint32) for name in ("rank", "root", "lanes", "blocks", "chunk", "op", "hidden")),
        ("eps", c_float),
    )


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", c_int), ("pad", c_uint32), ("value", c_uint32 * 16))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, c_uint32) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint32),
    )


_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver, for calls that need no Python object around them."""
    return ctypes.CDLL("libcuda.so.1")


class Launch:
    """One kernel with its parameter block. Set fields of ``call`` and ``total``, then call it with grid, block, stream.

    ``total`` is a second parameter, which kernels of one parameter do not read. ``cluster``: blocks of a cluster (Hopper);
    ``shared``: bytes of dynamic shared memory; ``programmatic`` False: a plain launch, for GPUs before Hopper.
    """

    def __init__(
        self, function: int, call: ctypes.Structure, *, cluster: int = 1, shared: int = 0, programmatic: bool = True
    ) -> None:
        self.call: Any = call
        self.total = c_uint64(0)
        self._function = c_void_p(function)
        attributes: list[tuple[int, tuple[int, ...]]] = [(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))] * programmatic
        attributes += [(_CLUSTER_DIMENSION, (cluster, 1, 1))] * (cluster > 1)
        self._attributes = (_Attribute * 2)(*(_Attribute(id, 0, value) for id, value in attributes))
        self._config = _Config(1, 1, 1, 1, 1, 1, shared, None, ctypes.addressof(self._attributes), len(attributes))
        self._parameters = (c_void_p * 2)(ctypes.addressof(self.call), ctypes.addressof(self.total))
        self._where = ctypes.byref(self._config)
        self._launch = driver().cuLaunchKernelEx
        if shared > 48 << 10 and driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, MOST_SHARED):
            raise RuntimeError(f"the CUDA driver refused a kernel {shared} bytes of shared memory")

    def __call__(self, grid: int, block: int, stream: int) -> None:
        """Queue the kernel on ``stream`` (a raw handle). Raises RuntimeError when the driver refuses."""
        self.shape(grid, block)
        self.go(stream)

    def shape(self, grid: int, block: int, grid_y: int = 1) -> None:
        """Set the number of blocks, and of threads in each."""
        self._config.grid_x, self._config.grid_y, self._config.block_x = grid, grid_y, block

    def go(self, stream: int) -> None:
        """As a call, with the grid as it was set last."""
        self._config.stream = stream
        status = self._launch(self._where, self._function, self._parameters, None)
        if status:
            raise RuntimeError(f"the CUDA driver refused a launch: error {status}")
