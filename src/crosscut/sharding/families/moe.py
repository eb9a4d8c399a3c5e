"""Decoders with experts. transformers holds the experts of a layer as one parameter; checkpoints store them one by one."""

from __future__ import annotations

from dataclasses import replace

from crosscut.model_config import ModelConfig
from crosscut.sharding.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    BIASED_HEADS,
    GROUPS,
    HEAD_NORMS,
    LAYER,
    TWO_NORMS,
    family,
    gated,
    heads,
)
from crosscut.sharding.family import Family, Rule, Size, Stack, When, always, flag, local, never, rules
from crosscut.sharding.roles import Role

EXPERT = local(LAYER + "mlp.experts", intermediate_dim=Size.EXPERT_FFN)


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Qwen: every ``decoder_sparse_step``-th layer, but not those of ``mlp_only_layers``."""
    raw = config.raw
    return layer not in raw.get("mlp_only_layers", ()) and (layer + 1) % raw.get("decoder_sparse_step", 1) == 0


def deep_enough(config: ModelConfig, layer: int) -> bool:
    """DeepSeek: all layers but the first few."""
    return layer >= int(config.raw.get("first_k_dense_replace", 0))


def dense(sparse: When) -> When:
    """The layers that are not ``sparse``."""
    return lambda config, layer: not sparse(config, layer)


def direct_query(config: ModelConfig, layer: int) -> bool:
    """Queries are projected in one step."""
    return config.latent is not None and config.latent.q_rank is None


def routed(gate: str, up: str, down: str, when: When = always) -> tuple[Rule, ...]:
    """The router, and the experts as one parameter in the model and one by one on disk."""
    return (
        *rules(Role.ROUTER, LAYER + "mlp.gate", when=when),
        *rules(Role.EXPERTS_GATE_UP, LAYER + "mlp.experts.gate_up_proj", when=when),
        *rules(Role.EXPERTS_DOWN, LAYER + "mlp.experts.down_proj", when=when),
        *rules(Role.COLUMN, f"{LAYER}mlp.experts.*.{{{gate},{up}}}", when=never),
        *rules(Role.ROW, f"{LAYER}mlp.experts.*.{down}", when=never),
    )


def stacks(gate: str, up: str, down: str) -> tuple[Stack, ...]:
    """How the experts on disk make the parameters of the model."""
    one = ".experts.{expert}."
    return (
        Stack(".experts.gate_up_proj", (f"{one}{gate}.weight", f"{one}{up}.weight")),
        Stack(".experts.down_proj", (f"{one}{down}.weight",)),
    )


NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = replace(
    family("Mixtral", "mixtral", TWO_NORMS, heads(), routed("w1", "w3", "w2"), attributes=(*GROUPS, *EXPERT)),
    renames=((r"\.block_sparse_moe\.", ".mlp."),),
    stacks=stacks("w1", "w3", "w2"),
)
QWEN2_MOE = replace(
    family(
        "Qwen2-MoE",
        "qwen2_moe",
        TWO_NORMS,
        heads(bias=flag("qkv_bias", True)),
        gated(when=dense(has_experts)),
        routed(*NAMES, when=has_experts),
        gated("mlp.shared_expert", when=has_experts),
        rules(Role.REPLICATED, LAYER + "mlp.shared_expert_gate", shape="1 H", when=has_experts),
        attributes=(*GROUPS, *EXPERT),
    ),
    stacks=stacks(*NAMES),
)
QWEN3_MOE = replace(
    family(
        "Qwen3-MoE",
        "qwen3_moe",
        TWO_NORMS,
        BIASED_HEADS,
        HEAD_NORMS,
        gated(when=dense(has_experts)),
        routed(*NAMES, when=has_experts),
        attributes=(*GROUPS, *EXPERT),
    ),
    stacks=stacks(*NAMES),
)
DEEPSEEK_V3 = replace(
    family(
        "DeepSeek-V3, DeepSeek-R1",
        "deepseek_v3",
        TWO_NORMS,
        rules(Role.LATENT_QUERY, ATTENTION + ".q_proj", when=direct_query),
        rules(Role.LATENT_QUERY, ATTENTION + ".q_b_proj", when=dense(direct_query)),
        rules(Role.REPLICATED, ATTENTION + ".q_a_proj", shape="Q H", bias=ATTENTION_BIAS, when=dense(direct_query)),
        rules(Role.REPLICATED, ATTENTION + ".q_a_layernorm", shape="Q", when=dense(direct_query)),
        rules(Role.LATENT_DOWN, ATTENTION + ".kv_a_proj_with_mqa", bias=ATTENTION_BIAS),
        rules(Role.REPLICATED, ATTENTION + ".kv_a_layernorm", shape="R"),
        rules(Role.LATENT_KEY_VALUE, ATTENTION + ".kv_b_proj"),
        rules(Role.LATENT_OUT, ATTENTION + ".o_proj", bias=ATTENTION_BIAS),
        gated(when=dense(deep_enough)),
        routed(*NAMES, when=deep_enough),
        gated("mlp.shared_experts", when=deep_enough),
        attributes=(*local(ATTENTION, num_heads=Size.HEADS), *EXPERT),
    ),
    stacks=stacks(*NAMES),
    buffers=(LAYER + "mlp.gate.e_score_correction_bias",),
    float32=(LAYER + "mlp.gate.{weight,e_score_correction_bias}",),
)
DEEPSEEK_V2: Family = replace(DEEPSEEK_V3, name="DeepSeek-V2", model_types=("deepseek_v2",), buffers=())
