"""Settings that virtual ranks need, made before CUDA starts.

Their kernels wait for each other while one thread still issues work: loading code lazily would wait for those kernels, and
streams that share a hardware queue would stand behind each other.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
