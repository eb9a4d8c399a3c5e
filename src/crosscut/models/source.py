"""A checkpoint found and described before anything of it is read: a directory, a GGUF file, or a name on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.model_config import CONFIG, ModelConfig
from crosscut.models import import_extra
from crosscut.models.agree import together
from crosscut.models.gguf import open_gguf
from crosscut.models.stream import NAMES
from crosscut.sharding import Family
from crosscut.sharding.describe import Model, describe, describe_tensors
from crosscut.sharding.headers import INDEX, SINGLE, Stored

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
HUB_FILES = ("*.json", SINGLE, "model-*.safetensors", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja")


@dataclass(frozen=True)
class Source:
    """A checkpoint whose config and headers are right."""

    where: Path
    config: Any
    """transformers' config of the language model."""
    model: Model
    read: Callable[[str], Tensor] | None = None
    """A tensor by its stored name, where it cannot be read from a file by its place."""
    is_part: bool = False
    """The checkpoint is of a larger model (with images), whose text part this is."""

    @property
    def directory(self) -> Path | None:
        """None for a GGUF file."""
        return self.where if self.where.is_dir() else None


def locate(name: str | Path, mesh: Mesh, revision: str | None = None) -> Path:
    """The local path of ``name``: a path that is there, or the hub's repository of that name, downloaded. A collective call.

    Of a repository only config, tokenizer and safetensors files are fetched, each once a host: the hub's library locks them.
    Raises UsageError (``file-missing``) when there is neither.
    """
    path = Path(name)
    return together(mesh, lambda: path if path.exists() else _download(str(name), revision))


def _download(name: str, revision: str | None) -> Path:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise _nowhere(name, "it is no name of the hub either")
    try:
        hub = import_extra("huggingface_hub")
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]))
    except UsageError:
        raise
    except Exception as error:  # the hub's library lets through errors of several others
        why = (str(error).splitlines() or [""])[0]
        raise _nowhere(name, f"the hub did not give it: {type(error).__name__}: {why}") from None


def _nowhere(name: str, why: str) -> UsageError:
    return UsageError(
        f"there is no directory {name!r}, and {why}",
        code="file-missing",
        fix="give the path of a Hugging Face directory; for a name of the hub be online, or have it in the hub's cache",
    )


def open_source(where: Path, family: Family | None, accept_guess: bool, allow_pickle: bool) -> Source:
    """Describe the checkpoint at ``where``. Raises UsageError for whatever is wrong with its config and headers."""
    if where.is_file():
        return _open_gguf(where, family)
    if not (where / INDEX).exists() and not any(where.glob("*.safetensors")) and _pickles(where):
        return _open_pickle(where, family, accept_guess, allow_pickle)
    model = describe(where, accept_guess=accept_guess, family=family)
    if model.from_config:
        raise UsageError(
            f"{str(where)!r} holds no weights (neither {SINGLE} nor {INDEX})",
            code="file-missing",
            fix="download the weights too, or give the path of a .gguf file",
        )
    whole = _config(where)
    text = whole.get_text_config()
    return Source(where, text, model, is_part=text is not whole)


def _config(where: Path) -> Any:
    """transformers' config of all that the directory holds."""
    try:
        config = import_extra("transformers").AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"transformers cannot use {CONFIG} of {str(where)!r}: {error}",
            code="unknown-model",
            fix="use a model that this version of transformers knows; code from the hub is not run",
        ) from None
    return config


def _open_gguf(path: Path, family: Family | None) -> Source:
    opened = open_gguf(path)
    stored = {name: Stored(name, "F32", shape, path, 0, 0) for name, shape in opened.shapes.items()}
    model = describe_tensors(ModelConfig.from_dict(opened.config), stored, str(path), family=family)
    return Source(path, import_extra("transformers").AutoConfig.for_model(**opened.config), model, opened.read)


def _pickles(where: Path) -> bool:
    return (where / PICKLE).exists() or (where / PICKLE_INDEX).exists()


def _open_pickle(where: Path, family: Family | None, accept_guess: bool, allow_pickle: bool) -> Source:
    if not allow_pickle:
        raise UsageError(
            f"{str(where)!r} holds its weights as pickles ({PICKLE}), not as safetensors",
            code="bad-option",
            fix="save them as safetensors, or pass allow_pickle=True",
        )
    tensors: dict[str, Tensor] = {}
    for path in _pickle_files(where):
        tensors |= _unpickle(path)
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in NAMES]
    if odd:
        raise UsageError(f"{odd[0]!r} is {tensors[odd[0]].dtype}", code="bad-dtype", fix="save it in bfloat16 or float32")
    stored = {name: Stored(name, NAMES[t.dtype], tuple(t.shape), where, 0, 0) for name, t in tensors.items()}
    config = ModelConfig.from_dir(where)
    model = describe_tensors(config, stored, str(where), accept_guess=accept_guess, family=family)
    return Source(where, _config(where).get_text_config(), model, tensors.__getitem__)


def _pickle_files(where: Path) -> list[Path]:
    if (where / PICKLE).exists():
        return [where / PICKLE]
    try:
        names = sorted(set(json.loads((where / PICKLE_INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        files = [where / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(where / PICKLE_INDEX, error) from None
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UsageError(
            f"{str(where)!r} lacks {', '.join(missing[:3])}, which its index names",
            code="file-missing",
            fix=f"download the missing files ({len(missing)})",
        )
    return files


def _unpickle(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a pickle, mapped and not read. Only tensors and containers are allowed in it (``weights_only``)."""
    try:
        found = torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
            raise ValueError("it is not a table of tensors")
    except Exception as error:  # pickle.UnpicklingError, RuntimeError, EOFError, ... : anything a damaged file leads to
        raise _damaged(path, error) from None
    return found


def _damaged(path: Path, error: Exception) -> UsageError:
    why = (str(error).splitlines() or [""])[0]
    return UsageError(
        f"{str(path)!r} cannot be read: {type(error).__name__}: {why}",
        code="file-unreadable",
        fix="download the file again, or save the model as safetensors",
    )
