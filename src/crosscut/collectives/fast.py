"""The way to crosscut's own kernels: built once a group, then a few microseconds of Python a call.

Each function here gives the result, or None when the general way must take the call: that lays scattered and uneven tensors
out, asks the kernels again (``..._into``), and goes to NCCL or gloo then. All ranks decide alike, because all see the same
shapes, the same table and the same agreement on whether the kernels can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.collectives.select import OPS, Choice, Table, explain, table_for
from crosscut.distributed.mesh import Group
from crosscut.env import Settings, settings, socket_folder
from crosscut.errors import UsageError, choose
from crosscut.kernels.exchange import MOST_PREPARED, REDUCTIONS, TYPES, Exchange, Prepared
from crosscut.kernels.launch import RANKS
from crosscut.kernels.order import Aside
from crosscut.kernels.trial import SECONDS, prove
from crosscut.kernels.workspace import host_identity, shared_workspace

_KEY = "fast"
_new = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""Inductor's own way to make a tensor on the current GPU, past the dispatcher: 0.7 us less than torch.empty_like."""
_SUM = dist.AllreduceOptions()  # a sum, on the caller's stream
_SUM.asyncOp = False


class Reduction(NamedTuple):
    """What an all-reduce of one dtype, shape and op needs: the kernel's launch, and how its result is laid out."""

    launch: Prepared
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: int | None

    def result(self, x: Tensor) -> Tensor:
        """Memory for the result, like ``x``."""
        if _new is None or torch._C._cuda_getDevice() != self.device:
            return torch.empty_like(x)
        made: Tensor = _new(self.shape, self.stride, x.dtype)
        return made


class Fast:
    """The kernels of one group on this rank, with the table that says when they serve."""

    def __init__(self, exchange: Exchange, table: Table) -> None:
        self.exchange, self.table = exchange, table
        self._place = exchange.device.index
        self._known: dict[tuple[str, int, int], str | None] = {}
        self.reductions: dict[tuple[torch.dtype, torch.Size, str], Reduction | None] = {}
        """All-reduces of contiguous tensors seen so far, by dtype, shape and op; None is for NCCL."""

    def plain(self, x: Tensor, other: Tensor | None = None) -> bool:
        """Whether the kernels can take ``x`` as it lies, and write ``other``, which must be like it."""
        if x.get_device() != self._place or not x.is_contiguous() or x.is_conj() or x.is_neg():  # torch negates lazily
            return False
        return other is None or other is x or (self.plain(other) and other.shape == x.shape and other.dtype == x.dtype)

    def reduction(self, x: Tensor, op: str) -> Reduction | None:
        """The entry of ``reductions`` for the first all-reduce of its kind."""
        algorithm = None
        if x.dtype in TYPES and op in REDUCTIONS:
            algorithm = self.algorithm("all_reduce", x.nbytes, x.nbytes)
        if len(self.reductions) >= MOST_PREPARED:
            self.reductions.clear()
        found = None
        if algorithm is not None:
            launch = self.exchange.reduction(x.dtype, x.nbytes, op, algorithm)
            found = Reduction(launch, tuple(x.shape), x.stride(), self.exchange.device.index)
        self.reductions[x.dtype, x.shape, op] = found
        return found

    def algorithm(self, op: str, nbytes: int, part: int) -> str | None:
        """The algorithm for a tensor of ``nbytes`` with parts of ``part``; None when NCCL serves better."""
        key = (op, nbytes, part)
        if key not in self._known:
            if len(self._known) >= MOST_PREPARED:
                self._known.clear()
            found = self.table.algorithm(op, nbytes)
            serves = found is not None and 0 < part <= self.exchange.most(op, found)
            self._known[key] = found if serves else None
        return self._known[key]


def fast(group: Group) -> Fast | None:
    """The group's kernels, built at the first call, which all ranks must make; None where they cannot run."""
    try:
        known: Fast | None = group.cache[_KEY]
        return known
    except KeyError:
        pass
    if group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # nothing can be allocated now; the next eager call builds them
    found, why = _build(group)
    group.cache[_KEY], group.cache["why"] = found, why
    return found


def choice(op: str, nbytes: int, group: Group) -> Choice:
    """What carries ``nbytes`` (of the whole tensor) of ``op`` on this group, and why.

    Raises UsageError (``bad-option``) on an ``op`` that is no collective with a choice.
    """
    choose("collective", op, OPS)
    found = fast(group)
    return explain(op, nbytes, found.table if found else None, group.backend, group.cache.get("why", ""))


def check(group: Group) -> None:
    """Raise CollectiveTimeout (``rank-timeout``) if a wait of the group's kernels ran out: a call for one that has ended."""
    found: Fast | None = group.cache.get(_KEY)
    if found is not None:
        found.exchange.workspace.check()


def _build(group: Group) -> tuple[Fast | None, str]:
    chosen = settings()
    why = _obstacle(group, chosen.collectives)
    if group.process_group is None or group.device.type != "cuda":
        return None, why
    why = _first_reason(_everyone(group, why)) or _apart(_everyone(group, host_identity(socket_folder())))
    if why:
        return None, why
    exchange, why = _opened(group, chosen)
    why = _first_reason(_everyone(group, why))
    if exchange is not None and not why:
        why = prove(exchange, lambda finding: _everyone(group, finding), min(SECONDS, chosen.kernel_timeout))
    if exchange is None or why:
        if exchange is not None:
            exchange.workspace.close()
        if chosen.collectives == "kernels":
            raise UsageError(why, code="no-backend", fix="unset CROSSCUT_COLLECTIVES, or set it to nccl")
        return None, why
    return Fast(exchange, _table(group, exchange.device)), ""


def _table(group: Group, device: torch.device) -> Table:
    """Rank 0's table, on all ranks: with two tables (a setting, a cache folder or a file that differs) one rank would wait in
    a kernel and the other in NCCL. Raises rank 0's UsageError on all ranks."""
    found: Table | UsageError | None = None
    if group.rank == 0:
        try:
            found = table_for(machine(device), group.size)
        except UsageError as error:
            found = error
    told = _from_first(group, found)
    if isinstance(told, UsageError):
        raise told
    assert isinstance(told, Table), "rank 0 has a table or an error"
    return told


def _opened(group: Group, chosen: Settings) -> tuple[Exchange | None, str]:
    """The group's kernels over new shared memory, or None and why there is none."""
    assert group.process_group is not None
    device = torch.device("cuda", group.device.index if group.device.index is not None else torch.cuda.current_device())

    def tell(problem: str) -> list[str]:
        return _everyone(group, problem)

    try:
        workspace = shared_workspace(group.axis, group.process_group, device, chosen.kernel_timeout, chosen.timeout, tell)
    except RuntimeError as error:
        return None, f"the GPUs share no memory: {str(error).splitlines()[0]}"
    return Exchange(workspace, device), ""


def _obstacle(group: Group, wanted: str) -> str:
    """Why the kernels are out of the question, the empty string when they are not."""
    if group.size == 1:
        return "a group of one does not communicate"
    if group.device.type != "cuda":
        return f"{group.backend} carries tensors in host memory"
    if wanted == "nccl":
        return "CROSSCUT_COLLECTIVES=nccl"
    if group.backend != "nccl" and wanted != "kernels":
        return f"the ranks were started with the {group.backend} backend"
    if group.size > RANKS:
        return f"the kernels serve up to {RANKS} ranks"
    if torch.cuda.get_device_capability(group.device) < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return "cuda-bindings is not installed"
    return ""


def _everyone(group: Group, mine: str) -> list[str]:
    """Every rank's string, over the process group."""
    said: list[Any] = [None] * group.size
    dist.all_gather_object(said, mine, group=group.process_group)
    return [str(word) for word in said]


def _from_first(group: Group, mine: object) -> object:
    """Rank 0's object, over the process group."""
    told: list[Any] = [mine]
    dist.broadcast_object_list(told, src=group.ranks[0], group=group.process_group)
    return told[0]


def _first_reason(reasons: list[str]) -> str:
    """One reason for all ranks: the first one given, with its rank unless all give it."""
    if len(set(reasons)) == 1:
        return reasons[0]
    return next(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


def _apart(identities: list[str]) -> str:
    """Why ranks with these :func:`host_identity` cannot share memory; the empty string when they can."""
    boots = [identity.partition(" ")[0] for identity in identities]
    for rank, (boot, identity) in enumerate(zip(boots, identities, strict=True)):
        if boot != boots[0]:
            return f"rank {rank} is on another host than rank 0"
        if identity != identities[0]:
            return f"rank {rank} is in another container than rank 0 (process ids or temporary folder are not shared)"
    return ""


def machine(device: torch.device) -> list[str]:
    """What a measured table holds for: the GPU, how many there are, and the versions below us."""
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return [torch.cuda.get_device_name(device), str(torch.cuda.device_count()), torch.__version__, nccl]


# ------------------------------------------------------------------------------------------ one function a collective


def aside(
    call: Callable[..., Tensor | None], x: Tensor, group: Group, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Aside] | None:
    """``call``, one of the functions below, with its kernel on the group's side stream; None to leave it to NCCL."""
    found = fast(group)
    return None if found is None else found.exchange.aside(lambda: call(x, group, *args, **options), x)


def all_reduce(x: Tensor, group: Group, op: str = "sum", out: Tensor | None = None) -> Tensor | None:
    """As functional.all_reduce, where the kernels serve; and over NCCL in place, the hottest call of tensor parallelism."""
    found = group.cache.get(_KEY) or fast(group)
    if found is not None and found.plain(x, out):
        key = (x.dtype, x.shape, op)
        ready = found.reductions[key] if key in found.reductions else found.reduction(x, op)
        if ready is not None:
            if out is None:
                out = ready.result(x)
            elif out is not x:
                _overwritten(out)
            found.exchange.reduce(ready.launch, x, out)
            return out
    if out is not x or op != "sum" or group.backend != "nccl" or (found is not None and found.exchange.is_aside):
        return None
    return _nccl_in_place(x, group)


def _nccl_in_place(x: Tensor, group: Group) -> Tensor | None:
    """The process group's own call, past the Python of dist.all_reduce, which takes longer than the rest."""
    process_group = group.process_group
    if process_group is None or x.get_device() != group.device.index or not x.is_contiguous() or x.is_neg() or x.is_complex():
        return None  # for the checks; and NCCL knows no complex numbers: dist.all_reduce makes pairs of them
    work = process_group.allreduce([x], _SUM)
    if work is not None:  # NCCL gives none for a call on the caller's stream
        work.wait()
    return x


def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor | None:
    """As functional.all_gather, for even sizes along the first or the last dim."""
    found = fast(group)
    if found is None or not found.plain(x) or not -x.dim() <= dim < x.dim() or not _even(sizes, x.shape[dim], group):
        return None
    row = _row(x, dim)
    algorithm = found.algorithm("all_gather", x.nbytes * group.size, x.nbytes)
    if algorithm is None or row is None:
        return None
    shape = list(x.shape)
    shape[dim] *= group.size
    return found.exchange.all_gather(x, torch.empty(shape, dtype=x.dtype, device=x.device), algorithm, row)


def all_gather_into(x: Tensor, group: Group, out: Tensor) -> Tensor | None:
    """``out`` = all ranks' ``x`` one after the other; both contiguous."""
    found = fast(group)
    if found is None or not found.plain(x):
        return None
    algorithm = found.algorithm("all_gather", out.nbytes, x.nbytes)
    return None if algorithm is None else found.exchange.all_gather(x, out, algorithm)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, op: str = "sum", sizes: Sequence[int] | None = None) -> Tensor | None:
    """As functional.reduce_scatter, for even sizes along the first or the last dim."""
    found = fast(group)
    if found is None or x.dtype not in TYPES or op not in REDUCTIONS or not found.plain(x) or not -x.dim() <= dim < x.dim():
        return None
    if x.shape[dim] % group.size or not _even(sizes, x.shape[dim] // group.size, group):
        return None
    shape = list(x.shape)
    shape[dim] //= group.size
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    row = _row(out, dim)
    algorithm = found.algorithm("reduce_scatter", x.nbytes, out.nbytes)
    if algorithm is None or row is None:
        return None
    return found.exchange.reduce_scatter(x, out, op, algorithm, row)


def reduce_scatter_into(x: Tensor, group: Group, out: Tensor, op: str) -> Tensor | None:
    """``out`` = this rank's part of the reduction of all ranks' ``x``, parts one after the other; both contiguous."""
    found = fast(group)
    if found is None or x.dtype not in TYPES or op not in REDUCTIONS or not found.plain(x):
        return None
    algorithm = found.algorithm("reduce_scatter", x.nbytes, out.nbytes)
    return None if algorithm is None else found.exchange.reduce_scatter(x, out, op, algorithm)


def broadcast(x: Tensor, group: Group, src: int = 0, out: Tensor | None = None) -> Tensor | None:
    """As functional.broadcast."""
    found = fast(group)
    if found is None or not found.plain(x, out) or not 0 <= src < group.size:
        return None
    algorithm = found.algorithm("broadcast", x.nbytes, x.nbytes)
    if algorithm is None:
        return None
    if out is not None:
        _overwritten(out)
    return found.exchange.broadcast(x, torch.empty_like(x) if out is None else out, src, algorithm)


def all_to_all(
    x: Tensor,
    group: Group,
    split_dim: int = 0,
    concat_dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> Tensor | None:
    """As functional.all_to_all, for even parts along the first dim."""
    found = fast(group)
    uneven = send_sizes is not None or recv_sizes is not None or x.dim() == 0 or x.shape[0] % group.size != 0
    if found is None or uneven or split_dim or concat_dim or not found.plain(x):
        return None
    algorithm = found.algorithm("all_to_all", x.nbytes, x.nbytes // group.size)
    return None if algorithm is None else found.exchange.all_to_all(x, torch.empty_like(x), algorithm)


def all_to_all_into(x: Tensor, group: Group, out: Tensor) -> Tensor | None:
    """``out`` = this rank's part of all ranks' ``x``, equal parts one after the other; both contiguous."""
    found = fast(group)
    if found is None or not found.plain(x):
        return None
    algorithm = found.algorithm("all_to_all", x.nbytes, x.nbytes // group.size)
    return None if algorithm is None else found.exchange.all_to_all(x, out, algorithm)


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    group: Group,
    eps: float,
    bias: Tensor | None,
    norm_bias: Tensor | None,
    layer_norm: bool,
) -> tuple[Tensor, Tensor] | None:
    """As functional.all_reduce_norm, for rows of whole 16-byte vectors that fit the lanes."""
    others = [t for t in (residual, weight, bias, norm_bias) if t is not None]
    found = fast(group)
    if found is None or not joins_norm(x, group) or not found.plain(x):
        return None
    if any(t.dtype != x.dtype or not found.plain(t) for t in others):
        return None
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    rows = (-1, x.shape[-1])
    found.exchange.all_reduce_norm(
        x.view(rows), residual.view(rows), weight, eps, out.view(rows), residual_out.view(rows), bias, norm_bias, layer_norm
    )
    return out, residual_out


def joins_norm(x: Tensor, group: Group) -> bool:
    """Whether one kernel takes the sum over ranks of a tensor like ``x [..., H]``, a residual and a norm over H."""
    found = fast(group)
    width = x.shape[-1] * x.element_size()
    if found is None or not x.is_cuda or x.dtype not in TYPES or width % 16 or width > 65536:
        return False
    return found.algorithm("all_reduce", x.nbytes, x.nbytes) == "lanes"


def _overwritten(out: Tensor) -> None:
    """Whoever kept the version of ``out``, such as autograd or kernels/skinny.py of a weight, sees that it changed."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _even(sizes: Sequence[int] | None, each: int, group: Group) -> bool:
    return sizes is None or list(sizes) == [each] * group.size


def _row(part: Tensor, dim: int) -> int | None:
    """Bytes of a row of ``part`` for a join along ``dim``; None when the kernels cannot lay the parts out so."""
    dim %= part.dim()
    row = part.element_size() * math.prod(part.shape[dim:])
    return row if row == part.nbytes or row % 16 == 0 else None
