"""Launching a kernel from Python in about 4 us: everything but the changing fields is prepared, one ctypes call remains.

The C side is ``struct Call`` in exchange.cu; :class:`Call` mirrors it field by field. Kernels are launched with
programmatic stream serialisation (programmatic dependent launch of the CUDA programming guide), so that their start
overlaps the end of the kernel before; they wait for its results themselves.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import cache

RANKS = 8
"""The most ranks that a workspace can have."""


class Call(ctypes.Structure):
    """The one parameter block of every kernel; see exchange.cu for the meaning of each field."""

    _fields_ = (
        *((name, c_uint64) for name in ("input", "output", "residual", "bias", "gamma", "beta", "residual_out")),
        ("mail", c_uint64 * RANKS),
        *((name, c_uint64) for name in ("epochs", "record", "bytes", "row", "deadline")),
        *((name, c_uint64) for name in ("flagged_at", "flags_at", "staging_at")),
        *((name, c_uint32) for name in ("rank", "root", "lanes", "blocks", "chunk", "op", "hidden")),
        ("eps", c_float),
    )


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", c_int), ("pad", c_char * 4), ("value", c_char * 64))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, c_uint32) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint32),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Launch:
    """One kernel with its parameter block. Set fields of ``call`` and ``total``, then call it with grid, block, stream."""

    def __init__(self, function: int, call: Call) -> None:
        self.call = call
        self.total = c_uint64(0)
        self._function = c_void_p(function)
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", (1).to_bytes(4, "little"))
        self._config = _Config(1, 1, 1, 1, 1, 1, 0, None, ctypes.addressof(self._attribute), 1)
        self._parameters = (c_void_p * 2)(ctypes.addressof(self.call), ctypes.addressof(self.total))
        self._where = ctypes.byref(self._config)
        self._launch = _driver().cuLaunchKernelEx

    def __call__(self, grid: int, block: int, stream: int) -> None:
        """Queue the kernel on ``stream`` (a raw handle). Raises RuntimeError when the driver refuses."""
        config = self._config
        config.grid_x, config.block_x, config.stream = grid, block, stream
        status = self._launch(self._where, self._function, self._parameters, None)
        if status:
            raise RuntimeError(f"the CUDA driver refused a launch: error {status}")
