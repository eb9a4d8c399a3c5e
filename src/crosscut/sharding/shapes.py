"""Which parameters a config has and what shapes they must have, from the family's table alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

from crosscut.model_config import ModelConfig
from crosscut.sharding.family import Family, Rule
from crosscut.sharding.roles import Role

_ROLE_SHAPES = {
    Role.LM_HEAD: "V H", Role.EMBEDDING: "V H", Role.COLUMN: "F H", Role.ROW: "H F", Role.GATE_UP: "2F H",
    Role.QUERY: "ND H", Role.KEY_VALUE: "KD H", Role.QKV: "(N+2K)D H", Role.GROUPED_QKV: "(N+2K)D H",
    Role.ATTENTION_OUT: "H ND", Role.LATENT_QUERY: "ND Q", Role.LATENT_KEY_VALUE: "NB R", Role.LATENT_OUT: "H NO",
    Role.LATENT_DOWN: "R+S H", Role.HEAD_NORM: "D", Role.QUERY_NORM: "N D", Role.KEY_NORM: "K D",
    Role.WIDE_QUERY_NORM: "ND", Role.WIDE_KEY_NORM: "KD", Role.ROUTER: "E H",
    Role.EXPERTS_GATE_UP: "E 2F H", Role.EXPERTS_DOWN: "E H F",
}  # fmt: skip


def sizes_of(config: ModelConfig, path: str = "") -> dict[str, int]:
    """The sizes by the letters that shapes are written in; F is that of the (shared) expert where ``path`` is in one."""
    heads, kv_heads, head_dim, latent = config.heads, config.kv_heads, config.head_dim, config.latent
    ffn = config.shared_ffn if ".shared_expert" in path else config.expert_ffn if ".experts." in path else config.ffn
    positions = config.max_positions or 0
    sizes = {
        "1": 1, "H": config.hidden, "V": config.vocab, "F": ffn, "2F": 2 * ffn, "E": config.experts,
        "N": heads, "K": kv_heads, "D": head_dim, "ND": heads * head_dim, "KD": kv_heads * head_dim,
        "(N+2K)D": (heads + 2 * kv_heads) * head_dim, "P": positions, "P+2": positions + 2,
        "W": int(config.raw.get("word_embed_proj_dim", config.hidden)),
    }  # fmt: skip
    if latent is not None:
        sizes |= {
            "Q": latent.q_rank or config.hidden, "R": latent.kv_rank, "R+S": latent.kv_rank + latent.rope_dim,
            "NB": heads * (latent.nope_dim + latent.v_dim), "NO": heads * latent.v_dim,
        }  # fmt: skip
    return sizes


def expected(config: ModelConfig, rule: Rule, name: str) -> tuple[int, ...]:
    """The shape that parameter ``name``, to which ``rule`` applies, must have."""
    letters = rule.shape if rule.shape != "H" else _ROLE_SHAPES.get(rule.role, "H")
    sizes = sizes_of(config, name)
    shape = tuple(sizes[letter] for letter in letters.split())
    if rule.transposed:
        shape = shape[::-1]
    return (shape[-1] if rule.transposed else shape[0],) if name.endswith(".bias") and len(shape) > 1 else shape


def parameters(config: ModelConfig, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter of the model. Only an ``exact`` family knows."""
    for rule in family.rules:
        for path, layer in _paths(rule.path, config.layers):
            if rule.when(config, layer):
                bare = rule.role in (Role.EXPERTS_GATE_UP, Role.EXPERTS_DOWN)
                names = [path] if bare else [f"{path}.weight"] + [f"{path}.bias"] * rule.bias(config, layer)
                yield from ((name, expected(config, rule, name)) for name in names if not is_tied(config, rule, name))


def is_tied(config: ModelConfig, rule: Rule, name: str) -> bool:
    """Whether the parameter ``name``, to which ``rule`` applies, is the embedding's: the weight of a tied head."""
    return config.tied and rule.role is Role.LM_HEAD and name.endswith(".weight")


def _paths(pattern: str, layers: int) -> Iterator[tuple[str, int]]:
    """Every path that a pattern stands for, with its layer's number."""
    found = re.search(r"\{(.*?)\}", pattern)
    words = found[1].split(",") if found else [""]
    for word in words:
        path = pattern.replace(found[0], word) if found else pattern
        if "*" not in path:
            yield path, 0
        else:
            yield from ((path.replace("*", str(layer), 1), layer) for layer in range(layers))
