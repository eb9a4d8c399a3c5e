"""Small random models of every family: transformers' own code and real structure, with head counts that do not divide.

Made from configs alone, nothing is downloaded. Two layers, a hidden size of 40 to 96, vocabularies that no tp divides.
Each name says the family and what is awkward; ``model(name)`` has the same weights at every call.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import GenerationConfig

_ONE_AT_A_TIME = threading.Lock()  # transformers sets torch's default dtype meanwhile, which rank threads share


@dataclass(frozen=True)
class Animal:
    """``model_type`` and the fields of its config."""

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)


def _llama(hidden: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 101, "hidden_size": hidden, "intermediate_size": 85, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False, **more,
    }  # fmt: skip


_MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
_GPT2 = {
    "vocab_size": 131, "n_embd": 48, "n_layer": 2, "n_positions": 64, "n_inner": 90, "bos_token_id": 1, "eos_token_id": None,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
_FALCON = {
    "vocab_size": 67, "num_hidden_layers": 2, "bias": False, "alibi": False, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip

ZOO: dict[str, Animal] = {
    "llama-6q3kv": Animal("llama", _llama(48, 6, 3)),
    "llama-9q3kv-tied": Animal("llama", _llama(72, 9, 3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama-10q2kv": Animal("llama", _llama(40, 10, 2, head_dim=8)),
    "mistral-mqa": Animal("mistral", _llama(40, 5, 1, head_dim=6, sliding_window=5)),
    "mixtral": Animal("mixtral", _llama(48, 6, 2, intermediate_size=88, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": Animal("qwen2", _llama(56, 7, 1, tie_word_embeddings=True)),
    "qwen2_moe": Animal("qwen2_moe", _llama(
        48, 6, 3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=21, shared_expert_intermediate_size=33,
        mlp_only_layers=[1], experts_implementation="eager",
    )),
    "qwen3": Animal("qwen3", _llama(48, 6, 2, head_dim=10)),
    "qwen3_moe": Animal("qwen3_moe", _llama(
        40, 10, 2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
    )),
    "gemma": Animal("gemma", _llama(48, 4, 1, head_dim=14, tie_word_embeddings=True)),
    "gemma2": Animal("gemma2", _llama(
        48, 6, 3, head_dim=10, query_pre_attn_scalar=9, sliding_window=5, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0, tie_word_embeddings=True, attn_implementation="eager",
    )),
    "gemma3": Animal("gemma3_text", _llama(
        40, 10, 2, head_dim=8, query_pre_attn_scalar=9, sliding_window=5, sliding_window_pattern=2, tie_word_embeddings=True,
    )),
    "phi3": Animal("phi3", _llama(48, 6, 3)),
    "phi3-10q2kv": Animal("phi3", _llama(40, 10, 2, head_dim=8)),
    "phi": Animal("phi", _llama(48, 6, 6, qk_layernorm=True, resid_pdrop=0.0, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    })),
    "gpt2": Animal("gpt2", {**_GPT2, "n_head": 6}),
    "gpt2-5heads": Animal("gpt2", {**_GPT2, "n_embd": 40, "n_head": 5, "n_inner": None, "tie_word_embeddings": False}),
    "gpt_neox": Animal("gpt_neox", _llama(
        48, 6, 6, attention_dropout=0.0, hidden_dropout=0.0, use_parallel_residual=True, rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        },
    )),
    "opt": Animal("opt", {
        "vocab_size": 101, "hidden_size": 48, "ffn_dim": 85, "num_hidden_layers": 2, "num_attention_heads": 6,
        "max_position_embeddings": 64, "word_embed_proj_dim": 30, "dropout": 0.0, "attention_dropout": 0.0,
        "bos_token_id": 2, "eos_token_id": None, "pad_token_id": 1,
    }),
    "falcon-7b": Animal("falcon", {
        **_FALCON, "hidden_size": 56, "num_attention_heads": 7, "multi_query": True, "parallel_attn": True,
        "new_decoder_architecture": False,
    }),
    "falcon-40b": Animal("falcon", {
        **_FALCON, "hidden_size": 48, "num_attention_heads": 6, "num_kv_heads": 3, "new_decoder_architecture": True,
        "parallel_attn": True,
    }),
    "falcon-40b-10q2kv": Animal("falcon", {
        **_FALCON, "hidden_size": 80, "num_attention_heads": 10, "num_kv_heads": 2, "new_decoder_architecture": True,
        "parallel_attn": True,
    }),
    "falcon-mha": Animal("falcon", {
        **_FALCON, "hidden_size": 48, "num_attention_heads": 6, "multi_query": False, "parallel_attn": False,
        "new_decoder_architecture": False, "bias": True, "tie_word_embeddings": False,
    }),
    "deepseek_v2": Animal("deepseek_v2", _llama(
        48, 6, 6, **_MLA, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=2,
        first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.5,
    )),
    "deepseek_v2-lite": Animal("deepseek_v2", _llama(
        40, 5, 5, **{**_MLA, "q_lora_rank": None}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=19,
        n_shared_experts=1, first_k_dense_replace=0, topk_method="greedy", n_group=1, topk_group=1,
        experts_implementation="eager",
    )),
    "deepseek_v3": Animal("deepseek_v3", _llama(
        48, 6, 6, **_MLA, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, attention_bias=True,
    )),
    "starcoder2": Animal("starcoder2", _llama(
        48, 6, 2, use_bias=True, sliding_window=5, tie_word_embeddings=True, residual_dropout=0.0, embedding_dropout=0.0,
    )),
    "olmo2": Animal("olmo2", _llama(48, 6, 3)),
    "olmo2-10q2kv": Animal("olmo2", _llama(80, 10, 2)),
    "cohere": Animal("cohere", _llama(48, 6, 3, use_qk_norm=True, logit_scale=0.2, tie_word_embeddings=True)),
    "cohere-10q2kv": Animal("cohere", _llama(80, 10, 2, use_qk_norm=True, tie_word_embeddings=True)),
}  # fmt: skip
"""By name; what follows the family's name is what is awkward about it."""

STRANGERS: dict[str, Animal] = {
    "granite": Animal("granite", _llama(48, 6, 3, attention_multiplier=0.3, residual_multiplier=0.8, logits_scaling=2.0)),
    "stablelm": Animal("stablelm", _llama(
        48, 6, 3, use_qkv_bias=True, attention_dropout=0.0, hidden_dropout=0.0, rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        },
    )),
    "gptj": Animal("gptj", {**_GPT2, "n_head": 6, "rotary_dim": 4}),
    "apertus": Animal("apertus", _llama(48, 6, 3)),  # an activation with parameters between the wide layers
    "olmo-10q2kv": Animal("olmo", _llama(40, 10, 2, clip_qkv=0.5)),
}  # fmt: skip
"""Models without a table, which a guessed one splits."""


def config(name: str) -> Any:
    """The transformers config of ``name``."""
    animal = ZOO.get(name) or STRANGERS[name]
    return AutoConfig.for_model(animal.model_type, **animal.sizes)


def hollow(name: str) -> Any:
    """A model of ``name`` without weights; call it under ``torch.device("meta")``."""
    return AutoModelForCausalLM.from_config(config(name), dtype=torch.float32)


def model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A random model of ``name`` in eval mode, equal at every call. ``options``: such as ``attn_implementation``.

    Every parameter is drawn, biases and norms too: what starts at 0 or 1 would hide a wrong cut.
    """
    with _ONE_AT_A_TIME:
        built = AutoModelForCausalLM.from_config(config(name), dtype=dtype, **options).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            spread = 0.6 / max(parameter.shape[-1], 1) ** 0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_((noise * spread) if parameter.dim() > 1 else parameter.double() + noise * spread)
    built.generation_config = GenerationConfig(pad_token_id=0)
    return built


def load(directory: Any) -> Any:
    """The model that was saved in ``directory``, in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)


def prompt(name: str, batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    """Token ids ``[B, S]`` from all of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    vocab = config(name).get_text_config().vocab_size
    return torch.randint(vocab, (batch, length), generator=generator)
