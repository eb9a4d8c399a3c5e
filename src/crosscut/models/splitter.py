"""What each module of a model becomes on one rank: read off the family's table, and checked before anything is changed."""

from __future__ import annotations

from typing import Any

from torch import nn

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers import VocabParallelEmbedding
from crosscut.model_config import ModelConfig
from crosscut.models.adapters import ROWS, layer_of, place_of
from crosscut.models.split_modules import (
    LatentDown,
    LocalConfig,
    OnePerQuery,
    PartialNorm,
    SharedInput,
    SharedRows,
    SplitColumn,
    SplitEmbedding,
    SplitExperts,
    SplitRow,
    WideNorm,
    change,
    cut_parameters,
    mixed,
)
from crosscut.sharding import Cut, Family, Heads, Place, Role, Size, shard_range, shard_sizes
from crosscut.sharding.family import matches
from crosscut.sharding.heads import HeadCut

EXPERTS = {Role.EXPERTS_GATE_UP, Role.EXPERTS_DOWN}
NORMS = {Role.HEAD_NORM, Role.QUERY_NORM, Role.KEY_NORM}
WIDE_NORMS = {Role.WIDE_QUERY_NORM, Role.WIDE_KEY_NORM}
KEY_NORMS = {Role.KEY_NORM, Role.WIDE_KEY_NORM}
SIDE_BY_SIDE = {Role.COLUMN, Role.QUERY, Role.KEY_VALUE}
WHOLE = {Role.REPLICATED, Role.ROUTER}

_ALIGNMENT = 16  # bytes; what torch's grouped multiply wants of the rows of the experts' weights
_NARROWEST = 2  # bytes of an element: a model may be converted to bfloat16 after it is split


class Splitter:
    """One model, one family, one rank. :meth:`split` does what the constructor has decided.

    Raises UsageError: ``parameter-missing``, ``bad-option`` and ``bad-size`` for a table that does not fit the model.
    """

    def __init__(self, model: nn.Module, family: Family, config: ModelConfig, mesh: Mesh) -> None:
        self.family, self.config, self.group, self.device = family, config, mesh.tp, mesh.device
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.places = {path: self._places(path) for path in self.modules}
        self.roles = {path: {place.role for place in places.values()} for path, places in self.places.items() if places}
        self.shared_inputs: dict[str, SharedInput] = {}
        self.kv_of_query = self._kv_of_query(self.group.rank)
        counts = {self.kv_of_query.count(kv) for kv in self.kv_of_query}
        self.uniform = len(counts) == 1
        """Every KV head of this rank serves equally many of its query heads; else K and V come once for each query head."""
        queries = len(self.kv_of_query)
        self.sizes = {
            Size.HEADS: queries,
            Size.KV_HEADS: max(self.kv_of_query) + 1 if self.uniform else queries,
            Size.GROUPS: counts.pop() if self.uniform else 1,
            Size.WIDTH: queries * config.head_dim,
            Size.EXPERT_FFN: shard_sizes(config.expert_ffn, self.group.size)[self.group.rank],
        }
        for path in self.roles:
            self._check(path)

    def _places(self, path: str) -> dict[str, Place]:
        own = self.modules[path].named_parameters(recurse=False)
        return {name: place_of(self.config, self.family, path, name, tuple(p.shape)) for name, p in own}

    def _kv_of_query(self, rank: int) -> list[int]:
        return Heads(self.config.heads, self.config.kv_heads, 1).kv_of_query(self.group.size, rank)

    def _check(self, path: str) -> None:
        """Refuse a table that takes the module for what it is not."""
        module, roles = self.modules[path], self.roles[path]
        for name, place in self.places[path].items():
            place.cut.shard_shape(module.get_parameter(name).shape, self.group.size, self.group.rank)
        role, weight = next(iter(roles)), module._parameters.get("weight")
        if role in WHOLE | NORMS | EXPERTS:
            fits = True
        elif role in WIDE_NORMS:
            fits = hasattr(module, "variance_epsilon")  # an RMS norm of transformers
        elif role is Role.EMBEDDING:
            fits = isinstance(module, nn.Embedding)
        else:  # Linear and its kin, or transposed as Conv1D
            fits = weight is not None and weight.dim() == 2
            fits = fits and isinstance(module, nn.Linear) is not self.places[path]["weight"].transposed
        if not fits or (len(roles) > 1 and not roles <= EXPERTS):
            raise UsageError(
                f"for the table {self.family.name!r}, {path!r} is a {' and a '.join(repr(r.value) for r in roles)}; "
                f"it is a {type(module).__name__} whose weight is {'missing' if weight is None else list(weight.shape)}",
                code="bad-option",
                fix="give the module the role of what it is (docs/models.md)",
            )

    def unequal_draws(self) -> str:
        """Which dropout would draw more on one rank than on another; '' when none would."""
        tp, raw = self.group.size, self.config.raw
        heads = {len(self._kv_of_query(rank)) for rank in range(tp)}
        if len(heads) > 1 and (raw.get("attention_dropout") or raw.get("attn_pdrop")):
            return "attention dropout"
        for path, roles in self.roles.items():
            layer, part = layer_of(path)
            if part == "A" and roles <= ROWS:
                shape = tuple(self.modules[path].weight.shape)
                sizes = {self.places[path]["weight"].cut.shard_shape(shape, tp, rank) for rank in range(tp)}
                dropout: Any = self.modules[layer].lora_dropout[path.rpartition(".")[2]]
                if len(sizes) > 1 and isinstance(dropout, nn.Dropout):  # without dropout PEFT puts nn.Identity there
                    return "LoRA dropout"
        return ""

    def split(self) -> None:
        """Give every module that the table gives a role its class, its part of the parameters and its sizes."""
        done: dict[int, nn.Parameter] = {}
        for path, roles in self.roles.items():
            if roles <= WHOLE:
                continue
            module = self.modules[path]
            cuts = {name: place.cut for name, place in self.places[path].items()}
            cut_parameters(module, cuts, self.group, self.device, done)
            change(module, self._class_of(path), **self._attributes(path))
            order, head_dim = self._order(path)
            if order:
                change(module, mixed(OnePerQuery, type(module)), order=order, head_dim=head_dim, orders={})
        for local in self.family.local:
            for path, module in self.modules.items():
                if matches(local.path, path):
                    self._set_local(module, local.attribute, self.sizes[local.size])

    def _class_of(self, path: str) -> type[nn.Module]:
        roles, cls = self.roles[path], type(self.modules[path])
        role = next(iter(roles))
        if roles <= EXPERTS:
            return mixed(SplitExperts, cls)
        if role is Role.EMBEDDING:
            return VocabParallelEmbedding if cls is nn.Embedding else mixed(cls, SplitEmbedding)
        if role in NORMS:
            return mixed(PartialNorm, cls)
        if role in WIDE_NORMS:
            return WideNorm
        if role is Role.LATENT_DOWN:
            return LatentDown
        return SplitRow if role in ROWS else SplitColumn

    def _attributes(self, path: str) -> dict[str, Any]:
        """What the module's new class reads, beyond its cuts, shapes and group."""
        module, places = self.modules[path], self.places[path]
        role = next(iter(self.roles[path]))
        shared = {name: rows for name, place in places.items() if (rows := SharedRows.of(place.cut, self.group))}
        if role in EXPERTS:
            return self._experts(module)
        if role is Role.EMBEDDING:
            mine = shard_range(module.shapes["weight"][0], self.group.size, self.group.rank)
            return {"mine": mine, "sequence_parallel": False, "sequence_dim": 0}
        if role is Role.HEAD_NORM:
            return {"partial": True, "shared": {}, "partial_gradients": dict.fromkeys(places, "layer")}
        if role in NORMS:
            return {"partial": False, "shared": shared}
        if role in WIDE_NORMS:
            counted = self._counted_from(places["weight"].cut)
            return {"features": module.shapes["weight"][0], "counted_from": counted, "shared": shared}
        if role is Role.LATENT_DOWN:
            assert self.config.latent is not None
            return {"tail": self.config.latent.rope_dim}
        linear = self._linear(module, places["weight"].transposed)
        if role in ROWS:
            return {**linear, "input_is_parallel": True, "reduce_output": True}
        return {**linear, "shared": shared, "shared_input": self._shared_input(path), "gather_output": role is Role.LM_HEAD}

    def _linear(self, module: Any, transposed: bool) -> dict[str, Any]:
        inner, outer = module.shapes["weight"] if transposed else reversed(module.shapes["weight"])
        sizes = {"in_features": inner, "out_features": outer, "local_features": module.weight.shape[0 if transposed else 1]}
        return {**sizes, "transposed": transposed, "sequence_parallel": False, "sequence_dim": 0}

    def _experts(self, module: Any) -> dict[str, Any]:
        """The grouped multiply of torch needs aligned rows; experts whose part is not aligned compute one by one."""
        features = module.down_proj.shape[-1]
        aligned = features and features * _NARROWEST % _ALIGNMENT == 0
        if aligned or not hasattr(module, "config"):
            return {}
        return {"config": LocalConfig(module.config, _experts_implementation="eager")}

    def _shared_input(self, path: str) -> SharedInput | None:
        """One for all the column layers side by side under one module, None where there is only one."""
        parent = _parent(path)
        siblings = [p for p, roles in self.roles.items() if roles <= SIDE_BY_SIDE and _parent(p) == parent]
        if path not in siblings or len(siblings) < 2:
            return None
        return self.shared_inputs.setdefault(parent, SharedInput(len(siblings)))

    def _counted_from(self, cut: Cut) -> int:
        """The first feature of this rank's shard that no rank before it holds."""
        if not isinstance(cut, HeadCut) or self.group.rank == 0:
            return 0
        before, mine = (cut.head_runs(self.group.size, self.group.rank - i)[0] for i in (1, 0))
        return max(before.stop - mine.start, 0) * cut.heads.head_dim

    def _order(self, path: str) -> tuple[tuple[int, ...], int | None]:
        """The heads that the projection (or the norm behind it) at ``path`` must give, and their size; () for those it has."""
        role, kv, d = next(iter(self.roles[path])), self.kv_of_query, self.config.head_dim
        queries = range(len(kv))
        if self.uniform:
            return (), None
        if role in KEY_NORMS:
            return tuple(kv), None if role is Role.KEY_NORM else d
        if role is Role.KEY_VALUE and not self._has_key_norm(path):
            return tuple(kv), d
        if role is Role.QKV:
            keys = [len(kv) + k for k in kv]
            return (*queries, *keys, *(key + max(kv) + 1 for key in keys)), d
        if role is Role.GROUPED_QKV:  # stored: of each KV head its queries, its key, its value
            at = [query + 2 * kv[query] for query in queries]
            key_at = [2 * k + sum(other <= k for other in kv) for k in kv]
            return tuple(head for query in queries for head in (at[query], key_at[query], key_at[query] + 1)), d
        return (), None

    def _has_key_norm(self, path: str) -> bool:
        """Whether a norm with weights by KV head, ``...k_norm``, follows the projection ``...k_proj``."""
        attention, _, leaf = layer_of(path)[0].rpartition(".")
        norm = f"{attention}.{leaf.split('_')[0]}_"
        return any(roles <= KEY_NORMS and p.startswith(norm) for p, roles in self.roles.items())

    def _set_local(self, module: Any, attribute: str, size: int) -> None:
        if attribute.startswith("config."):
            change(module, config=LocalConfig(module.config, **{attribute.removeprefix("config."): size}))
        elif hasattr(module, attribute):
            change(module, **{attribute: size})


def _parent(path: str) -> str:
    """The module that holds the layer at ``path``, or the layer beside which the adapter at ``path`` stands."""
    layer, part = layer_of(path)
    return layer if part else layer.rpartition(".")[0]
