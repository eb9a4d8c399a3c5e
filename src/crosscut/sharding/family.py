"""A family of models as one small table: which module does what, so where each parameter is cut.

Patterns of names: ``*`` is one number (a layer, an expert), ``{q,k}`` one of several words, ``**`` any rest of a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

from crosscut.errors import UsageError, nearest
from crosscut.model_config import ModelConfig
from crosscut.sharding.cut import Cut
from crosscut.sharding.roles import Role, role_cut


@cache
def expression(pattern: str) -> str:
    """The regular expression of a pattern of names."""
    text = re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", r"\d+")
    return re.sub(r"\\\{(.*?)\\\}", lambda found: f"(?:{found[1].replace(',', '|')})", text)


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` is one of the names that ``pattern`` stands for."""
    return re.fullmatch(expression(pattern), name) is not None


def _any(patterns: Iterable[str], tail: str = "") -> re.Pattern[str]:
    """One expression for many patterns, since a checkpoint may hold 45,000 names; group i + 1 is that of pattern i."""
    return re.compile("|".join(f"({expression(pattern)}){tail}" for pattern in patterns) or r"(?!)")


class Size(str, Enum):
    """What an attribute of a module says, which on a rank must say the rank's own."""

    HEADS = "heads"
    """Query heads."""
    KV_HEADS = "kv_heads"
    GROUPS = "groups"
    """Query heads of one KV head."""
    WIDTH = "width"
    """Features of the query heads, N*D."""
    EXPERT_FFN = "expert_ffn"
    """Features inside one expert."""


When = Callable[[ModelConfig, int], bool]
"""Whether something is there, given the config and the layer's number (0 outside layers)."""


def flag(name: str, default: bool = False) -> When:
    """What the config says under ``name``, ``default`` when it is silent."""
    return lambda config, layer: bool(config.raw.get(name, default))


def always(config: ModelConfig, layer: int) -> bool:
    """In every config, in every layer."""
    return True


def never(config: ModelConfig, layer: int) -> bool:
    """Not in the model: a name that only checkpoints use, or a layer without bias."""
    return False


@dataclass(frozen=True)
class Rule:
    """Modules whose path is ``path`` have the role; for a bare parameter, ``path`` is its own name.

    That much cuts a model. The rest tells which parameters a config has and how large they are, before there are weights.
    """

    path: str
    role: Role
    transposed: bool = False
    """The weight is stored ``[in, out]``."""
    shape: str = "H"
    """The weight's shape where the role does not say it (REPLICATED): sizes by the letters of ``shapes.SIZES``."""
    bias: When = never
    when: When = always


@dataclass(frozen=True)
class Local:
    """An attribute that Hugging Face's code reads. ``'config.X'``: of a copy of the module's config."""

    path: str
    attribute: str
    size: Size


@dataclass(frozen=True)
class Stack:
    """A parameter ``[E, ...]`` whose experts lie on disk one by one: ``name`` of the model, ``parts`` on disk.

    ``{expert}`` in a part is the expert's number. With several parts (gate, up) they follow each other along dim 1.
    Both are relative to a layer: they replace each other at the end of a name.
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where one parameter goes."""

    name: str
    """Its name in the model; a checkpoint's may lack the prefix."""
    role: Role
    cut: Cut
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """The table of one family. ``rules`` name every parameter, the uncut ones too, so that an unknown one is noticed."""

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    local: tuple[Local, ...] = ()
    prefix: str = ""
    """What checkpoints may leave out in front of a name (``'transformer.'``)."""
    renames: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement): from a name on disk to the name in the model."""
    stacks: tuple[Stack, ...] = ()
    ignored: tuple[str, ...] = ()
    """Tensors on disk that are no parameters of the model (old buffers, a vision tower)."""
    buffers: tuple[str, ...] = ()
    """Tensors on disk that are buffers of the model; every rank holds them whole."""
    float32: tuple[str, ...] = ()
    """What transformers keeps in float32 in a model of 16-bit weights."""
    refuse: Callable[[ModelConfig], str | None] | None = None
    """Why a config of this family cannot be split, None when it can."""
    exact: bool = False
    """``shape``, ``bias`` and ``when`` of the rules are right, so that a missing parameter can be named."""
    guessed: bool = False
    """Made from names and shapes, by nobody who knows the model."""
    cached_by_query: When = never
    """transformers' code repeats K and V for each query head before it caches them."""

    def name_in_model(self, stored: str) -> str:
        """The model's name of a tensor on disk. Experts that lie one by one keep a name of their own."""
        for old, new in self.renames:
            stored = re.sub(old, new, stored)
        return self.prefix + stored if self.prefix and self.find(stored) is None else stored

    def find(self, name: str) -> Rule | None:
        """The rule for a parameter's name in the model, or for its module's; the first that matches."""
        found = self._rule.fullmatch(name)
        return self.rules[found.lastindex - 1] if found and found.lastindex else None

    @cached_property
    def _rule(self) -> re.Pattern[str]:
        return _any((rule.path for rule in self.rules), r"(?:\.[^.]+)?")

    @cached_property
    def _ignored(self) -> re.Pattern[str]:
        return _any(self.ignored)

    def find_module(self, path: str) -> Rule | None:
        """The rule for the module at ``path``."""
        return next((rule for rule in self.rules if matches(rule.path, path)), None)

    def is_ignored(self, stored: str, layers: int) -> bool:
        """Whether a tensor on disk is no parameter of a model with ``layers`` layers; DeepSeek-V3 stores one layer more."""
        number = re.search(r"\.(?:layers|h)\.(\d+)\.", f".{stored}")
        beyond = number is not None and int(number[1]) >= layers
        return beyond or self._ignored.fullmatch(stored) is not None

    def is_buffer(self, name: str) -> bool:
        """Whether a name in the model is that of a buffer which checkpoints hold."""
        return any(matches(pattern, name) for pattern in self.buffers)

    def stays_float32(self, name: str) -> bool:
        """Whether a name in the model is that of a tensor which stays in float32."""
        return any(matches(pattern, name) for pattern in self.float32)

    def stored_parts(self, name: str, experts: int) -> list[list[str]] | None:
        """The names (in the model's spelling) under which a stacked parameter lies on disk: by expert, by part.

        None when it is not one of :attr:`stacks`. A checkpoint may also hold it whole, under ``name``.
        """
        for stack in self.stacks:
            if name.endswith(stack.name):
                base = name.removesuffix(stack.name)
                return [[base + part.format(expert=expert) for part in stack.parts] for expert in range(experts)]
        return None


def cut_of(config: ModelConfig, family: Family, name: str, shape: tuple[int, ...]) -> Place:
    """Where the parameter ``name`` (of the model or of its checkpoint) of ``shape`` (the whole) is cut.

    Raises UsageError: ``parameter-missing`` when no rule matches, ``bad-size`` when the heads cannot be dealt.
    """
    own = family.name_in_model(name)
    rule = family.find(own)
    if rule is None:
        raise UsageError(
            f"no rule of the family {family.name!r} matches the parameter {name!r}",
            code="parameter-missing",
            fix="check that config.json belongs to the weights, or register a table of your own (docs/models.md)",
        )
    return place(config, rule, own, shape)


def place(config: ModelConfig, rule: Rule, name: str, shape: tuple[int, ...]) -> Place:
    """Where the model's parameter ``name``, to which ``rule`` applies, is cut."""
    return Place(name, rule.role, role_cut(rule.role, config, shape, rule.transposed), rule.transposed)


class Registry:
    """Families by model_type. :data:`FAMILIES` is the one that crosscut uses; a later table replaces an earlier one."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def register(self, *families: Family) -> None:
        """Add tables, yours too; a model_type that is known already gets the new table."""
        for family in families:
            self._families.update(dict.fromkeys(family.model_types, family))

    def find(self, model_type: str) -> Family | None:
        """The family of ``model_type``, None when there is none."""
        return self._families.get(model_type)

    def all(self) -> list[Family]:
        """Every family once, in the order in which they were registered."""
        return list(dict.fromkeys(self._families.values()))

    def of(self, config: ModelConfig) -> Family:
        """The family of ``config``. Raises UsageError (``unknown-model``) when there is none."""
        family = self.find(config.model_type)
        if family is None:
            raise UsageError(
                f"there is no table for model_type {config.model_type!r}{nearest(config.model_type, self._families)}",
                code="unknown-model",
                fix="accept a guess (--guess), or register a table of your own (docs/models.md); "
                f"known are {', '.join(sorted(self._families))}",
            )
        return family


FAMILIES = Registry()


def rules(
    role: Role, *paths: str, transposed: bool = False, shape: str = "H", bias: When = never, when: When = always
) -> tuple[Rule, ...]:
    """One rule for each path."""
    return tuple(Rule(path, role, transposed, shape, bias, when) for path in paths)


def local(path: str, **sizes: Size) -> tuple[Local, ...]:
    """One attribute each of the modules at ``path``; ``config__X`` stands for ``config.X``."""
    return tuple(Local(path, name.replace("__", "."), size) for name, size in sizes.items())
