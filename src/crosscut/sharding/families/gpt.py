"""Decoders of the GPT-2 line and their like: two linear layers in the MLP, q, k and v often stored as one."""

from __future__ import annotations

from crosscut.model_config import ModelConfig
from crosscut.sharding.family import Family, Size, always, flag, local, rules
from crosscut.sharding.roles import Role


def _refuse_alibi(config: ModelConfig) -> str | None:
    return "attention with ALiBi, whose slopes are not cut" if config.raw.get("alibi") else None


def _refuse_cross_attention(config: ModelConfig) -> str | None:
    return "cross attention" if config.raw.get("add_cross_attention") else None


def _refuse_plain_norms(config: ModelConfig) -> str | None:
    return None if config.raw.get("layer_norm_elementwise_affine", True) else "norms without weights"


LINEAR = flag("bias")  # Falcon


def _narrow(config: ModelConfig, layer: int) -> bool:
    """OPT-350m: embeddings narrower than the layers."""
    return config.raw.get("word_embed_proj_dim", config.hidden) != config.hidden


def _last_norm(config: ModelConfig, layer: int) -> bool:
    return bool(config.raw.get("do_layer_norm_before", True)) and not config.raw.get("_remove_final_layer_norm", False)


def _two_norms(config: ModelConfig, layer: int) -> bool:
    """Falcon-40b: attention and MLP run side by side, each behind a norm of its own."""
    count = config.raw.get("num_ln_in_parallel_attn", 2 if config.raw.get("new_decoder_architecture") else 1)
    return bool(config.raw.get("parallel_attn", True)) and count == 2


def _one_norm(config: ModelConfig, layer: int) -> bool:
    return not _two_norms(config, layer)


def _in_turn(config: ModelConfig, layer: int) -> bool:
    return not config.raw.get("parallel_attn", True)


GPT2 = Family(
    "GPT-2",
    ("gpt2",),
    (
        *rules(Role.EMBEDDING, "transformer.wte"),
        *rules(Role.LM_HEAD, "lm_head"),
        *rules(Role.REPLICATED, "transformer.wpe", shape="P H"),
        *rules(Role.QKV, "transformer.h.*.attn.c_attn", transposed=True, bias=always),
        *rules(Role.ATTENTION_OUT, "transformer.h.*.attn.c_proj", transposed=True, bias=always),
        *rules(Role.COLUMN, "transformer.h.*.mlp.c_fc", transposed=True, bias=always),
        *rules(Role.ROW, "transformer.h.*.mlp.c_proj", transposed=True, bias=always),
        *rules(Role.REPLICATED, "transformer.ln_f", "transformer.h.*.{ln_1,ln_2}", bias=always),
    ),
    local("transformer.h.*.attn", num_heads=Size.HEADS, split_size=Size.WIDTH),
    "transformer.",
    ignored=("**.attn.{bias,masked_bias}",),
    refuse=_refuse_cross_attention,
    exact=True,
)
GPT_NEOX = Family(
    "GPT-NeoX, Pythia",
    ("gpt_neox",),
    (
        *rules(Role.EMBEDDING, "gpt_neox.embed_in"),
        *rules(Role.LM_HEAD, "lm_head"),
        *rules(Role.GROUPED_QKV, "gpt_neox.layers.*.attention.query_key_value", bias=flag("attention_bias", True)),
        *rules(Role.ATTENTION_OUT, "gpt_neox.layers.*.attention.dense", bias=flag("attention_bias", True)),
        *rules(Role.COLUMN, "gpt_neox.layers.*.mlp.dense_h_to_4h", bias=always),
        *rules(Role.ROW, "gpt_neox.layers.*.mlp.dense_4h_to_h", bias=always),
        *rules(Role.REPLICATED, "gpt_neox.final_layer_norm", bias=always),
        *rules(Role.REPLICATED, "gpt_neox.layers.*.{input_layernorm,post_attention_layernorm}", bias=always),
    ),
    prefix="gpt_neox.",
    renames=((r"^embed_out\.", "lm_head."),),
    ignored=("**.attention.{bias,masked_bias}", "**rotary_emb.inv_freq"),
    exact=True,
)
_OPT = "model.decoder.layers.*."
OPT = Family(
    "OPT",
    ("opt",),
    (
        *rules(Role.EMBEDDING, "model.decoder.embed_tokens", shape="V W"),
        *rules(Role.LM_HEAD, "lm_head", shape="V W"),
        *rules(Role.REPLICATED, "model.decoder.embed_positions", shape="P+2 H"),
        *rules(Role.REPLICATED, "model.decoder.project_in", shape="H W", when=_narrow),
        *rules(Role.REPLICATED, "model.decoder.project_out", shape="W H", when=_narrow),
        *rules(Role.REPLICATED, "model.decoder.final_layer_norm", bias=always, when=_last_norm),
        *rules(Role.QUERY, _OPT + "self_attn.q_proj", bias=flag("enable_bias", True)),
        *rules(Role.KEY_VALUE, _OPT + "self_attn.{k_proj,v_proj}", bias=flag("enable_bias", True)),
        *rules(Role.ATTENTION_OUT, _OPT + "self_attn.out_proj", bias=flag("enable_bias", True)),
        *rules(Role.COLUMN, _OPT + "fc1", bias=flag("enable_bias", True)),
        *rules(Role.ROW, _OPT + "fc2", bias=flag("enable_bias", True)),
        *rules(Role.REPLICATED, _OPT + "{self_attn_layer_norm,final_layer_norm}", bias=always),
    ),
    local(_OPT + "self_attn", num_heads=Size.HEADS),
    "model.",
    refuse=_refuse_plain_norms,
    exact=True,
)
_FALCON = "transformer.h.*."
FALCON = Family(
    "Falcon 7b, Falcon 40b",
    ("falcon",),
    (
        *rules(Role.EMBEDDING, "transformer.word_embeddings"),
        *rules(Role.LM_HEAD, "lm_head"),
        *rules(Role.REPLICATED, "transformer.ln_f", bias=always),
        *rules(Role.GROUPED_QKV, _FALCON + "self_attention.query_key_value", bias=LINEAR),
        *rules(Role.ATTENTION_OUT, _FALCON + "self_attention.dense", bias=LINEAR),
        *rules(Role.COLUMN, _FALCON + "mlp.dense_h_to_4h", bias=LINEAR),
        *rules(Role.ROW, _FALCON + "mlp.dense_4h_to_h", bias=LINEAR),
        *rules(Role.REPLICATED, _FALCON + "{ln_attn,ln_mlp}", bias=always, when=_two_norms),
        *rules(Role.REPLICATED, _FALCON + "input_layernorm", bias=always, when=_one_norm),
        *rules(Role.REPLICATED, _FALCON + "post_attention_layernorm", bias=always, when=_in_turn),
    ),
    local(_FALCON + "self_attention", num_heads=Size.HEADS, num_kv_heads=Size.KV_HEADS),
    "transformer.",
    ignored=("**.inv_freq",),
    refuse=_refuse_alibi,
    exact=True,
    cached_by_query=flag("new_decoder_architecture"),
)
