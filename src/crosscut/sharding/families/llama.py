"""Decoders in Llama's layout: q, k, v and o projections, gate, up and down, under ``model.layers``.

The tables of one family differ from the next in few places, so each is put together from the parts that it shares.
"""

from __future__ import annotations

from dataclasses import replace

from crosscut.sharding.family import Family, Local, Rule, Size, When, always, flag, local, never, rules
from crosscut.sharding.roles import Role

LAYER = "model.layers.*."
ATTENTION = LAYER + "self_attn"
GROUPS = local(ATTENTION, num_key_value_groups=Size.GROUPS)
ROTARY = ("**rotary_emb.inv_freq",)
ATTENTION_BIAS = flag("attention_bias")


def outside(*norms: str, bias: When = never, last: str = "norm", head_bias: When = never) -> tuple[Rule, ...]:
    """Embedding, head, the last norm, and the ``norms`` of a layer."""
    return (
        *rules(Role.EMBEDDING, "model.embed_tokens"),
        *rules(Role.LM_HEAD, "lm_head", bias=head_bias),
        *rules(Role.REPLICATED, f"model.{last}", *(LAYER + norm for norm in norms), bias=bias),
    )


def heads(out: str = "o_proj", bias: When = never, out_bias: When = never) -> tuple[Rule, ...]:
    """q, k, v and the output projection, each on its own."""
    return (
        *rules(Role.QUERY, ATTENTION + ".q_proj", bias=bias),
        *rules(Role.KEY_VALUE, ATTENTION + ".{k_proj,v_proj}", bias=bias),
        *rules(Role.ATTENTION_OUT, f"{ATTENTION}.{out}", bias=out_bias),
    )


def gated(path: str = "mlp", bias: When = never, when: When = always) -> tuple[Rule, ...]:
    """gate, up and down of an MLP."""
    return (
        *rules(Role.COLUMN, f"{LAYER}{path}.{{gate_proj,up_proj}}", bias=bias, when=when),
        *rules(Role.ROW, f"{LAYER}{path}.down_proj", bias=bias, when=when),
    )


def plain(up: str, down: str, bias: When) -> tuple[Rule, ...]:
    """The two layers of an MLP without a gate."""
    return (*rules(Role.COLUMN, f"{LAYER}mlp.{up}", bias=bias), *rules(Role.ROW, f"{LAYER}mlp.{down}", bias=bias))


def family(name: str, model_type: str, *parts: tuple[Rule, ...], attributes: tuple[Local, ...] = GROUPS) -> Family:
    """A family of this layout from the parts of its table."""
    table = tuple(rule for part in parts for rule in part)
    return Family(name, (model_type,), table, attributes, "model.", ignored=ROTARY, exact=True)


TWO_NORMS = outside("{input_layernorm,post_attention_layernorm}")
FOUR_NORMS = (
    *TWO_NORMS,
    *rules(Role.REPLICATED, LAYER + "{pre_feedforward_layernorm,post_feedforward_layernorm}"),
)
HEAD_NORMS = rules(Role.HEAD_NORM, ATTENTION + ".{q_norm,k_norm}")
BIASED_HEADS = heads(bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS)

LLAMA = family("Llama 2, Llama 3", "llama", TWO_NORMS, BIASED_HEADS, gated(bias=flag("mlp_bias")))
MISTRAL = family("Mistral", "mistral", TWO_NORMS, heads(), gated())
QWEN2 = family("Qwen2, Qwen2.5", "qwen2", TWO_NORMS, heads(bias=always), gated())
QWEN3 = family("Qwen3", "qwen3", TWO_NORMS, BIASED_HEADS, HEAD_NORMS, gated())
GEMMA = family("Gemma", "gemma", TWO_NORMS, BIASED_HEADS, gated())
GEMMA2 = family("Gemma 2", "gemma2", FOUR_NORMS, BIASED_HEADS, gated())
GEMMA3 = replace(
    family("Gemma 3 (text)", "gemma3_text", FOUR_NORMS, BIASED_HEADS, HEAD_NORMS, gated()),
    renames=((r"^language_model\.lm_head\.", "lm_head."), (r"^(language_model\.model|model\.language_model)\.", "model.")),
    ignored=(*ROTARY, "{vision_tower,multi_modal_projector}.**", "model.{vision_tower,multi_modal_projector}.**"),
)
OLMO2 = family(
    "OLMo 2",
    "olmo2",
    outside("{post_attention_layernorm,post_feedforward_layernorm}"),
    BIASED_HEADS,
    rules(Role.WIDE_QUERY_NORM, ATTENTION + ".q_norm"),
    rules(Role.WIDE_KEY_NORM, ATTENTION + ".k_norm"),
    gated(),
)
COHERE = family(
    "Cohere Command R",
    "cohere",
    outside("input_layernorm"),
    BIASED_HEADS,
    rules(Role.QUERY_NORM, ATTENTION + ".q_norm", when=flag("use_qk_norm")),
    rules(Role.KEY_NORM, ATTENTION + ".k_norm", when=flag("use_qk_norm")),
    gated(),
)
STARCODER2 = family(
    "StarCoder2",
    "starcoder2",
    outside("{input_layernorm,post_attention_layernorm}", bias=always),
    heads(bias=flag("use_bias", True), out_bias=flag("use_bias", True)),
    plain("c_fc", "c_proj", flag("use_bias", True)),
)
PHI2 = family(
    "Phi-1, Phi-1.5, Phi-2",
    "phi",
    outside("input_layernorm", bias=always, last="final_layernorm", head_bias=always),
    heads("dense", bias=always, out_bias=always),
    rules(Role.HEAD_NORM, ATTENTION + ".{q_layernorm,k_layernorm}", bias=always, when=flag("qk_layernorm")),
    plain("fc1", "fc2", always),
)
PHI3 = family(
    "Phi-3, Phi-4",
    "phi3",
    TWO_NORMS,
    rules(Role.QKV, ATTENTION + ".qkv_proj"),
    rules(Role.ATTENTION_OUT, ATTENTION + ".o_proj"),
    rules(Role.GATE_UP, LAYER + "mlp.gate_up_proj"),
    rules(Role.ROW, LAYER + "mlp.down_proj"),
    attributes=(*GROUPS, *local(ATTENTION, num_key_value_heads=Size.KV_HEADS, config__num_attention_heads=Size.HEADS)),
)
