"""A checkpoint described before anything of it is read: every tensor's name in the model, place, shape and size.

Reads config.json and safetensors headers. Where there are no weights yet, the family's table says what they will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crosscut.errors import UsageError, choose
from crosscut.model_config import CONFIG, ModelConfig
from crosscut.sharding.cut import Replicated
from crosscut.sharding.families import FAMILIES
from crosscut.sharding.family import Family, Place, Rule, cut_of, place
from crosscut.sharding.guess import guess
from crosscut.sharding.headers import BITS, FLOATS, INDEX, Stored, read_headers
from crosscut.sharding.roles import Role
from crosscut.sharding.shapes import expected, is_tied, parameters

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""safetensors' names of the dtypes that weights are loaded in."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""What transformers computes rotary positions by."""
ROPE_ALIASES = {"phi3": ("su",)}
"""By model_type, old names that its config class reads as another."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model. ``stored`` is where it lies, None when there are no weights yet."""

    place: Place
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of the dtype it will have in memory."""
    stored: Stored | None = None


@dataclass(frozen=True)
class Model:
    """A model as config and headers describe it."""

    config: ModelConfig
    family: Family
    tensors: tuple[Tensor, ...]
    dtype: str
    """safetensors' name of the dtype of activations and KV cache: what most of the weights have."""
    notes: tuple[str, ...] = ()
    tied_head: Stored | None = None
    """A tied head that is stored beside its embedding, and so must be equal to it."""

    @property
    def from_config(self) -> bool:
        """There are no weights: shapes are computed from the config."""
        return all(tensor.stored is None for tensor in self.tensors)


def describe(
    directory: str | Path, dtype: str | None = None, accept_guess: bool = False, family: Family | None = None
) -> Model:
    """Describe the checkpoint in ``directory``, its weights in the ``dtype`` that they will be loaded in (``'bfloat16'``).

    ``dtype``: by default what config.json says, else what most of the weights have, as :func:`crosscut.from_pretrained`.
    ``accept_guess``: a model_type without a table gets a plan made from names and shapes. ``family``: a table of your own.
    Raises UsageError: as :meth:`ModelConfig.from_dir` and :func:`read_headers`; ``unknown-model`` (no table, or a config that
    cannot be split); ``bad-dtype`` (quantized weights, an unknown ``dtype``); ``bad-config`` (a shape that contradicts the
    config, positions of an unknown type); ``parameter-missing`` (a parameter that no rule matches, or one that the checkpoint
    lacks).
    """
    config = ModelConfig.from_dir(directory)
    _refuse_quantized(config)
    headers = _headers(directory, config, family or FAMILIES.find(config.model_type))
    return describe_tensors(config, headers, str(directory), dtype, accept_guess, family)


def describe_tensors(
    config: ModelConfig,
    stored: Mapping[str, Stored] | None,
    where: str,
    dtype: str | None = None,
    accept_guess: bool = False,
    family: Family | None = None,
) -> Model:
    """As :func:`describe`, of the tensors ``stored`` (None: there are no weights yet) of a checkpoint at ``where``."""
    family = family or _family(config, stored, accept_guess)
    _refuse_rope(config, where)
    reason = family.refuse(config) if family.refuse else None
    if reason:
        raise UsageError(
            f"the model in {where!r} ({config.model_type}) has {reason}, which crosscut does not split",
            code="unknown-model",
            fix="run it on one device, or register a table of your own (docs/models.md)",
        )
    target = DTYPES[choose("dtype", dtype, DTYPES, code="bad-dtype")] if dtype else DTYPES.get(config.dtype or "")
    if stored is None:
        return _from_config(config, family, target)
    target = target or _commonest(stored)
    tensors, notes, head = _from_headers(config, family, stored, target)
    if family.exact:
        _refuse_missing(config, family, {tensor.place.name for tensor in tensors}, where)
    return Model(config, family, tuple(tensors), target, tuple(notes), head)


def _commonest(stored: Mapping[str, Stored]) -> str:
    """The dtype of floating-point numbers that most of the weights have."""
    weight = Counter[str]()
    for tensor in stored.values():
        weight[tensor.dtype] += _numel(tensor.shape)
    return next((name for name, _ in weight.most_common() if name in FLOATS), "BF16")


def _loaded(family: Family, name: str, target: str) -> str:
    """The dtype in which the parameter ``name`` of a model in ``target`` is held."""
    return "F32" if BITS[target] == 16 and family.stays_float32(name) else target


def _headers(directory: str | Path, config: ModelConfig, family: Family | None) -> dict[str, Stored] | None:
    """The headers, None when the directory has no weights at all."""

    def spare(stored: str) -> bool:
        name = family.name_in_model(stored) if family else stored
        rule = family.find(name) if family else None
        return rule is not None and is_tied(config, rule, name)

    root = Path(directory)
    found = (root / INDEX).exists() or any(root.glob("*.safetensors"))
    return read_headers(root, spare) if found else None


def _family(config: ModelConfig, stored: Mapping[str, Stored] | None, accept_guess: bool) -> Family:
    if not accept_guess or FAMILIES.find(config.model_type) is not None:
        return FAMILIES.of(config)
    if stored is None:
        raise UsageError(
            f"there is no table for model_type {config.model_type!r}, and there are no weights to guess one from",
            code="file-missing",
            fix="download the safetensors files too",
        )
    return guess(config, {name: tensor.shape for name, tensor in stored.items()})


def _refuse_quantized(config: ModelConfig) -> None:
    method = config.raw.get("quantization_config")
    if method:
        name = method.get("quant_method", "an unknown method") if isinstance(method, Mapping) else method
        raise UsageError(
            f"the weights are quantized ({name}), which crosscut does not split",
            code="bad-dtype",
            fix="use the checkpoint in bfloat16, float16 or float32",
        )


def _refuse_rope(config: ModelConfig, where: str) -> None:
    """Positions of a type that transformers does not compute for the families with a table."""
    said = config.raw.get("rope_parameters", config.raw.get("rope_scaling"))
    if not isinstance(said, Mapping) or FAMILIES.find(config.model_type) is None:
        return
    allowed = ROPE_TYPES + ROPE_ALIASES.get(config.model_type, ())
    for each in (said, *said.values()):  # one for all layers, or one for each type of layer
        kind = each.get("rope_type", each.get("type", "default")) if isinstance(each, Mapping) else "default"
        if kind not in allowed:
            raise UsageError(
                f"{CONFIG} of {where!r} asks for rotary positions of type {kind!r}, which transformers does not know",
                code="bad-config",
                fix=f"use one of: {', '.join(allowed)}",
            )


def _from_config(config: ModelConfig, family: Family, target: str | None) -> Model:
    if not family.exact:
        raise UsageError(
            f"there are no weights, and the table of {family.name!r} does not say what shapes they have",
            code="file-missing",
            fix="download the safetensors files too",
        )
    dtype = target or "BF16"
    notes = ["no weights found: every figure is computed from config.json"]
    if not target:
        notes.append("config.json names no dtype: bfloat16 is assumed")
    found = parameters(config, family)
    tensors = [Tensor(cut_of(config, family, n, shape), shape, _loaded(family, n, dtype)) for n, shape in found]
    return Model(config, family, tuple(tensors), dtype, tuple(notes))


def _from_headers(
    config: ModelConfig, family: Family, stored: Mapping[str, Stored], target: str
) -> tuple[list[Tensor], list[str], Stored | None]:
    """The model's tensors, notes, and the tied head that is stored beside its embedding."""
    tensors, unmatched, ignored, wrong = [], [], [], []
    names, head = _names(config, family, stored)
    for tensor in stored.values():
        name = names[tensor.name]
        rule = family.find(name)
        dtype = _loaded(family, name, target) if tensor.dtype in FLOATS else tensor.dtype
        if family.is_ignored(tensor.name, config.layers):
            ignored.append(tensor.name)
        elif family.is_buffer(name):
            tensors.append(Tensor(Place(name, Role.REPLICATED, Replicated()), tensor.shape, dtype, tensor))
        elif rule is None:
            unmatched.append(tensor.name)
        elif tensor is head:
            ignored.append(tensor.name)  # the embedding serves
        elif problem := _contradiction(config, family, rule, name, tensor.shape):
            wrong.append(problem)
        else:
            tensors.append(Tensor(place(config, rule, name, tensor.shape), tensor.shape, dtype, tensor))
    _refuse(family, unmatched, wrong)
    return tensors, [f"not loaded: {_some(ignored)}"] if ignored else [], head


def _names(config: ModelConfig, family: Family, stored: Mapping[str, Stored]) -> tuple[dict[str, str], Stored | None]:
    """The model's name of each stored tensor, and the tied head where its embedding is stored too.

    A tied head that is stored alone is the embedding: of two names for one tensor, safetensors' save_model keeps the first.
    """
    names = {name: family.name_in_model(name) for name in stored}
    for name, own in names.items() if config.tied else ():
        rule = family.find(own)
        if rule is not None and is_tied(config, rule, own):
            embedding = next((f"{rule.path}.weight" for rule in family.rules if rule.role is Role.EMBEDDING), own)
            if embedding in names.values():
                return names, stored[name]
            return {**names, name: embedding}, None
    return names, None


def _contradiction(config: ModelConfig, family: Family, rule: Rule, name: str, shape: tuple[int, ...]) -> str | None:
    if not family.exact:
        return None
    wanted = expected(config, rule, name)
    return None if wanted == shape else f"{name} is {list(shape)}, and by {CONFIG} it would be {list(wanted)}"


def _refuse(family: Family, unmatched: list[str], wrong: list[str]) -> None:
    if wrong:
        more = f" ({len(wrong)} such tensors)" if len(wrong) > 1 else ""
        raise UsageError(
            f"{CONFIG} and the weights contradict each other: {wrong[0]}{more}",
            code="bad-config",
            fix=f"take {CONFIG} and the weights from one and the same revision",
        )
    if unmatched:
        raise UsageError(
            f"no rule of the family {family.name!r} matches {_some(unmatched)}",
            code="parameter-missing",
            fix=f"check that {CONFIG} belongs to the weights, or register a table of your own (docs/models.md)",
        )


def _refuse_missing(config: ModelConfig, family: Family, found: set[str], where: str) -> None:
    missing = []
    for name, _ in parameters(config, family):
        parts = family.stored_parts(name, config.experts) or []
        if name not in found and not (parts and all(part in found for expert in parts for part in expert)):
            missing.append(name)
    if missing:
        raise UsageError(
            f"{where!r} lacks {_some(missing)}, which a model of this config has",
            code="parameter-missing",
            fix=f"check that all files are there, and that {CONFIG} belongs to the weights",
        )


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of ``shape`` and safetensors' ``dtype``."""
    return _numel(shape) * BITS[dtype] // 8


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
