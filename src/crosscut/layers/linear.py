"""Linear layers cut over the tp group: by output features (column) or by input features (row).

Shapes: T tokens (any leading dims), H input and F output features; ``/tp`` marks what a rank holds. Weights are stored as
torch stores them, ``[out, in]``. Sizes need not divide; the first ranks hold one feature more.
Source: Megatron-LM, arXiv 1909.08053 section 3; with sequence parallelism arXiv 2205.05198 section 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from crosscut.collectives import (
    copy_to_tp,
    reduce_from_tp,
    reduce_scatter_sequence,
    scatter_to_tp,
)
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers.checks import check_dtype, check_sequence_dim
from crosscut.layers.matmul import linear
from crosscut.layers.overlap import column_linear, row_in_pieces
from crosscut.layers.parts import weight_and_bias
from crosscut.layers.shards import gather, refuse_empty, shared_seed, take, uniform_
from crosscut.sharding import Column, Cut, Packed, Replicated, Row


class _ParallelLinear(nn.Module):
    """What both share: a cut weight, a bias, and the way back to an ``nn.Linear``."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        mesh: Mesh,
        cuts: dict[str, Cut],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        refuse_empty(in_features=in_features, out_features=out_features)
        check_dtype(dtype)
        self.in_features, self.out_features = in_features, out_features
        self.group: Group = mesh.tp
        self.cuts = cuts
        tp, rank = self.group.size, self.group.rank
        where = mesh.device if device is None else device

        self.shapes = {"weight": (out_features, in_features)} | ({"bias": (out_features,)} if bias else {})
        for name, shape in self.shapes.items():
            shard = cuts[name].shard_shape(shape, tp, rank)
            self.register_parameter(name, nn.Parameter(torch.empty(shard, device=where, dtype=dtype)))
        if not bias:
            self.register_parameter("bias", None)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the initial weights of ``nn.Linear``'s law, U(-1/sqrt(in), 1/sqrt(in)), equal at every tp.

        ``seed`` None: drawn from torch's generator on the group's first rank (so ``torch.manual_seed`` decides), which
        makes this a collective call.
        """
        if self.weight.is_meta:
            return
        seed = shared_seed(self.group) if seed is None else seed
        bound = 1 / math.sqrt(self.in_features)
        for offset, (name, parameter) in enumerate(sorted(self.named_parameters())):
            uniform_(parameter, self.cuts[name], self.shapes[name], bound, seed + offset, self.group)

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: Mesh, **options: Any) -> Self:
        """This rank's shard of ``linear``: same values, dtype, device and ``requires_grad``.

        ``options``: the constructor's, such as ``gather_output``.
        """
        options |= {"device": "meta", "dtype": linear.weight.dtype}
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, mesh=mesh, **options)
        layer.to_empty(device=linear.weight.device)
        with torch.no_grad():
            for name, mine in layer.named_parameters():
                whole = linear.get_parameter(name)
                mine.copy_(take(whole, layer.cuts[name], layer.group.size, layer.group.rank))
                mine.requires_grad_(whole.requires_grad)
        return layer

    def to_linear(self) -> nn.Linear:
        """The unsplit layer on every rank, weights bit for bit and ``requires_grad`` as here. A collective call."""
        weight, bias = self._own()
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, device="meta", dtype=weight.dtype)
        for name, mine in (("weight", weight), ("bias", bias)):
            if mine is not None:
                whole = gather(mine, self.cuts[name], tuple(linear.get_parameter(name).shape), self.group)
                setattr(linear, name, nn.Parameter(whole, requires_grad=mine.requires_grad))
        return linear

    _own = weight_and_bias

    def _check_width(self, x: Tensor, allowed: int, what: str) -> None:
        if x.shape[-1] != allowed:
            raise UsageError(
                f"{type(self).__name__}({self.in_features} -> {self.out_features}, tp {self.group.size}) "
                f"got x {list(x.shape)}; {what} must have {allowed} features in the last dim",
                code="bad-shape",
                fix="check what the layer before it gives: whole features, or this rank's shard of them",
            )

    def extra_repr(self) -> str:
        """Sizes, and the rank's place, for ``print(module)``."""
        place = f"tp {self.group.rank}/{self.group.size}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {place}"


class ColumnParallelLinear(_ParallelLinear):
    """``y = x W^T + b`` with the output features cut: ``w [F/tp, H]``, ``b [F/tp]``.

    forward:  ``x [T, H]`` (the same on all ranks) -> ``y [T, F/tp]``, or ``[T, F]`` with ``gather_output``
    backward: ``dx [T, H]`` is summed over the group while ``dw`` is computed; ``dw``, ``db`` stay local

    ``gather_output``: join the output features on every rank (one all-gather).
    ``sequence_parallel``: the input is this rank's tokens alone, ``[T/tp, H]``, joined first along ``sequence_dim``; its
    gradient is reduce-scattered. ``packed``: sizes of several weights stored as one (gate and up; q, k, v), each cut on
    its own; they add up to ``out_features``.
    Raises UsageError: ``bad-size`` for a size below 1, parts that do not add up, or packed with ``gather_output``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: Mesh,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        packed: tuple[int, ...] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        if packed and gather_output:
            raise UsageError(
                "packed weights with gather_output: the joined output would mix the parts of the ranks",
                code="bad-size",
                fix="use one layer for each part, or keep the output sharded",
            )
        cut = Packed(sizes=packed) if packed else Column()
        super().__init__(in_features, out_features, bias, mesh, {"weight": cut, "bias": cut}, device, dtype)
        self.gather_output, self.sequence_parallel, self.sequence_dim = gather_output, sequence_parallel, sequence_dim
        self.reset_parameters(seed)

    def forward(self, x: Tensor, total_tokens: int | None = None) -> Tensor:
        """``x [T, H] -> y [T, F/tp]`` or ``[T, F]``. ``total_tokens``: with sequence_parallel, T when it does not divide.

        Raises UsageError (``bad-shape``) when x does not have H features.
        """
        self._check_width(x, self.in_features, "the input")
        sequence_dim = self.sequence_dim if self.sequence_parallel else None
        return column_linear(
            x, *self._own(), self.group, sequence_dim, total_tokens, self.out_features, gather_output=self.gather_output
        )


class RowParallelLinear(_ParallelLinear):
    """``y = sum over ranks of x W^T, + b`` with the input features cut: ``w [H, F/tp]``, ``b [H]`` whole, added once.

    forward:  ``x [T, F/tp]``, or ``[T, F]`` with ``input_is_parallel=False`` -> ``y [T, H]`` (one all-reduce),
              or this rank's tokens ``[T/tp, H]`` with ``sequence_parallel`` (one reduce-scatter along ``sequence_dim``)
    backward: all gradients stay local; with ``sequence_parallel`` the gradient of ``y`` is gathered and that of ``b`` summed

    ``reduce_output`` False: the output is this rank's partial sums, without bias, for a caller who adds several of them
    before one ``finish``. ``cut``: how the weight's dim 1 is dealt, when not feature by feature (attention's output:
    ``QueryHeads(heads, dim=1)``).
    Raises UsageError (``bad-size``) for a size below 1.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: Mesh,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        reduce_output: bool = True,
        cut: Cut | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        cuts: dict[str, Cut] = {"weight": cut or Row(), "bias": Replicated()}
        super().__init__(in_features, out_features, bias, mesh, cuts, device, dtype)
        self.local_features, self.reduce_output = self.weight.shape[1], reduce_output
        self.input_is_parallel, self.sequence_parallel, self.sequence_dim = input_is_parallel, sequence_parallel, sequence_dim
        self.partial_gradients = {"bias": "layer"} if sequence_parallel else {}
        self.reset_parameters(seed)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, F/tp]`` (or ``[T, F]``) ``-> y [T, H]``, or ``[T/tp, H]`` with sequence_parallel.

        Raises UsageError (``bad-shape``) when x does not have the features this rank needs.
        """
        if self.input_is_parallel:
            self._check_width(x, self.local_features, "this rank's shard")
        else:
            self._check_width(x, self.in_features, "the input")
            x = scatter_to_tp(x, self.group)
        if self.sequence_parallel:
            check_sequence_dim(self.sequence_dim, x.dim())
        weight, bias = self._own()
        if self.group.size == 1:
            return linear(x, weight, bias if self.reduce_output else None)
        if self.reduce_output:
            sequence_dim = self.sequence_dim if self.sequence_parallel else None
            y = row_in_pieces(x, weight, self.group, sequence_dim, self.in_features)
            if y is not None:
                return self.plus_bias(y)
        y = linear(x, weight, then=("all_reduce", self.group) if self.reduce_output and not self.sequence_parallel else None)
        return self.finish(y) if self.reduce_output else y

    def finish(self, y: Tensor) -> Tensor:
        """This rank's partial sums to the output: their sum over the ranks, and the bias once."""
        if self.sequence_parallel:
            return self.plus_bias(reduce_scatter_sequence(y, self.group, self.sequence_dim))
        return self.plus_bias(reduce_from_tp(y, self.group, True))

    def plus_bias(self, y: Tensor) -> Tensor:
        """``y + b``. With sequence_parallel each rank adds it to tokens of its own, and the partial gradients are summed."""
        bias = self._own()[1]
        if bias is None:
            return y
        bias = copy_to_tp(bias, self.group) if self.sequence_parallel else bias
        return y + bias.to(y.dtype)  # under autocast y is narrower, and F.linear would keep it so
