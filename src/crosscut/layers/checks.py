"""What several layers check when they are built, and tensors that depend on sizes alone, made once for all layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from numbers import Real
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from crosscut.errors import UsageError

R = TypeVar("R")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KEPT = 4  # results of each function: the lengths of training and evaluation, on a device or two


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise UsageError (``bad-dtype``) for a dtype in which parameters cannot be multiplied and trained."""
    if dtype is not None and dtype not in _DTYPES:
        allowed = ", ".join(str(known) for known in _DTYPES)
        raise UsageError(f"dtype={dtype} for parameters", code="bad-dtype", fix=f"use one of: {allowed}")


def is_number(value: object) -> bool:
    """Whether it can be compared with numbers: YAML reads 1e-5 as a string."""
    return isinstance(value, Real)


def check_eps(eps: float) -> None:
    """Raise UsageError (``bad-option``) for an eps that is negative or no finite number."""
    if not (is_number(eps) and 0 <= eps < math.inf):
        raise UsageError(f"eps={eps!r}", code="bad-option", fix="give a small number, such as 1e-5, not below 0")


def check_sequence_dim(dim: int, dims: int) -> None:
    """Raise UsageError (``bad-size``) unless dim is one of the ``dims`` of an activation, and not that of its features."""
    if not -dims <= dim < dims or dim % dims == dims - 1:
        raise UsageError(
            f"sequence_dim={dim} for activations with {dims} dims, the last of which is that of the features",
            code="bad-size",
            fix=f"give the dim of the tokens, from 0 to {dims - 2}" if dims > 1 else "give activations with a dim of tokens",
        )


def check_dropout(p: float) -> None:
    """Raise UsageError (``bad-option``) unless 0 <= p < 1."""
    if not (is_number(p) and 0 <= p < 1):
        raise UsageError(f"dropout p={p!r}", code="bad-option", fix="give a probability from 0 up to, not including, 1")


def check_positive(**options: float | None) -> None:
    """Raise UsageError (``bad-option``) naming the first of ``options`` that is given and not a finite number above 0."""
    for name, value in options.items():
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise UsageError(f"{name}={value!r}", code="bad-option", fix="give a number above 0, or None")


def check_tokens(what: str, ids: Tensor, vocab: int, ignore: int | None = None) -> None:
    """Raise UsageError: ``bad-dtype`` for ids that are no whole numbers, ``bad-size`` for one outside the vocabulary.

    The second on CPU alone: elsewhere it would make the host wait for the device.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"{what}s are {ids.dtype}", code="bad-dtype", fix="give torch.int64")
    if ids.device.type != "cpu" or not _real():
        return
    outside = (ids < 0) | (ids >= vocab)
    wrong = ids[outside if ignore is None else outside & (ids != ignore)]
    if wrong.numel():
        raise UsageError(
            f"{what} {int(wrong[0])} is not one of the {vocab} of the vocabulary",
            code="bad-size",
            fix=f"give {what}s from 0 to {vocab - 1}" + (f", or ignore_index ({ignore})" if ignore is not None else ""),
        )


def _real() -> bool:
    """Whether tensors are what they seem: no trace of torch.compile, no fake tensors, no transform's (torch.func)."""
    return not (
        torch.compiler.is_dynamo_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


def remembered(make: Callable[..., R]) -> Callable[..., R]:
    """``make`` with its last few results kept and shared, by its (hashable) arguments. Nobody may change a result.

    Not where tensors are not real, as while torch.compile records: there each call makes its own. A CUDA graph takes what is
    kept, which is then kept for good, since the graph may be replayed at any time; what is not kept it makes for itself. The
    results, never None, can be saved for a backward even when inference mode asked for them first.
    """
    kept: dict[tuple[Any, ...], R] = {}
    of_graphs: set[tuple[Any, ...]] = set()  # those of kept that no other may push out
    lock = Lock()

    @wraps(make)
    def get(*args: Any) -> R:
        if not _real():
            return make(*args)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            with lock:
                if args in kept:
                    of_graphs.add(args)
                    return kept[args]
            return make(*args)
        found = kept.get(args)  # every layer's every call: no lock for one look
        if found is not None:
            return found
        with torch.inference_mode(False):
            made = make(*args)
        with lock:
            made = kept.setdefault(args, made)  # another thread's, if it was first: a graph may already hold it
            passing = [known for known in kept if known not in of_graphs]
            for known in passing[:-_KEPT]:
                del kept[known]
        return made

    return get
