"""A table for a family that nobody described, from the names and shapes of its parameters. Marked as guessed.

Cut is only what cannot be misread: attention whose q, k, v and output projections are found by name and have the shapes
that the config's heads demand, and MLPs whose layers widen and narrow again. All else is left whole on every rank, q, k
and v stored as one too, since their order within the weight is anybody's guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from crosscut.model_config import ModelConfig
from crosscut.sharding.family import Family, Local, Rule, Size
from crosscut.sharding.roles import Role

_QUERY, _KEY, _VALUE = r"(q|query|wq|to_q)(_proj|_lin)?", r"(k|key|wk|to_k)(_proj|_lin)?", r"(v|value|wv|to_v)(_proj|_lin)?"
_OUT = r"(o|out|c)_proj|out_lin|dense|wo|to_out"
_DOWN = r".*(down|fc2|fc_out|4h_to_h|w2|wo|c_proj|out|output)(_proj|_lin)?"
_EMBEDDING = r".*(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embedding)"
_HEAD = r"lm_head|embed_out|output"
_ATTRIBUTES = {
    "num_heads": Size.HEADS, "num_attention_heads": Size.HEADS, "n_heads": Size.HEADS, "n_head": Size.HEADS,
    "num_key_value_heads": Size.KV_HEADS, "num_kv_heads": Size.KV_HEADS, "n_kv_heads": Size.KV_HEADS,
    "num_key_value_groups": Size.GROUPS,
}  # fmt: skip

Modules = dict[str, dict[str, tuple[int, ...]]]
"""By module path (numbers as ``*``) the shapes of its own parameters."""


def guess(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Family:
    """A table for the parameters ``shapes`` (name -> whole shape) of a model of ``config``; ``guessed`` is set.

    Attributes such as ``num_heads`` of the attention modules that are cut are named in ``local``, whether the modules have
    them or not.
    """
    modules = _modules(shapes)
    roles: dict[str, Role] = {}
    attention = []
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in modules):
        own = {path.rpartition(".")[2]: path for path in modules if path.rpartition(".")[0] == parent}
        found = _attention(config, own, modules) if "*" in parent else {}
        attention += [parent] if found else []
        if "*" in parent:
            roles |= found or _mlp(config, parent, own, modules)
    for path, own_shapes in modules.items():
        roles.setdefault(path, _outside(config, path, own_shapes))
    local = [Local(parent, name, size) for parent in attention for name, size in _ATTRIBUTES.items()]
    table = tuple(Rule(path, role) for path, role in roles.items())
    return Family(f"guessed for {config.model_type}", (config.model_type,), table, tuple(local), guessed=True)


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> Modules:
    """Equal layers fold into one; a parameter whose shape differs between layers keeps no shape and is left whole."""
    modules: Modules = {}
    for name, shape in shapes.items():
        path, _, leaf = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name).rpartition(".")
        if leaf not in ("weight", "bias"):
            path = f"{path}.{leaf}".lstrip(".")
        own = modules.setdefault(path, {})
        own[leaf] = shape if own.get(leaf, shape) == shape else ()
    return modules


def _attention(config: ModelConfig, own: Mapping[str, str], modules: Modules) -> dict[str, Role]:
    """Roles of the modules beside each other in one attention, empty unless every one of them is understood."""
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    wanted = {
        _QUERY: (Role.QUERY, (query, config.hidden)),
        _KEY: (Role.KEY_VALUE, (kv, config.hidden)),
        _VALUE: (Role.KEY_VALUE, (kv, config.hidden)),
        _OUT: (Role.ATTENTION_OUT, (config.hidden, query)),
    }
    roles, seen = {}, set()
    for word, path in own.items():
        pattern = next((pattern for pattern in wanted if re.fullmatch(pattern, word)), None)
        role, shape = wanted.get(pattern or "", (Role.HEAD_NORM, (config.head_dim,)))
        if modules[path].get("weight") != shape:
            return {}
        if pattern:
            seen.add(pattern)
        elif "norm" not in word:
            return {}
        roles[path] = role
    return roles if len(seen) == len(wanted) else {}


def _nested_bare(parent: str, modules: Modules) -> bool:
    """Whether a module inside ``parent``, such as an activation, has parameters that are neither weight nor bias."""
    inside = (path for path in modules if path.startswith(f"{parent}.") and path.rpartition(".")[0] != parent)
    return any(modules[path].keys() - {"weight", "bias"} for path in inside)


def _mlp(config: ModelConfig, parent: str, own: Mapping[str, str], modules: Modules) -> dict[str, Role]:
    """Layers beside each other that widen ``[F, H]``, one or two, and the one that narrows ``[H, F]``; F is not H.

    A weight stored ``[in, out]`` looks like the other of the two, so its name must say "down" and the biases must fit.
    """
    hidden, weights = config.hidden, {path: modules[path].get("weight", ()) for path in own.values()}
    down = [own[word] for word in own if re.fullmatch(_DOWN, word) and weights[own[word]][:1] == (hidden,)]
    if len(down) != 1 or len(weights[down[0]]) != 2:
        return {}
    width = weights[down[0]][1]
    up = [path for path, shape in weights.items() if shape == (width, hidden) and path not in down]
    others = [path for path in weights if path not in (*up, *down)]
    fits = all(modules[path].get("bias", (width,)) == (width,) for path in up) and width != hidden
    if not fits or len(up) not in (1, 2) or modules[down[0]].get("bias", (hidden,)) != (hidden,):
        return {}
    if any(weights[path] != (hidden,) for path in others) or _nested_bare(parent, modules):  # may work on the wide features
        return {}
    return {**dict.fromkeys(up, Role.COLUMN), down[0]: Role.ROW}


def _outside(config: ModelConfig, path: str, own: Mapping[str, tuple[int, ...]]) -> Role:
    if own.get("weight") == (config.vocab, config.hidden) and "*" not in path:
        if re.fullmatch(_HEAD, path):
            return Role.LM_HEAD
        if re.fullmatch(_EMBEDDING, path):
            return Role.EMBEDDING
    return Role.REPLICATED
