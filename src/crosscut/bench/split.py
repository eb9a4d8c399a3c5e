"""One layer and its splits: the same input and weights for one device, by hand, with DTensor, and with crosscut.

A :class:`Problem` is one linear layer, or the column-row pair of an MLP, at one size. Its ``ways`` give for each
implementation the calls to time (one per weight copy), all of which must give the same result.
Shapes: T tokens, I input, O output features, H hidden, F ffn; ``/tp`` what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.bench import hand
from crosscut.bench.calls import Way, Ways, Weights, Work, alone, by_hand, by_module, own, way_of, whole
from crosscut.bench.timing import copies
from crosscut.distributed.mesh import Group, Mesh
from crosscut.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from crosscut.layers.mlp import ACTIVATIONS
from crosscut.layers.shards import take
from crosscut.sharding import Column, Cut, Replicated, Row

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass
class Problem:
    """An unsplit layer and its input. ``kind``: column (``x [T, I]``), row (the same, x cut) or pair (``x [T, H]``).

    ``layers``: ``linear`` alone, or ``up``, ``down`` and perhaps ``gate``. ``activation`` names that of a pair.
    """

    kind: str
    x: Tensor
    layers: dict[str, nn.Linear]
    activation: str = "gelu_tanh"

    @property
    def subject(self) -> str:
        """What the record calls it."""
        return "mlp" if self.kind == "pair" else "linear"

    @property
    def shape(self) -> dict[str, int]:
        """The record's shape of it."""
        first = self.layers["up" if self.kind == "pair" else "linear"]
        names = ("hidden", "ffn") if self.kind == "pair" else ("in", "out")
        return {"tokens": self.x.shape[0], names[0]: first.in_features, names[1]: first.out_features}

    def exchange(self) -> tuple[str, int, int]:
        """The collective that the split needs, with the rows and the width of the whole tensor."""
        width = self.layers["down" if self.kind == "pair" else "linear"].out_features
        return "all_gather" if self.kind == "column" else "all_reduce", self.x.shape[0], width

    def work(self, backward: bool) -> Work:
        """The layer as one device computes it; ``backward``: with a random gradient of its output, equal on all ranks."""
        weights = {f"{part}.{name}": t.detach() for part, layer in self.layers.items() for name, t in layer.named_parameters()}
        _, rows, width = self.exchange()
        dy = _randn((rows, width), self.x, torch.Generator(self.x.device).manual_seed(1)) if backward else None
        return Work(partial(layer, activation=self.activation), self.x, weights, dy)

    def ways(self, mesh: Mesh, against: Sequence[str], backward: bool = False) -> Ways:
        """Name -> a function that builds the calls. ``against``: peers beside the textbook: nccl, gloo, dtensor.

        A way that cannot do this size is absent: a peer where the cut size does not divide, sequence parallelism with fewer
        tokens than ranks.
        """
        work, group = self.work(backward), mesh.tp
        ways: Ways = {"single": lambda: by_hand(work, alone(mesh.device).tp, work.compute)}
        if self.x.is_cuda:
            ways["single_best"] = partial(self._crosscut, work, alone(mesh.device))
        if group.size == 1:
            return ways
        cut = {"column": "out", "row": "in", "pair": "ffn"}[self.kind]
        if self.shape[cut] % group.size == 0:
            if self.kind != "row" and self.shape.get("hidden", 0) % group.size == 0:
                ways["textbook"] = lambda: by_hand(work, group, self._textbook(group), self._cuts(textbook=True))
            for name in against:
                ways[name] = partial(_dtensor, self, work, mesh) if name == "dtensor" else partial(self._plain, work, group)
        ways["crosscut"] = partial(self._crosscut, work, mesh)
        if self.kind == "pair" and self.x.shape[0] >= group.size:
            ways["crosscut_sp"] = partial(self._crosscut, work, mesh, sequence_parallel=True)
        ways["no_comm"] = partial(self._crosscut, work, mesh, silent=True)
        return ways

    def _cuts(self, textbook: bool = False) -> dict[str, Cut]:
        """How each weight is cut; in the textbook's pair both layers by their output features."""
        by_row = set() if textbook else {"down"} if self.kind == "pair" else {"linear"} if self.kind == "row" else set()
        cuts: dict[str, Cut] = {}
        for part in self.layers:
            cuts[f"{part}.weight"] = Row() if part in by_row else Column()
            cuts[f"{part}.bias"] = Replicated() if part in by_row else Column()
        return cuts

    def _textbook(self, group: Group) -> Callable[[Tensor, Weights], Tensor]:
        """Each layer split by its output features, which are gathered at once."""

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return hand.textbook_gathered(F.linear(hand.copied(x, group), weight, bias), group)

        return partial(layer, activation=self.activation, linear=linear)

    def _plain(self, work: Work, group: Group) -> Way:
        """What a good engineer writes by hand: shards, a multiply, torch.distributed's own calls."""
        if self.kind == "row":
            return by_hand(work, group, lambda x, w: hand.summed(work.compute(x, w), group), self._cuts(), own(group, -1))
        join = hand.gathered if self.kind == "column" else hand.summed
        return by_hand(work, group, lambda x, w: join(work.compute(hand.copied(x, group), w), group), self._cuts())

    def build(self, mesh: Mesh, sequence_parallel: bool = False) -> nn.Module:
        """crosscut's layer for it, on the meta device; ``sequence_parallel`` is for the pair."""
        first = self.layers["up" if self.kind == "pair" else "linear"]
        sizes, bias = (first.in_features, first.out_features), first.bias is not None
        like: dict[str, Any] = {"mesh": mesh, "device": "meta", "dtype": self.x.dtype}
        if self.kind == "row":
            return RowParallelLinear(*sizes, bias, **like)
        if self.kind == "column":
            return ColumnParallelLinear(*sizes, bias, gather_output=True, **like)
        how: dict[str, Any] = {"activation": self.activation, "gated": "gate" in self.layers, "bias": bias}
        return ParallelMLP(first.in_features, first.out_features, sequence_parallel=sequence_parallel, **how, **like)

    def _crosscut(self, work: Work, mesh: Mesh, sequence_parallel: bool = False, silent: bool = False) -> Way:
        """crosscut's layer; ``sequence_parallel``: on this rank's tokens; ``silent``: without any exchange, the floor."""
        group, build = mesh.tp, partial(self.build, mesh, sequence_parallel)
        if self.kind == "row":
            return by_module(work, mesh, build, whole, own(group, -1), packed=_bare, silent=silent)
        if self.kind == "column":
            return by_module(work, mesh, build, own(group, -1) if silent else whole, whole, packed=_bare, silent=silent)
        place, total = (own(group, 0), self.x.shape[0]) if sequence_parallel else (whole, None)
        packed = _packed_pair if "gate" in self.layers else dict
        return by_module(work, mesh, build, place, call=lambda m, x: m(x, total), packed=packed, silent=silent)


def random_problem(
    kind: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    gated: bool = False,
    activation: str = "gelu_tanh",
) -> Problem:
    """A layer of ``sizes`` (T, I, O) or (T, H, F) with random weights and input, equal on all ranks."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens, first, second = sizes

    def linear(inner: int, outer: int) -> nn.Linear:
        layer = nn.utils.skip_init(nn.Linear, inner, outer, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            layer.weight.normal_(std=inner**-0.5, generator=generator)
        return layer.requires_grad_(False)

    x = torch.randn(tokens, first, dtype=dtype, device=device, generator=generator)
    if kind == "pair":
        gate = {"gate": linear(first, second)} if gated else {}
        return Problem(kind, x, {**gate, "up": linear(first, second), "down": linear(second, first)}, activation)
    return Problem(kind, x, {"linear": linear(first, second)})


def layer(x: Tensor, weights: Mapping[str, Tensor], *, activation: str, linear: Linear = F.linear) -> Tensor:
    """The layer itself, from weights and biases ``[out, in]``, ``[out]`` by name; a shard of them gives this rank's part."""

    def apply(name: str, x: Tensor) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    return _assembled(x, apply, {name.partition(".")[0] for name in weights}, activation)


def _assembled(x: Tensor, apply: Callable[[str, Tensor], Tensor], parts: set[str], activation: str) -> Tensor:
    if "linear" in parts:
        return apply("linear", x)
    act = ACTIVATIONS[activation]
    inner = act(apply("gate", x)) * apply("up", x) if "gate" in parts else act(apply("up", x))
    return apply("down", inner)


def _packed_pair(weights: Weights) -> Weights:
    """Under ParallelMLP's names: gate and up as one."""
    ups = [name for name in weights if name.startswith("up.")]
    packed = {name: torch.cat([weights[name.replace("up", "gate")], weights[name]]) for name in ups}
    return packed | {name: t for name, t in weights.items() if name.startswith("down.")}


def _bare(weights: Weights) -> Weights:
    """Under the names of a layer alone: ``weight``, ``bias``."""
    return {name.removeprefix("linear."): t for name, t in weights.items()}


def _randn(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def _dtensor(problem: Problem, work: Work, mesh: Mesh) -> Way:
    """PyTorch's own tensor parallelism, as its tutorial uses it."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert mesh.device_mesh is not None
    backward, group, cuts = work.dy is not None, mesh.tp, problem._cuts()
    styles: dict[str, Any]
    if problem.kind == "pair":
        styles = {name: RowwiseParallel() if name == "down" else ColwiseParallel() for name in problem.layers}
    else:
        styles = {"linear": ColwiseParallel(output_layouts=Replicate()) if problem.kind == "column" else RowwiseParallel()}

    def build() -> nn.ModuleDict:
        module = nn.ModuleDict(
            {name: nn.Linear(p.in_features, p.out_features, bias=p.bias is not None, device="meta", dtype=p.weight.dtype)
             for name, p in problem.layers.items()}
        )  # fmt: skip
        module.load_state_dict({name: t.clone() for name, t in work.weights.items()}, assign=True)
        parallelize_module(module, mesh.device_mesh["tp"], styles)  # type: ignore[index]
        return module.requires_grad_(backward)

    def call(x: Tensor, m: nn.ModuleDict) -> Tensor:
        y = _assembled(x, lambda name, x: m[name](x), set(m), problem.activation)
        return y.to_local() if isinstance(y, DTensor) else y

    nbytes = sum(t.nbytes for t in work.weights.values()) // group.size
    modules = [build() for _ in range(copies(nbytes, problem.x.device))]
    grads = [take(t, cuts[name], group.size, group.rank) for name, t in work.reference.grads.items()] if backward else []
    fns = [(partial(call, m=m), list(m.parameters())) for m in modules]
    return way_of(work, fns, grads, whole, own(group, -1) if problem.kind == "row" else whole)
