"""Real text as activations: what a layer of a trained model is given when the model reads English.

Random inputs hide what real ones show: a few channels a hundred times larger than the others, which decide the rounding
error of a split. Text -> token ids -> embeddings (nothing but one tensor is read) or the input of any submodule (the
model runs up to it and stops there).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from crosscut.errors import UsageError, nearest
from crosscut.models import import_extra
from crosscut.models.checkpoint import Checkpoint

EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")


class _Reached(Exception):
    """The submodule was reached: carries its input out of the forward pass and ends it there."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def sample_text() -> str:
    """The English text that comes with crosscut (public domain; about 7 KB), without the line that names its source."""
    text = (files("crosscut") / "data" / "sample.txt").read_text(encoding="utf-8")
    return text.partition("\n\n")[2]


def token_ids(directory: Path, text: str, count: int) -> torch.Tensor:
    """The first ``count`` token ids of ``text``, repeated when it is too short: [T] int64, T = ``count``.

    Uses tokenizer.json of the Hugging Face ``directory`` and adds no special tokens.
    Raises UsageError ``file-missing``, ``file-unreadable``, ``bad-size`` (``count`` below 1), ``bad-option`` (a text
    without a token) and ``extra-missing``.
    """
    if count < 1:
        raise UsageError(f"{count} tokens were asked for", code="bad-size", fix="ask for at least 1")
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}", code="file-missing", fix="save the tokenizer with the model")
    library = import_extra("tokenizers")
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more particular
        raise UsageError(
            f"{str(path)!r} is not a tokenizer: {error}", code="file-unreadable", fix="download the file again"
        ) from None
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.int64)
    if not len(ids):
        raise UsageError(f"the text {text[:20]!r} has no token", code="bad-option", fix="give a text that is not empty")
    return ids.repeat(-(-count // len(ids)))[:count]


def embed(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """The embeddings of ``ids`` [T], as stored: [T, H]. Position embeddings and scale factors are not applied.

    The embedding is one of :data:`EMBEDDINGS`, or else the only 2-D parameter with 'embed' or 'wte', and
    without 'pos', in its name.
    Raises UsageError ``parameter-missing`` when there is no such parameter or more than one, and ``bad-shape`` when an
    id is outside of it.
    """
    return checkpoint.gather(_embedding_name(checkpoint), ids)


def _embedding_name(checkpoint: Checkpoint) -> str:
    for name in EMBEDDINGS:
        if name in checkpoint.files:
            return name
    likely = [name for name in checkpoint.names() if ("embed" in name or "wte" in name) and "pos" not in name]
    found = [name for name in likely if len(checkpoint.shape(name)) == 2]
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"{str(checkpoint.directory)!r} has {len(found)} parameters that could be the embedding: {found[:4]}",
        code="parameter-missing",
        fix=f"use a checkpoint that calls it one of: {', '.join(EMBEDDINGS)}",
    )


def hidden_states(directory: Path, module_name: str, ids: torch.Tensor) -> torch.Tensor:
    """What the submodule ``module_name`` is given when the model of ``directory`` reads ``ids`` [T]: [T, H], float32.

    ``module_name`` may be the name of one of its parameters (``x.y.weight`` stands for ``x.y``). The whole model is
    loaded with transformers, in float32 on the CPU. More ids than the model has positions are read in windows. A module
    that sees a part of the tokens (an expert) yields fewer rows than T.
    Raises UsageError ``file-missing``, ``file-unreadable``, ``parameter-missing``, ``bad-option`` (the module is never
    called, or is given no activations), ``bad-shape`` (an id outside the vocabulary) and ``extra-missing``.
    """
    model = _load(directory)
    vocab = model.get_input_embeddings().num_embeddings
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UsageError(
            f"the model has the token ids 0 to {vocab - 1}, and {len(ids)} ids were given, not all of them among these",
            code="bad-shape",
            fix="use the tokenizer of this model, and at least one token",
        )
    name, module = _find_module(model, module_name)
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None) or len(ids)
    module.register_forward_pre_hook(_stop, with_kwargs=True)
    return torch.cat([_input_of(name, model, part) for part in ids.split(window)])


def _load(directory: Path) -> Any:
    """The causal LM of ``directory`` in float32, in eval mode, every weight of it read and none made up."""
    if not (directory / "config.json").is_file():
        raise UsageError(
            f"there is no file {str(directory / 'config.json')!r}",
            code="file-missing",
            fix="give a local Hugging Face directory",
        )
    Checkpoint.open(directory)  # its errors are clearer than those of transformers
    library = import_extra("transformers")
    library.utils.logging.disable_progress_bar()  # it would draw over the caller's own progress
    try:
        model, info = library.AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # a damaged config can raise anything
        reason = f"transformers cannot load it: {type(error).__name__}: {error}"
    else:
        missing = sorted(info["missing_keys"])
        if not missing:
            return model.eval()
        reason = f"it lacks the weights of {missing[0]!r} and {len(missing) - 1} more"
    raise UsageError(
        f"{str(directory)!r} is not a complete causal language model: {reason}",
        code="file-unreadable",
        fix="check the directory, or download the model again",
    )


def _find_module(model: torch.nn.Module, name: str) -> tuple[str, torch.nn.Module]:
    """The submodule ``name``, also when the checkpoint's names lack the prefix of the model's ('h.0' of GPT-2)."""
    wanted = name.removesuffix(".weight").removesuffix(".bias")
    modules = {path: module for path, module in model.named_modules() if path}
    found = [wanted] if wanted in modules else [path for path in modules if path.endswith(f".{wanted}")]
    if len(found) != 1:
        known = f"; it is one of {found[:4]}" if found else nearest(wanted, modules)
        raise UsageError(
            f"the model has {len(found)} modules {wanted!r}{known}",
            code="parameter-missing",
            fix=f"give the full name of a module, for example {list(modules)[-1]}",
        )
    return found[0], modules[found[0]]


def _stop(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs.get("hidden_states"))


def _input_of(name: str, model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The input of the hooked module for one window of ``ids`` [T]: [T, H]."""
    try:
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
    except _Reached as reached:
        value = reached.value
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.reshape(-1, value.shape[-1])
        reason = "is not given activations"
    else:
        reason = "is never called while the model reads text"
    raise UsageError(
        f"the module {name!r} {reason}",
        code="bad-option",
        fix="name a linear layer, for example one that ends in mlp.up_proj",
    )
