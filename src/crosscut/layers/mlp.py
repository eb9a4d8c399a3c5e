"""The column-row pair: a Transformer's MLP with one all-reduce forward and one backward (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError, choose
from crosscut.layers.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.layers.parts import parts
from crosscut.layers.shards import pack, refuse_empty, shared_seed, unpack

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class ParallelMLP(nn.Module):
    """``y = down(act(up(x)))``, or gated ``y = down(act(gate(x)) * up(x))`` (SwiGLU with silu, arXiv 2002.05202).

    ``x [T, H] -> y [T, H]``. ``up`` holds ``[F/tp, H]``; gated, it holds gate and up packed, ``[2F/tp, H]``, so that one
    multiply serves both. ``down`` holds ``[H, F/tp]``. ``sequence_parallel``: x and y are this rank's tokens, ``[T/tp, H]``.
    Raises UsageError: ``bad-size`` for a size below 1, ``bad-option`` for an unknown activation.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        mesh: Mesh,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        refuse_empty(hidden=hidden, ffn=ffn)
        self.activation = choose("activation", str(activation), ACTIVATIONS)
        self.hidden, self.ffn, self.gated = hidden, ffn, gated
        seeds: tuple[int | None, int | None] = (None, None)
        if device is None or torch.device(device).type != "meta":
            seed = shared_seed(mesh.tp) if seed is None else seed
            seeds = (seed, seed + 2)
        common: dict[str, Any] = {"bias": bias, "mesh": mesh, "device": device, "dtype": dtype}
        common |= {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        width, packed = (2 * ffn, (ffn, ffn)) if gated else (ffn, ())
        self.up = ColumnParallelLinear(hidden, width, packed=packed, seed=seeds[0], **common)
        self.down = RowParallelLinear(ffn, hidden, seed=seeds[1], **common)
        self._act = ACTIVATIONS[self.activation]

    @classmethod
    def from_linears(cls, up: nn.Linear, down: nn.Linear, mesh: Mesh, gate: nn.Linear | None = None, **options: Any) -> Self:
        """This rank's shards of an unsplit MLP. ``options``: the constructor's ``activation``, ``sequence_parallel``, ...

        Raises UsageError (``bad-size``) when the layers do not fit together.
        """
        _check_fit(up, down, gate)
        mlp = cls(
            up.in_features,
            up.out_features,
            mesh=mesh,
            gated=gate is not None,
            bias=up.bias is not None,
            device="meta",
            dtype=up.weight.dtype,
            **options,
        )
        layout = {"sequence_parallel": mlp.up.sequence_parallel, "sequence_dim": mlp.up.sequence_dim}
        mlp.up = ColumnParallelLinear.from_linear(
            up if gate is None else pack([gate, up]), mesh, packed=(mlp.ffn, mlp.ffn) if gate is not None else (), **layout
        )
        mlp.down = RowParallelLinear.from_linear(down, mesh, **layout)
        return mlp

    def to_linears(self) -> dict[str, nn.Linear]:
        """The unsplit layers on every rank, ``up``, ``down`` and, when gated, ``gate``. A collective call."""
        up, down = self.up.to_linear(), self.down.to_linear()
        if not self.gated:
            return {"up": up, "down": down}
        gate, up = unpack(up, [self.ffn, self.ffn])
        return {"gate": gate, "up": up, "down": down}

    def forward(self, x: Tensor, total_tokens: int | None = None) -> Tensor:
        """``x [T, H] -> y [T, H]``; ``total_tokens`` as in ColumnParallelLinear."""
        layers = parts(self)
        y: Tensor = layers["down"](self.activate(layers["up"](x, total_tokens)))
        return y

    def activate(self, y: Tensor) -> Tensor:
        """What lies between the two multiplies: ``[T, F/tp]``, gated ``[T, 2F/tp]``, ``-> [T, F/tp]``."""
        if not self.gated:
            return self._act(y)
        gate, up = y.chunk(2, -1)
        return self._act(gate) * up


def _check_fit(up: nn.Linear, down: nn.Linear, gate: nn.Linear | None) -> None:
    def shape(linear: nn.Linear) -> str:
        return f"{linear.in_features} -> {linear.out_features}{'' if linear.bias is None else ' with bias'}"

    fits = (down.in_features, down.out_features) == (up.out_features, up.in_features)
    biases = {linear.bias is None for linear in (up, down, gate) if linear is not None}
    if gate is not None:
        fits = fits and (gate.in_features, gate.out_features) == (up.in_features, up.out_features)
    if not fits or len(biases) > 1:
        parts = f"up {shape(up)}, down {shape(down)}" + ("" if gate is None else f", gate {shape(gate)}")
        raise UsageError(
            f"these layers do not make an MLP: {parts}",
            code="bad-size",
            fix="up (and gate) must go H -> F and down F -> H, all with a bias or all without",
        )
