"""The multiply of a linear layer without gradients: cuBLAS, or for few tokens the kernel that streams the weights.

The choice is a pure rule over what was measured (benchmarks/skinny.py, docs/matmul.md): a GPU, a number of tokens or a size of
weight that was not measured stays with cuBLAS. Every choice can be asked: :func:`explain`.
T tokens (any leading dims), K input and N output features: ``y [T, N] = x [T, K] w [N, K]^T + bias [N]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from threading import get_ident

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from crosscut.collectives.fast import fast
from crosscut.distributed.mesh import Group
from crosscut.env import settings
from crosscut.kernels.skinny import MOST_TOKENS, TYPES, Skinny

MIB = 1 << 20


@dataclass(frozen=True)
class Choice:
    """``cublas`` or ``skinny``, and the reason in words."""

    impl: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """Skinny for up to ``tokens``, with N, K and the weight's MiB in these ranges, both ends included.

    ``exchanged``: only where a kernel of crosscut's collectives takes the output over; skinny then also hides its start.
    """

    tokens: int
    n: tuple[int, int]
    k: tuple[int, int]
    mib: tuple[float, float]
    exchanged: bool = False

    def fits(self, tokens: int, n: int, k: int, mib: float, exchanged: bool) -> bool:
        """Whether the rule speaks of this multiply."""
        inside = all(low <= value <= high for value, (low, high) in zip((n, k, mib), (self.n, self.k, self.mib), strict=True))
        return inside and tokens <= self.tokens and exchanged >= self.exchanged

    def __str__(self) -> str:
        ends = (f"{what} {low:g} to {high:g}" for what, (low, high) in (("N", self.n), ("K", self.k), ("MiB", self.mib)))
        return f"up to {self.tokens} tokens, {', '.join(ends)}{', before an exchange' if self.exchanged else ''}"


RULES: dict[str, tuple[Rule, ...]] = {
    "NVIDIA H200": (
        Rule(48, (512, 1024), (1024, 4096), (1, 8)),
        Rule(48, (1024, 4096), (4096, 7168), (8, 56)),
        Rule(48, (4096, 8192), (7168, 14336), (56, 224)),
        Rule(16, (6144, 7168), (4096, 4096), (48, 56)),
        Rule(128, (512, 1024), (1024, 4096), (1, 8), exchanged=True),
        Rule(128, (1024, 4096), (4096, 7168), (8, 56), exchanged=True),
        Rule(48, (2048, 8192), (2048, 7168), (16, 64), exchanged=True),
    ),
}
"""By the name of the GPU. At every shape and number of tokens that was measured inside a rule, skinny was at least 4 % faster:
alone, after an ordinary kernel and before an exchange; with ``exchanged``, in the last of these. A test holds the rules to the
record, benchmarks/results/h200x1_skinny_*.json."""


def choose(gpu: str, tokens: int, n: int, k: int, itemsize: int, exchanged: bool = False, forced: str = "auto") -> Choice:
    """The rule, for ``gpu`` as the driver names it. Pure."""
    if forced != "auto":
        return Choice(forced, f"CROSSCUT_MATMUL={forced}")
    if gpu not in RULES:
        return Choice("cublas", f"{gpu} was not measured")
    mib = n * k * itemsize / MIB
    found = next((rule for rule in RULES[gpu] if rule.fits(tokens, n, k, mib, exchanged)), None)
    if found:
        return Choice("skinny", f"measured faster on {gpu} for {found}")
    return Choice("cublas", f"not measured faster on {gpu} for {tokens} tokens, N {n}, K {k}, {mib:.3g} MiB")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: tuple[str, Group] | None = None) -> Tensor:
    """``F.linear``, by the faster of two ways where no gradient is recorded. ``then``: the collective that gets y at once.

    Skinny reads the weights before the kernel before it has ended, when ``weight`` is a Parameter that has not changed since
    its last call here (by torch's version counter, which a write through ``.data`` does not move).
    """
    if (
        x.is_cuda
        and not torch.compiler.is_dynamo_compiling()
        and 0 < x.numel() <= MOST_TOKENS * x.shape[-1]
        and _plain_tensors(x, weight)
        and not _why_not(x, weight, bias)
    ):
        ready = _ready(x, weight, then)
        if ready is not None:
            y = x.new_empty((*x.shape[:-1], weight.shape[0]))
            ready(x, weight, bias, y)
            return y
    return F.linear(x, weight, bias)


def explain(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: tuple[str, Group] | None = None) -> Choice:
    """What :func:`linear` does with these, and why."""
    if not x.is_cuda:
        return Choice("cublas", f"x is on {x.device.type}, where torch's own multiply serves")
    if not _plain_tensors(x, weight):
        return Choice("cublas", "x or the weight is not a plain tensor")
    why_not = _why_not(x, weight, bias) or _why_not_ever(x, weight)
    if why_not:
        return Choice("cublas", why_not)
    n, k = weight.shape
    gpu, tokens = torch.cuda.get_device_name(weight.device), x.numel() // k
    return choose(gpu, tokens, n, k, weight.element_size(), _taken_over(then, tokens, weight), settings().matmul)


def forget() -> None:
    """Forget all choices, so that CROSSCUT_MATMUL is read anew."""
    _prepared.cache_clear()


def _ready(x: Tensor, weight: Tensor, then: tuple[str, Group] | None) -> Skinny | None:
    tokens = x.numel() // x.shape[-1]
    exchanged = then is not None and _taken_over(then, tokens, weight)
    try:
        return _prepared(weight.data_ptr(), weight.shape, tokens, weight.dtype, weight.device, exchanged, get_ident())
    except _Capturing:
        return None


def _taken_over(then: tuple[str, Group] | None, tokens: int, weight: Tensor) -> bool:
    """Whether a kernel of crosscut's, and not NCCL, carries the collective ``then`` of this y."""
    kernels = None if then is None else fast(then[1])
    if then is None or kernels is None:
        return False
    part = tokens * weight.shape[0] * weight.element_size()
    return kernels.algorithm(then[0], part * then[1].size if then[0] == "all_gather" else part, part) is not None


class _Capturing(Exception):
    """A weight's first call came inside a CUDA graph capture. Raised past the cache, which would keep the answer."""


@lru_cache(maxsize=4096)
def _prepared(
    at: int, shape: torch.Size, tokens: int, dtype: torch.dtype, device: torch.device, exchanged: bool, thread: int
) -> Skinny | None:
    """A launch complete but for x, y and bias, which two threads must not share. None: cuBLAS."""
    if _unfit(at, shape, dtype, device):
        return None
    if torch.cuda.is_current_stream_capturing():  # no code can be loaded now; the next eager call does
        raise _Capturing
    choice = choose(
        torch.cuda.get_device_name(device), tokens, shape[0], shape[1], dtype.itemsize, exchanged, settings().matmul
    )
    return Skinny(at, shape, dtype, device, tokens) if choice.impl == "skinny" else None


def _plain_tensors(x: Tensor, weight: Tensor) -> bool:
    return type(x) in _PLAIN and type(weight) in _PLAIN


_PLAIN = (Tensor, Parameter)


def _why_not_ever(x: Tensor, weight: Tensor) -> str:
    tokens = x.numel() // max(1, x.shape[-1])
    if not 0 < tokens <= MOST_TOKENS:
        return f"{tokens} tokens; the skinny kernel takes 1 to {MOST_TOKENS}"
    return _unfit(weight.data_ptr(), weight.shape, weight.dtype, weight.device)


def _unfit(at: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernel cannot take this weight, or nothing."""
    if dtype not in TYPES:
        return f"the skinny kernel has no {str(dtype).removeprefix('torch.')}"
    if len(shape) != 2 or shape[1] % 8 or at % 16 or 0 in shape:
        return f"the skinny kernel needs a weight [N, K] with K a multiple of 8 at a multiple of 16 bytes, not {list(shape)}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the skinny kernel needs compute capability 8.0"
    return "" if find_spec("cuda.bindings") else "the package cuda-bindings is not installed"


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Why not this call, or nothing: everything that may change from call to call."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        return "a gradient is recorded"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return "a transform or a mode of torch watches the operators"
    if x.dtype is not weight.dtype or x.shape[-1] != weight.shape[1] or (bias is not None and bias.dtype is not weight.dtype):
        return "dtypes or sizes of x, weight and bias do not match"
    if not (x.is_contiguous() and weight.is_contiguous() and x.data_ptr() % 16 == 0 and (bias is None or bias.is_contiguous())):
        return "x, weight or bias is not contiguous, or x is not at a multiple of 16 bytes"
    device = x.get_device()
    if not device == weight.get_device() == torch._C._cuda_getDevice() or (bias is not None and bias.get_device() != device):
        return "x, weight and bias are not on the current device"
    return ""
