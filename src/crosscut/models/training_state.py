"""What a checkpoint of training holds: a model's parameters and the state of its optimizer, each with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError, nearest
from crosscut.layers.placed import Placed, placed_parameters
from crosscut.sharding import Replicated


def state_tensors(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Placed]]:
    """('', parameter) for each parameter of ``model``, then (key, tensor) for each tensor of the optimizer's state.

    State that has its parameter's shape (AdamW's moments) is placed like it; other tensors (the step) are whole on each rank.
    Raises UsageError (``bad-option``) when the optimizer steps other tensors than the model's parameters.
    """
    parameters = list(placed_parameters(model, mesh))
    for placed in parameters:
        yield "", placed
    if optimizer is None:
        return
    _refuse_strangers(parameters, optimizer)
    for placed in parameters:
        for key, value in sorted(optimizer.state.get(placed.local, {}).items()):
            if not isinstance(value, Tensor):
                continue
            if value.shape == placed.local.shape:
                yield key, placed.like(value)
            else:
                yield key, Placed(placed.name, value, Replicated(), tuple(value.shape))


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state: a step without change, on gradients of zero."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p, p.grad, p.detach().clone()) for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, grad, value in kept:
            parameter.copy_(value)
            parameter.grad = grad


def refuse_damage(source: Path, wrong: Sequence[str], total: int) -> None:
    """Raise UsageError (``file-unreadable``) when ``total`` pieces of a checkpoint, on this rank ``wrong``, are damaged."""
    if total:
        which = f"{wrong[0]!r}{f' and {total - 1} more' if total > 1 else ''}" if wrong else f"{total}, read by another rank,"
        raise UsageError(
            f"{str(source)!r} is damaged: the bytes of {which} are not those that were saved",
            code="file-unreadable",
            fix="use another checkpoint; the disk or the copy is bad",
        )


def refuse_mismatch(source: Path, stored: Mapping[str, Sequence[int]], wanted: Mapping[str, Placed]) -> None:
    """Raise UsageError unless the shapes ``stored`` are those ``wanted``: ``parameter-missing`` or ``bad-size``."""
    for name in wanted:
        if name not in stored:
            raise UsageError(
                f"{str(source)!r} has no {name!r}{nearest(name, stored)}",
                code="parameter-missing",
                fix="load it into the model that it was saved from; without optimizer if it was saved without one",
            )
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise UsageError(
            f"{str(source)!r} has {extra[0]!r}{f' and {len(extra) - 1} more' if len(extra) > 1 else ''}, the model has not",
            code="parameter-missing",
            fix="load it into the model that it was saved from",
        )
    for name, part in wanted.items():
        if tuple(stored[name]) != part.shape:
            raise UsageError(
                f"{name!r} is {list(stored[name])} in {str(source)!r} and {list(part.shape)} in the model",
                code="bad-size",
                fix="build the model with the sizes that it was saved with",
            )


def _refuse_strangers(parameters: list[Placed], optimizer: torch.optim.Optimizer) -> None:
    known = {id(placed.local) for placed in parameters}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in known for p in stepped)
    if strangers:
        raise UsageError(
            f"{strangers} of the {len(stepped)} tensors that the optimizer steps are not parameters of the model",
            code="bad-option",
            fix="make it from this model's parameters, after fully_shard; after a forward alone call model.reshard() first",
        )
