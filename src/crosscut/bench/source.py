"""A real weight matrix, or a real MLP, of a Hugging Face checkpoint as the layer to split, with real text as its input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from crosscut.bench.split import Problem
from crosscut.collectives import broadcast
from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError
from crosscut.models.checkpoint import Checkpoint, parse_source
from crosscut.models.inputs import embed, hidden_states, sample_text, token_ids

_PAIRS = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"up": "fc1", "down": "fc2"},
    {"up": "dense_h_to_4h", "down": "dense_4h_to_h"},
)
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def real_problems(
    source: str,
    kind: str,
    inputs: str,
    text: str | None,
    tokens: tuple[int, ...],
    dtype: torch.dtype,
    group: Group,
) -> Iterator[Callable[[], Problem]]:
    """One problem for each count in ``tokens``: the first so many of one text.

    ``source``: ``DIR:PARAM``, PARAM a weight (``model.layers.3.mlp.up_proj.weight``) or the prefix of an MLP
    (``model.layers.3.mlp``), which makes the column-row pair. ``inputs``: ``embedding`` (the text's tokens through the
    embedding) or ``hidden`` (what the module really receives in the model). ``text``: a file, None for the sample.
    Raises UsageError: ``file-missing``, ``file-unreadable``, ``parameter-missing``, ``bad-size``.
    """
    directory, name = parse_source(source)
    checkpoint = Checkpoint.open(directory)
    layers = _layers(checkpoint, name, dtype, group.device)
    module = name.removesuffix(".weight")
    width = next(iter(layers.values())).in_features
    activation = _activation(directory) if "down" in layers else "gelu"
    shown = "pair" if "down" in layers else kind
    x = torch.empty(max(tokens), width, dtype=dtype, device=group.device)
    if group.rank == 0:  # one rank loads the model, once; all get the same activations
        x.copy_(_real_input(checkpoint, directory, module, inputs, text, max(tokens), width))
    x = broadcast(x, group, out=x)
    for count in tokens:
        yield lambda count=count: Problem(shown, x[:count], layers, activation)  # type: ignore[misc]


def check_source(source: str) -> None:
    """Raise what :func:`real_problems` would for a missing directory or parameter, reading no weights."""
    directory, name = parse_source(source)
    checkpoint = Checkpoint.open(directory)
    if _pair(checkpoint, name) is None:
        checkpoint.shape(name)


def _pair(checkpoint: Checkpoint, prefix: str) -> dict[str, str] | None:
    names = set(checkpoint.names())
    for pair in _PAIRS:
        full = {role: f"{prefix}.{part}" for role, part in pair.items()}
        if all(f"{path}.weight" in names for path in full.values()):
            return full
    return None


def _layers(checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Linear]:
    names = set(checkpoint.names())

    def linear(path: str) -> nn.Linear:
        weight = checkpoint.read(f"{path}.weight") if f"{path}.weight" in names else checkpoint.read(path)
        if weight.dim() != 2:
            raise UsageError(
                f"{path} has the shape {list(weight.shape)}, and a linear layer's weight has two dims",
                code="bad-size",
                fix="name a weight matrix, such as model.layers.0.mlp.up_proj.weight, or the prefix of an MLP",
            )
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=f"{path}.bias" in names, device="meta")
        layer.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
        if layer.bias is not None:
            layer.bias = nn.Parameter(checkpoint.read(f"{path}.bias").to(device, dtype), requires_grad=False)
        return layer

    pair = _pair(checkpoint, name)
    if pair is not None:
        return {role: linear(path) for role, path in pair.items()}
    return {"linear": linear(name.removesuffix(".weight"))}


def _real_input(
    checkpoint: Checkpoint, directory: Path, module: str, inputs: str, text: str | None, count: int, width: int
) -> Tensor:
    ids = token_ids(directory, _text(text), count)
    if inputs == "hidden":
        return hidden_states(directory, module, ids)
    x = embed(checkpoint, ids)
    if x.shape[1] != width:
        raise UsageError(
            f"{module} takes {width} features and the embedding gives {x.shape[1]}",
            code="bad-size",
            fix="use --inputs hidden, which feeds what the module really receives in the model",
        )
    return x


def _text(path: str | None) -> str:
    if path is None:
        return sample_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UsageError(f"there is no text file {path!r}", code="file-missing", fix="check the path of --text") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path!r} cannot be read as UTF-8 text: {error}", code="file-unreadable", fix="check it") from None


def _activation(directory: Path) -> str:
    try:
        config = json.loads((directory / "config.json").read_text())
        name = config.get("hidden_act") or config.get("activation_function")
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{str(directory / 'config.json')!r} cannot be read: {error}", code="file-unreadable", fix="give a whole checkpoint"
        ) from None
    if name not in _ACTIVATIONS:
        raise UsageError(
            f"the activation {name!r} of this checkpoint is not known",
            code="bad-option",
            fix=f"measure one of its weights instead of the whole MLP; known are {', '.join(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[name]
