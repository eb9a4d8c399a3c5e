"""One layer and its splits: the same input and weights for one device, the textbook, plain NCCL or gloo, and crosscut.

A :class:`Problem` is one layer at one size. ``implementations`` gives, for each way to compute it, the calls to time
(one per weight copy), all of which must give the same result: the whole output on every rank.
Shapes: T tokens, I input, O output features, H hidden, F ffn; ``/tp`` what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.bench.timing import Call, copies
from crosscut.collectives import all_gather, all_reduce
from crosscut.collectives.functional import all_gather_single
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from crosscut.layers.mlp import ACTIVATIONS
from crosscut.sharding import shard_range


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

    @property
    def dtype(self) -> str:
        """The dtype's name, ``bfloat16``."""
        return str(self.x.dtype).removeprefix("torch.")

    def reference(self) -> Tensor:
        """The output in float64, from the same values."""
        layers = {name: (p.weight.double(), None if p.bias is None else p.bias.double()) for name, p in self.layers.items()}
        return _forward(self.x.double(), layers, self.activation)

    def nbytes(self) -> int:
        """Bytes of the unsplit weights."""
        return sum(layer.weight.nbytes for layer in self.layers.values())


def random_problem(kind: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
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
        return Problem(kind, x, {"up": linear(first, second), "down": linear(second, first)})
    return Problem(kind, x, {"linear": linear(first, second)})


def implementations(problem: Problem, mesh: Mesh, against: tuple[str, ...]) -> dict[str, Callable[[], list[Call]]]:
    """Name -> a function that builds the calls. ``against``: peers beside the textbook: nccl, gloo, dtensor.

    ``no_comm`` is the local multiply alone, the floor; its output is not the layer's. A way that cannot do this size
    (a peer, where the size does not divide) is absent.
    """
    builders: dict[str, Callable[[], list[Call]]] = {"single": lambda: _single(problem)}
    if mesh.tp.size == 1:
        return builders
    if _divides(problem, mesh.tp.size):
        if problem.kind == "column":
            builders["textbook"] = lambda: _plain(problem, mesh, _textbook_gather)
        for name in against:
            if name in ("nccl", "gloo"):
                exchange = _gather_into if problem.kind == "column" else _reduce
                builders[name] = lambda exchange=exchange: _plain(problem, mesh, exchange)  # type: ignore[misc]
            else:
                assert name == "dtensor"
                builders[name] = lambda: _dtensor(problem, mesh)
    builders["crosscut"] = lambda: _crosscut(problem, mesh)
    builders["no_comm"] = lambda: _plain(problem, mesh, lambda y, group: y)
    return builders


def exchange(problem: Problem, mesh: Mesh) -> tuple[str, int, Call]:
    """The collective that the split needs, alone: its name, its bytes (whole tensor) and the call."""
    tokens, width = problem.x.shape[0], problem.layers["down" if problem.kind == "pair" else "linear"].out_features
    nbytes = tokens * width * problem.x.element_size()
    if problem.kind == "column":
        mine = shard_range(width, mesh.tp.size, mesh.tp.rank)
        sizes = [len(range(width)[shard_range(width, mesh.tp.size, rank)]) for rank in range(mesh.tp.size)]
        part = torch.randn(tokens, mine.stop - mine.start, dtype=torch.float32, device=problem.x.device).to(problem.x.dtype)
        return "all_gather", nbytes, lambda: all_gather(part, mesh.tp, 1, sizes)
    partial = torch.zeros(tokens, width, dtype=problem.x.dtype, device=problem.x.device)
    return "all_reduce", nbytes, lambda: all_reduce(partial, mesh.tp, out=partial)


def _forward(x: Tensor, layers: Mapping[str, tuple[Tensor, Tensor | None]], activation: str) -> Tensor:
    """The layer itself, from its weights and biases ``w [out, in]``; a shard of them gives this rank's part."""
    if "linear" in layers:
        return F.linear(x, *layers["linear"])
    act, up = ACTIVATIONS[activation], F.linear(x, *layers["up"])
    inner = act(F.linear(x, *layers["gate"])) * up if "gate" in layers else act(up)
    return F.linear(inner, *layers["down"])


def _single(problem: Problem) -> list[Call]:
    sets = [
        {name: (layer.weight.clone(), layer.bias) for name, layer in problem.layers.items()}
        for _ in range(copies(problem.nbytes(), problem.x.device))
    ]
    return [lambda w=w: _forward(problem.x, w, problem.activation) for w in sets]  # type: ignore[misc]


def _plain(problem: Problem, mesh: Mesh, exchange: Callable[[Tensor, Group], Tensor]) -> list[Call]:
    """What a good engineer writes by hand: shards, a multiply, torch.distributed's own calls."""
    group = mesh.tp
    column = ColumnParallelLinear.from_linear
    sets = []
    for _ in range(copies(problem.nbytes() // group.size, problem.x.device)):
        shards = {}
        for name, layer in problem.layers.items():
            row = name == "down" or problem.kind == "row"
            shard = RowParallelLinear.from_linear(layer, mesh) if row else column(layer, mesh)
            bias = shard.bias if not row or group.rank == 0 else None  # a row's bias is added once
            shards[name] = (shard.weight.detach(), None if bias is None else bias.detach())
        sets.append(shards)
    x = _own_columns(problem.x, group) if problem.kind == "row" else problem.x
    return [lambda w=w: exchange(_forward(x, w, problem.activation), group) for w in sets]  # type: ignore[misc]


def _textbook_gather(y: Tensor, group: Group) -> Tensor:
    parts = [torch.empty_like(y) for _ in range(group.size)]
    dist.all_gather(parts, y, group=group.process_group)
    return torch.cat(parts, dim=1)


def _gather_into(y: Tensor, group: Group) -> Tensor:
    whole = torch.empty(group.size * y.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    all_gather_single(whole, y, group=group.process_group)
    return whole.view(group.size, *y.shape).transpose(0, 1).reshape(y.shape[0], -1)


def _reduce(y: Tensor, group: Group) -> Tensor:
    dist.all_reduce(y, group=group.process_group)
    return y


def _crosscut(problem: Problem, mesh: Mesh) -> list[Call]:
    layers, count = problem.layers, copies(problem.nbytes() // mesh.tp.size, problem.x.device)
    x, built = problem.x, list[nn.Module]()
    for _ in range(count):
        if problem.kind == "column":
            built.append(ColumnParallelLinear.from_linear(layers["linear"], mesh, gather_output=True))
        elif problem.kind == "row":
            built.append(RowParallelLinear.from_linear(layers["linear"], mesh))
        else:
            built.append(
                ParallelMLP.from_linears(
                    layers["up"], layers["down"], mesh, gate=layers.get("gate"), activation=problem.activation
                )
            )
    if problem.kind == "row":
        x = _own_columns(x, mesh.tp)
    return [lambda layer=layer: layer(x) for layer in built]  # type: ignore[misc]


def _dtensor(problem: Problem, mesh: Mesh) -> list[Call]:
    """PyTorch's own tensor parallelism, as its tutorial uses it."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if "gate" in problem.layers:
        raise UsageError("dtensor is compared on plain layers", code="bad-option", fix="leave dtensor out of --against")
    assert mesh.device_mesh is not None
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if problem.kind != "pair":
        styles = {"linear": ColwiseParallel(output_layouts=Replicate()) if problem.kind == "column" else RowwiseParallel()}
    x = _own_columns(problem.x, mesh.tp) if problem.kind == "row" else problem.x
    calls: list[Call] = []
    for _ in range(copies(problem.nbytes() // mesh.tp.size, problem.x.device)):
        module = nn.ModuleDict(
            {name: nn.Linear(p.in_features, p.out_features, bias=p.bias is not None, device="meta", dtype=p.weight.dtype)
             for name, p in problem.layers.items()}
        )  # fmt: skip
        module.load_state_dict({k: v.clone() for k, v in nn.ModuleDict(problem.layers).state_dict().items()}, assign=True)
        parallelize_module(module.requires_grad_(False), mesh.device_mesh["tp"], styles)

        def call(m: nn.ModuleDict = module) -> Tensor:
            if problem.kind == "pair":
                y = m["down"](ACTIVATIONS[problem.activation](m["up"](x)))
            else:
                y = m["linear"](x)
            return y.to_local() if isinstance(y, DTensor) else y

        calls.append(call)
    return calls


def _own_columns(x: Tensor, group: Group) -> Tensor:
    return x[:, shard_range(x.shape[1], group.size, group.rank)].contiguous()


def _divides(problem: Problem, tp: int) -> bool:
    cut = {"column": "out", "row": "in", "pair": "ffn"}[problem.kind]
    return problem.shape[cut] % tp == 0
