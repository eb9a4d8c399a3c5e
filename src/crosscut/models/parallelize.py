"""A Hugging Face causal language model split over the tp group, in place, by its family's table; and put together again.

The model keeps its class's own code, its modules' names and its parameters' names and layouts. Each module that the table
gives a role becomes one of :mod:`crosscut.models.split_modules`; Hugging Face's attention runs on the rank's own heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crosscut.collectives import all_gather, broadcast
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import MismatchError, UsageError
from crosscut.layers.shards import gather as join
from crosscut.model_config import ModelConfig
from crosscut.models.adapters import SplitAdapters, core_of
from crosscut.models.split_modules import change, mixed, restore
from crosscut.models.splitter import Splitter
from crosscut.sharding import FAMILIES, Family
from crosscut.sharding.guess import guess
from crosscut.sharding.plan import require

M = TypeVar("M", bound=nn.Module)

_SAMPLE = 64  # elements of each parameter that are compared between ranks before the split


class SplitModel:
    """In front of a split model's own class: what must know that each rank holds a part."""

    mesh: Mesh
    unequal_draws: str

    def train(self, mode: bool = True) -> Any:
        """As torch's. Refuses where the ranks would draw unequal numbers of random values, and so drift apart."""
        if mode:
            _refuse_unequal_draws(self.unequal_draws)
        return super().train(mode)  # type: ignore[misc]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' ``generate``. Samples are drawn with the first rank's random state, so that all ranks agree.

        Raises UsageError (``bad-option``) for ``max_time``: a rank whose clock says stop would leave the others waiting.
        """
        if self.mesh.tp.size > 1 and _max_time(self, args, kwargs) is not None:
            raise UsageError(
                "generate with max_time: each rank would stop by its own clock, and the others would wait for it",
                code="bad-option",
                fix="give max_new_tokens instead",
            )
        _share_random_state(self.mesh.tp)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: it would write this rank's part under the name of the whole."""
        raise UsageError(
            "save_pretrained of a split model would write this rank's part as if it were the whole",
            code="bad-option",
            fix="crosscut.save_pretrained(model, directory, mesh), or crosscut.gather(model) first",
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Without arguments the embedding, as transformers; refuses to resize one that is cut."""
        if args or kwargs:
            raise UsageError(
                "the embeddings of a split model cannot be resized", code="bad-option", fix="resize before parallelize"
            )
        return self.get_input_embeddings()  # type: ignore[attr-defined]

    def _get_static_cache_init_shape(self) -> None:
        """None: a static cache takes its shape from the first keys, which are those of this rank's heads."""


def parallelize(model: M, mesh: Mesh, *, family: Family | None = None, accept_guess: bool = False) -> M:
    """Split the Hugging Face causal language ``model`` over ``mesh.tp``, in place; returns it. A collective call.

    Every rank gives the same model, loaded or on the meta device, and keeps its part, on ``mesh.device`` (meta stays meta).
    ``model(...)``, ``generate(...)`` and training then work as before, on every rank alike. A PEFT model with LoRA adapters
    is split with them. ``family``: a table of your own. ``accept_guess``: for a model_type without a table, use one that is
    guessed from names and shapes.

    Raises UsageError before anything is changed: ``unknown-model`` (no table, a config that the family cannot split, or a
    multimodal model), ``bad-option`` (split already, spread over devices, other adapters, a table that does not fit),
    ``bad-dtype`` (quantized), ``bad-size`` (more ranks than heads), ``parameter-missing`` (a parameter that no rule of the
    table matches).
    Raises MismatchError (``result-differs``) when the ranks gave different weights.
    """
    core: Any = core_of(model)
    _refuse(core)
    config = ModelConfig.from_dict(core.config.to_dict())
    if family is None:
        family = _family(core, config, accept_guess)
    require(config, mesh.tp.size, uneven=True)
    splitter = Splitter(core, family, config, mesh)
    unequal = splitter.unequal_draws()
    if core.training:
        _refuse_unequal_draws(unequal)
    _refuse_different_weights(core, mesh)
    splitter.split()
    change(core, mixed(SplitModel, type(core)), mesh=mesh, unequal_draws=unequal)
    if core is not model:
        change(model, mixed(SplitAdapters, type(model)), mesh=mesh)
    if not any(p.is_meta for p in model.parameters()):
        model.to(mesh.device)
    return model


def gather(model: M) -> M:
    """Undo :func:`parallelize`: the unsplit model on every rank, bit for bit; returns it. A collective call.

    Raises UsageError (``bad-option``) when the model is not split.
    """
    if not isinstance(core_of(model), SplitModel):
        raise UsageError("the model is not split", code="bad-option", fix="gather what parallelize returned")
    done: dict[int, nn.Parameter] = {}
    module: Any
    for module in list(model.modules()):
        for name, cut in getattr(module, "cuts", {}).items():
            shard = module.get_parameter(name)
            if cut.dim is not None and id(shard) not in done:
                done[id(shard)] = nn.Parameter(join(shard, cut, module.shapes[name], module.group), shard.requires_grad)
            setattr(module, name, done.get(id(shard), shard))
        restore(module)
    return model


def _family(model: nn.Module, config: ModelConfig, accept_guess: bool) -> Family:
    if accept_guess and FAMILIES.find(config.model_type) is None:
        return guess(config, {name: tuple(p.shape) for name, p in model.named_parameters()})
    family = FAMILIES.of(config)
    reason = family.refuse(config) if family.refuse else None
    if reason:
        raise UsageError(f"{config.model_type} with {reason} cannot be split", code="unknown-model", fix="use one rank")
    return family


def _refuse(model: Any) -> None:
    """Models that are no candidates, whatever the family."""
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise UsageError(
            f"{type(model).__name__} is not a model of transformers", code="bad-option", fix="give AutoModelForCausalLM's"
        )
    if model.config.get_text_config() is not model.config:
        raise UsageError(
            f"{type(model).__name__} is more than a language model, and the rest of it cannot be split",
            code="unknown-model",
            fix="load its text part alone: crosscut.from_pretrained(directory, mesh)",
        )
    if isinstance(model, SplitModel) or getattr(model, "_tp_size", None):
        raise UsageError("the model is split already", code="bad-option", fix="gather it first, or load it without tp_plan")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UsageError("the model is spread over devices (device_map)", code="bad-option", fix="load it without device_map")
    odd = [name for name, p in model.named_parameters() if p.dtype not in _FLOATS]
    if odd or getattr(model, "hf_quantizer", None) is not None:
        raise UsageError(
            f"the model is quantized{f' ({odd[0]})' if odd else ''}, and its scales would not be cut with its weights",
            code="bad-dtype",
            fix="load it in bfloat16, float16, float32 or float64",
        )


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _refuse_unequal_draws(what: str) -> None:
    if what:
        raise UsageError(
            f"training with {what}: the ranks hold unequal parts, so one draws more random numbers than another, and from then "
            "on their masks for what they share would differ",
            code="bad-option",
            fix=f"set the {what} to 0, use a tp that divides the heads, or call model.eval() for inference",
        )


def _refuse_different_weights(model: nn.Module, mesh: Mesh) -> None:
    """Ranks with different weights would give one nonsensical model: the start of each parameter is compared."""
    names, starts = zip(*_starts(model.named_parameters()), strict=True)
    mine = torch.stack(starts).to(mesh.device)
    for group in (mesh.tp, mesh.dp):
        everyone = all_gather(mine.view(1, -1), group, 0) if group.size > 1 else mine.view(1, -1)
        differs = (everyone != everyone[0]).any(0)
        if bool(differs.any()):
            raise MismatchError(
                f"the ranks do not have the same weights in {names[int(differs.nonzero()[0])]!r}",
                code="result-differs",
                fix="load the same checkpoint on every rank, or call torch.manual_seed with one seed before making the model",
            )


def _starts(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterable[tuple[str, Tensor]]:
    for name, p in parameters:
        start = torch.zeros(1) if p.is_meta else p.detach().reshape(-1)[:_SAMPLE].cpu()
        places = torch.arange(1, 2 * start.numel(), 2, dtype=torch.int64)
        yield name, (start.double().view(torch.int64) * places).sum()


def _max_time(model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> float | None:
    """The seconds that ``generate(*args, **options)`` of ``model`` would take at most."""
    given = options.get("generation_config", args[1] if len(args) > 1 else None) or model.generation_config
    found: float | None = options.get("max_time", getattr(given, "max_time", None))
    return found


def _share_random_state(group: Group) -> None:
    """Give every rank of the group the first rank's random state of its device."""
    if group.size == 1:
        return
    if group.device.type == "cuda":
        state = broadcast(torch.cuda.get_rng_state(group.device).to(group.device), group)
        torch.cuda.set_rng_state(state.cpu(), group.device)
    else:
        torch.set_rng_state(broadcast(torch.get_rng_state(), group))
