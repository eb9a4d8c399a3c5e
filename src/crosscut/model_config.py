"""A frozen view of a Hugging Face config.json: one name for each size, whatever the family calls it. No torch.

Old and new spellings are read (``n_embd``, ``torch_dtype``, ``rope_scaling``; transformers 5's ``dtype``,
``rope_parameters``), and a multimodal config's ``text_config`` stands for the whole. What a family leaves out of its file
because it is the class's default is filled in from ``DEFAULTS``, which a test compares with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.errors import UsageError

CONFIG = "config.json"

NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_size"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
    "expert_ffn": ("moe_intermediate_size", "expert_intermediate_size"),
}
"""What each size is called in a config.json, the commonest spelling first."""

_OUTER = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""What a multimodal config says for its text part too."""
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": False}
_MLA: dict[str, Any] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008},
    "olmo2": {"intermediate_size": 11008},
    "phi": {"intermediate_size": 8192},
    "phi3": {"intermediate_size": 8192},
    "gpt2": _TIED,
    "gpt_neox": {"intermediate_size": 24576},
    "opt": {**_TIED, "ffn_dim": 3072},
    "mistral": {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    "gemma": {**_TIED, "intermediate_size": 24576, "head_dim": 256, "num_key_value_heads": 16},
    "gemma2": {**_TIED, "intermediate_size": 9216, "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    "gemma3_text": {
        **_TIED, "intermediate_size": 9216, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "falcon": {**_TIED, "multi_query": True, "new_decoder_architecture": False, "max_position_embeddings": 2048},
    "starcoder2": {**_TIED, "intermediate_size": 12288, "num_key_value_heads": 2},
    "cohere": {**_TIED, "intermediate_size": 22528, "use_qk_norm": False},
    "mixtral": {"intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {**_NO_WINDOW, "intermediate_size": 22016, "num_key_value_heads": 32},
    "qwen2_moe": {
        **_NO_WINDOW, "intermediate_size": 5632, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
    },
    "qwen3": {**_NO_WINDOW, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        **_NO_WINDOW, "intermediate_size": 6144, "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    },
    "deepseek_v2": {
        **_MLA, "intermediate_size": 11008, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        **_MLA, "intermediate_size": 18432,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
}  # fmt: skip
"""By model_type, what transformers assumes where a config.json is silent and a plan needs it."""


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks of the latents and dims of a head."""

    q_rank: int | None
    """Rank of the query latent; None where queries are projected in one step."""
    kv_rank: int
    nope_dim: int
    """Dims of a query or key head without positions."""
    rope_dim: int
    """Dims of a query head with rotary positions, and of the one key that all heads share."""
    v_dim: int

    @property
    def qk_dim(self) -> int:
        """Dims of a whole query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder language model. Made by :meth:`from_dict` or :meth:`from_dir`.

    ``experts`` is 0 in a dense model, and ``expert_ffn`` and ``shared_ffn`` are 0 where there is none. ``head_dim`` is
    what the file says, else hidden / heads, and with ``latent`` the size of a query head.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int | None
    tied: bool
    dtype: str | None
    """As the file names it (``'bfloat16'``), None when it does not."""
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent: Latent | None = None
    window: int | None = None
    """How many tokens a layer with sliding-window attention looks back."""
    layer_types: tuple[str, ...] = ()
    """By layer ``'full_attention'`` or ``'sliding_attention'``; empty when every layer looks at everything."""
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The (text part of the) file, with defaults filled in."""

    @classmethod
    def from_dir(cls, directory: str | Path) -> ModelConfig:
        """Read ``directory``/config.json.

        Raises UsageError: ``file-missing``, ``file-unreadable`` (not JSON), and as :meth:`from_dict`.
        """
        path = Path(directory) / CONFIG
        if not path.is_file():
            raise UsageError(f"there is no file {str(path)!r}", code="file-missing", fix="give a local Hugging Face directory")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{str(path)!r} is not JSON: {error}", code="file-unreadable", fix="download the file again"
            ) from None
        return cls.from_dict(found, str(path))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "config") -> ModelConfig:
        """Read a config's mapping; ``where`` names it in errors.

        Raises UsageError (``bad-config``) when a field is missing, is not a size, or contradicts another.
        """
        return _Reader(config, where).read()


def _said(key: str, config: Mapping[str, Any]) -> bool:
    """Whether ``config`` has ``key``, or the same size by another name."""
    return any(name in config for names in ((key,), *NAMES.values()) if key in names for name in names)


class _Reader:
    """Reads one config and complains about it by name."""

    def __init__(self, config: Any, where: str) -> None:
        self.where = where
        if not isinstance(config, Mapping):
            raise self.bad("is not a mapping of names to values")
        text = config.get("text_config")
        if isinstance(text, Mapping):
            outer = {key: config[key] for key in _OUTER if key in config}
            config = {**outer, **text}
        if not isinstance(config.get("model_type"), str):
            raise self.bad("has no model_type")
        self.model_type: str = config["model_type"]
        silent = {key: value for key, value in DEFAULTS.get(self.model_type, {}).items() if not _said(key, config)}
        self.raw = {key: value for key, value in {**silent, **config}.items() if value is not None}

    def bad(self, what: str) -> UsageError:
        return UsageError(f"{self.where!r} {what}", code="bad-config", fix="take config.json from where the weights are from")

    def size(self, what: str, default: int | None = None, least: int = 1) -> int:
        """The size ``what`` under any of its names; two names that disagree are a contradiction."""
        found = {name: self.raw[name] for name in NAMES.get(what, (what,)) if name in self.raw}
        if not found:
            if default is None:
                raise self.bad(f"({self.model_type}) lacks {' or '.join(NAMES.get(what, (what,))[:3])}")
            return default
        for name, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self.bad(f"has {name}={value!r}, which must be a whole number of at least {least}")
        if len(set(found.values())) > 1 and what != "max_positions":  # trained and extended lengths may both be named
            raise self.bad("contradicts itself: " + ", ".join(f"{name}={value}" for name, value in found.items()))
        return int(next(iter(found.values())))

    def read(self) -> ModelConfig:
        hidden, heads, latent = self.size("hidden"), self.size("heads"), self._latent()
        kv_heads = heads if latent else self._kv_heads(heads)
        if heads % kv_heads:
            raise self.bad(f"has {heads} query heads and {kv_heads} KV heads, which do not divide them")
        experts, layers = self.size("experts", 0, 0), self.size("layers")
        ffn = self.size("ffn", 4 * hidden)
        expert_ffn = self.size("expert_ffn", ffn) if experts else 0
        return ModelConfig(
            model_type=self.model_type,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=latent.qk_dim if latent else self._head_dim(hidden, heads),
            ffn=ffn,
            vocab=self.size("vocab"),
            max_positions=self.size("max_positions", 0, 0) or None,
            tied=bool(self.raw.get("tie_word_embeddings", False)),
            dtype=self._dtype(),
            experts=experts,
            experts_per_token=self.size("experts_per_token", 0, 0) if experts else 0,
            expert_ffn=expert_ffn,
            shared_ffn=self._shared_ffn(expert_ffn) if experts else 0,
            latent=latent,
            window=self._window(),
            layer_types=self._layer_types(layers),
            raw=self.raw,
        )

    def _kv_heads(self, heads: int) -> int:
        if self.model_type == "falcon" and not self.raw.get("new_decoder_architecture"):
            return 1 if self.raw.get("multi_query") else heads  # whatever num_kv_heads says, as FalconAttention does
        if self.raw.get("multi_query") is True and self.model_type != "falcon":
            return 1
        return self.size("kv_heads", heads)

    def _head_dim(self, hidden: int, heads: int) -> int:
        if any(name in self.raw for name in NAMES["head_dim"]):
            return self.size("head_dim")
        if hidden % heads:
            raise self.bad(f"has no head_dim, and its {heads} heads do not divide the hidden size {hidden}")
        return hidden // heads

    def _latent(self) -> Latent | None:
        if "kv_lora_rank" not in self.raw and "kv_lora_rank" not in DEFAULTS.get(self.model_type, ()):
            return None
        dims = (self.size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return Latent(self.size("q_lora_rank", 0, 0) or None, self.size("kv_lora_rank"), *dims)

    def _shared_ffn(self, expert_ffn: int) -> int:
        if "n_shared_experts" in self.raw:
            return self.size("n_shared_experts", 0, 0) * expert_ffn
        return self.size("shared_expert_intermediate_size", 0, 0)

    def _dtype(self) -> str | None:
        dtype = self.raw.get("dtype", self.raw.get("torch_dtype"))
        return dtype.removeprefix("torch.") if isinstance(dtype, str) else None

    def _window(self) -> int | None:
        if self.raw.get("use_sliding_window") is False:
            return None
        return self.size("sliding_window", 0, 0) or None

    def _layer_types(self, layers: int) -> tuple[str, ...]:
        """By layer, from the list, or from the pattern's length (every n-th layer of Gemma looks at everything)."""
        given = self.raw.get("layer_types")
        if isinstance(given, Sequence) and not isinstance(given, str):
            if len(given) != layers:
                raise self.bad(f"has {layers} layers and {len(given)} layer_types")
            return tuple(map(str, given)) if any(kind != "full_attention" for kind in given) else ()
        if self._window() is None:
            return ()
        first = self.raw.get("max_window_layers", 0)  # Qwen: from this layer on
        pattern = self.raw.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(self.model_type, layers + 1)
        slides = [i >= first and (i + 1) % pattern != 0 for i in range(layers)]
        return tuple("sliding_attention" if slide else "full_attention" for slide in slides)
