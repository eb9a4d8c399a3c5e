"""The way to crosscut's own kernels: built once a group, then a few microseconds of Python a call.

Each function here gives the result, or None when the general way (NCCL, gloo) must take the call. All ranks decide alike,
because all see the same shapes, the same table and the same agreement on whether the kernels can run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.collectives.select import Choice, Table, explain, table_for
from crosscut.distributed.mesh import Group
from crosscut.env import settings
from crosscut.errors import UsageError
from crosscut.kernels.exchange import REDUCTIONS, TYPES, Exchange
from crosscut.kernels.launch import RANKS
from crosscut.kernels.workspace import shared_workspace

_KEY = "fast"
_SUM = dist.AllreduceOptions()  # a sum, on the caller's stream
_SUM.asyncOp = False


class Fast:
    """The kernels of one group on this rank, with the table that says when they serve."""

    def __init__(self, exchange: Exchange, table: Table) -> None:
        self.exchange, self.table = exchange, table
        self._known: dict[tuple[str, int, int], str | None] = {}

    def algorithm(self, op: str, nbytes: int, part: int) -> str | None:
        """The algorithm for a tensor of ``nbytes`` with parts of ``part``; None when NCCL serves better."""
        key = (op, nbytes, part)
        if key not in self._known:
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
    """What carries ``nbytes`` (of the whole tensor) of ``op`` on this group, and why."""
    found = fast(group)
    return explain(op, nbytes, found.table if found else None, group.backend, group.cache.get("why", ""))


def _build(group: Group) -> tuple[Fast | None, str]:
    wanted = settings().collectives
    why = _obstacle(group, wanted)
    if group.process_group is None or group.device.type != "cuda":
        return None, why
    if not _all_agree(group, why == ""):
        return None, why or "another rank of the group cannot use the kernels"
    device = torch.device("cuda", group.device.index if group.device.index is not None else torch.cuda.current_device())
    try:
        workspace = shared_workspace(group.axis, group.process_group, device, settings().timeout)
    except RuntimeError as error:
        workspace, why = None, f"the GPUs share no memory: {str(error).splitlines()[0]}"
    if not _all_agree(group, workspace is not None):
        if wanted == "kernels":
            raise UsageError(why, code="no-backend", fix="unset CROSSCUT_COLLECTIVES, or set it to nccl")
        return None, why or "another rank of the group could not map the shared memory"
    assert workspace is not None
    return Fast(Exchange(workspace, device), table_for(machine(device), group.size)), ""


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
        import cuda.bindings  # noqa: F401
    except ImportError:
        return "cuda-bindings is not installed"
    return ""


def _all_agree(group: Group, mine: bool) -> bool:
    """Whether ``mine`` holds on every rank, and all are on one host."""
    import socket
    import zlib

    host = zlib.crc32(socket.gethostname().encode()) & 0x7FFFFFFF
    device = "cpu" if group.backend == "gloo" else group.device
    vote = torch.tensor([int(mine), host, -host], dtype=torch.int64, device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group.process_group)
    agreed, low, high = vote.tolist()
    return bool(agreed) and low == -high


def machine(device: torch.device) -> list[str]:
    """What a measured table holds for: the GPU, how many there are, and the versions below us."""
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return [torch.cuda.get_device_name(device), str(torch.cuda.device_count()), torch.__version__, nccl]


# ------------------------------------------------------------------------------------------ one function a collective


def all_reduce(x: Tensor, group: Group, op: str = "sum", out: Tensor | None = None) -> Tensor | None:
    """As functional.all_reduce, where the kernels serve; and over NCCL in place, the hottest call of tensor parallelism."""
    found = fast(group)
    algorithm = None
    if found is not None and x.dtype in TYPES and op in REDUCTIONS and _plain(x, out):
        nbytes = x.nbytes
        algorithm = found.algorithm("all_reduce", nbytes, nbytes)
    if found is None or algorithm is None:
        return _nccl_in_place(x, group) if out is x and op == "sum" and group.backend == "nccl" else None
    return found.exchange.all_reduce(x, torch.empty_like(x) if out is None else out, op, algorithm)


def _nccl_in_place(x: Tensor, group: Group) -> Tensor | None:
    """The process group's own call, past the Python of dist.all_reduce, which takes longer than the rest."""
    process_group = group.process_group
    if process_group is None or not x.is_contiguous():
        return None
    work = process_group.allreduce([x], _SUM)
    if work is not None:  # NCCL gives none for a call on the caller's stream
        work.wait()
    return x


def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor | None:
    """As functional.all_gather, for even sizes along the first or the last dim."""
    found = fast(group)
    if found is None or not _plain(x) or not _even(sizes, group) or not -x.dim() <= dim < x.dim():
        return None
    row = _row(x, dim)
    algorithm = found.algorithm("all_gather", x.nbytes * group.size, x.nbytes)
    if algorithm is None or row is None:
        return None
    shape = list(x.shape)
    shape[dim] *= group.size
    return found.exchange.all_gather(x, torch.empty(shape, dtype=x.dtype, device=x.device), algorithm, row)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, op: str = "sum", sizes: Sequence[int] | None = None) -> Tensor | None:
    """As functional.reduce_scatter, for even sizes along the first or the last dim."""
    found = fast(group)
    if found is None or x.dtype not in TYPES or op not in REDUCTIONS or not _plain(x) or not -x.dim() <= dim < x.dim():
        return None
    if not _even(sizes, group) or x.shape[dim] % group.size:
        return None
    shape = list(x.shape)
    shape[dim] //= group.size
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    row = _row(out, dim)
    algorithm = found.algorithm("reduce_scatter", x.nbytes, out.nbytes)
    if algorithm is None or row is None:
        return None
    return found.exchange.reduce_scatter(x, out, op, algorithm, row)


def broadcast(x: Tensor, group: Group, src: int = 0, out: Tensor | None = None) -> Tensor | None:
    """As functional.broadcast."""
    found = fast(group)
    if found is None or not _plain(x, out) or not 0 <= src < group.size:
        return None
    algorithm = found.algorithm("broadcast", x.nbytes, x.nbytes)
    if algorithm is None:
        return None
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
    if found is None or uneven or split_dim or concat_dim or not _plain(x):
        return None
    algorithm = found.algorithm("all_to_all", x.nbytes, x.nbytes // group.size)
    return None if algorithm is None else found.exchange.all_to_all(x, torch.empty_like(x), algorithm)


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
    found = fast(group)
    if found is None or x.dtype not in TYPES or not _plain(x, residual):
        return None
    others = [t for t in (residual, weight, bias, norm_bias) if t is not None]
    width = x.shape[-1] * x.element_size()
    if any(t.dtype != x.dtype or not t.is_contiguous() for t in others) or width % 16 or width > 65536:
        return None
    if found.algorithm("all_reduce", x.nbytes, x.nbytes) != "lanes":
        return None
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    rows = (-1, x.shape[-1])
    found.exchange.all_reduce_norm(
        x.view(rows), residual.view(rows), weight, eps, out.view(rows), residual_out.view(rows), bias, norm_bias, layer_norm
    )
    return out, residual_out


def _plain(x: Tensor, other: Tensor | None = None) -> bool:
    if not (x.is_cuda and x.is_contiguous()):
        return False
    return (
        other is None
        or other is x
        or (other.is_contiguous() and other.shape == x.shape and other.dtype == x.dtype and other.is_cuda)
    )


def _even(sizes: Sequence[int] | None, group: Group) -> bool:
    return sizes is None or (len(sizes) == group.size and len(set(sizes)) == 1)


def _row(part: Tensor, dim: int) -> int | None:
    """Bytes of a row of ``part`` for a join along ``dim``; None when the kernels cannot lay the parts out so."""
    dim %= part.dim()
    row = part.element_size() * math.prod(part.shape[dim:])
    return row if row == part.nbytes or row % 16 == 0 else None
