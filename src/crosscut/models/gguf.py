"""Turn a GGUF file of a Llama model into a Hugging Face directory, weights and tokenizer both.

Small trained models reach people as GGUF, while everything in crosscut reads Hugging Face directories. Transformers can
read GGUF but refuses to save what it read. Conversion is exact: a weight is what the file's quantisation decodes to.
Only what is known to come out right is converted; another architecture, tensor or pre-tokenizer is refused by name.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md) for keys and tensor names; the safetensors
README (github.com/huggingface/safetensors) for the layout of the file that is written.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from crosscut.errors import UsageError, choose
from crosscut.models import import_extra
from crosscut.models.stream import refuse_fixed, write_stream

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ARCHITECTURES = ("llama",)
PRE_TOKENIZERS = ("smollm",)

OnProgress = Callable[[int, int, str], None]
T = TypeVar("T")

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type: the two kinds that are matched whole, before the merges


@dataclass(frozen=True)
class _Weight:
    """One parameter: its name in either world, its shape [out, in], and the heads whose rows GGUF has permuted."""

    gguf_name: str
    name: str
    shape: tuple[int, ...]
    permuted_heads: int = 0


def convert(gguf_path: Path, out_dir: Path, dtype: str = "float32", on_progress: OnProgress | None = None) -> Path:
    """Write the Llama model of ``gguf_path`` to ``out_dir`` in Hugging Face form, and return ``out_dir``.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json. They appear
    all at once, when everything is written. Memory: about twice the largest tensor in float32.
    ``dtype`` is one of :data:`DTYPES`; ``on_progress(done, total, name)`` is called after each tensor.

    Raises UsageError: ``bad-dtype``; ``file-missing``; ``file-unreadable`` (not GGUF, truncated, or not a model that
    can be converted exactly); ``bad-option`` (``out_dir`` is in use or cannot be written); ``extra-missing``.
    """
    stored = DTYPES[choose("dtype", dtype, DTYPES, code="bad-dtype")]
    metadata, tensors = _read(gguf_path)
    config = _config(metadata, tied="output.weight" not in tensors) | {"torch_dtype": dtype}
    weights = _weights(config)
    _check_tensors(weights, tensors)
    tokenizer, tokenizer_config = _tokenizer(metadata)
    special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with _appearing_whole(out_dir) as folder:
        _write_safetensors(folder / "model.safetensors", weights, tensors, stored, on_progress)
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config)
        _write_json(folder / "generation_config.json", special_ids)
        _write_json(folder / "config.json", config)
    return out_dir


@dataclass(frozen=True)
class GGUF:
    """An opened GGUF file as a Hugging Face model: its config.json and, one at a time, its parameters."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    """A parameter in float32 by its Hugging Face name."""


def open_gguf(path: Path) -> GGUF:
    """Open ``path`` without its tokenizer. Raises UsageError as :func:`convert` does for what is in the file."""
    metadata, tensors = _read(path)
    config = _config(metadata, tied="output.weight" not in tensors)
    weights = {weight.name: weight for weight in _weights(config)}
    _check_tensors(list(weights.values()), tensors)
    shapes = {name: weight.shape for name, weight in weights.items()}
    return GGUF(config, shapes, lambda name: _load(weights[name], tensors[weights[name].gguf_name]))


# ---- reading


def _unreadable(why: str, fix: str = "check the file, and download it again if it came over a network") -> UsageError:
    return UsageError(why, code="file-unreadable", fix=fix)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata (key -> value) and the tensors (name -> gguf ReaderTensor, memory-mapped) of a GGUF file."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}", code="file-missing", fix="check the path")
    library = import_extra("gguf")
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise _unreadable(f"{str(path)!r} is not a GGUF file", "give a file whose name ends in .gguf")
        reader = library.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except UsageError:
        raise
    except (ValueError, LookupError, ArithmeticError, TypeError, OSError, MemoryError) as error:
        raise _unreadable(f"{str(path)!r} is truncated or damaged: {error}") from None
    if reader.byte_order != "I":
        raise _unreadable(f"{str(path)!r} was written for the other byte order", "get a file for this kind of machine")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _need(metadata: dict[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    value = metadata.get(key, default)
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is {str(value)[:40]!r}"
        raise _unreadable(f"the GGUF key {key!r} {found}; a {kind.__name__} is needed")
    return value


def _count(metadata: dict[str, Any], key: str, default: int | None = None) -> int:
    value = _need(metadata, key, int, default)
    if value < 1:
        raise _unreadable(f"the GGUF key {key!r} is {value}; it must be at least 1")
    return value


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    values = _need(metadata, key, list)
    if not all(isinstance(value, str) for value in values):
        raise _unreadable(f"the GGUF key {key!r} holds something other than text")
    return values


def _token_id(metadata: dict[str, Any], name: str, vocab: int) -> int | None:
    """The id of the special token ``name`` (bos, eos, unknown, padding); None when the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    value = _need(metadata, key, int)
    if not 0 <= value < vocab:
        raise _unreadable(f"the GGUF key {key!r} is {value}; the vocabulary has {vocab} tokens")
    return value


def _refuse_unless(what: str, given: object, allowed: tuple[object, ...]) -> None:
    if given not in allowed:
        names = ", ".join(map(repr, allowed))
        raise _unreadable(f"{what} is {given!r}; crosscut converts: {names}", "give a GGUF file of such a model")


def _decimal(value: float) -> float:
    """The shortest decimal that float32 rounds to ``value``: GGUF keeps 1e-05 as 9.999999747378752e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


# ---- config.json


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of LlamaForCausalLM, without the dtype. ``tied``: the embedding is the output layer, too."""
    _refuse_unless("the architecture", _need(metadata, "general.architecture", str), ARCHITECTURES)
    hidden, heads = _count(metadata, "llama.embedding_length"), _count(metadata, "llama.attention.head_count")
    head_dim = _count(metadata, "llama.attention.key_length", hidden // heads)
    kv_heads = _count(metadata, "llama.attention.head_count_kv", heads)
    vocab = len(_strings(metadata, "tokenizer.ggml.tokens"))
    _refuse_unless("the rotary width", metadata.get("llama.rope.dimension_count", head_dim), (head_dim,))
    _refuse_unless("the head size of values", metadata.get("llama.attention.value_length", head_dim), (head_dim,))
    _refuse_unless("the rope scaling", metadata.get("llama.rope.scaling.type", "none"), ("none",))
    if heads % kv_heads or head_dim % 2:
        raise _unreadable(f"{heads} query heads cannot share {kv_heads} key/value heads of size {head_dim}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": _count(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _count(metadata, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _count(metadata, "llama.context_length"),
        "rms_norm_eps": _decimal(_need(metadata, "llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(_need(metadata, "llama.rope.freq_base", float, 10000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": _token_id(metadata, "bos", vocab),
        "eos_token_id": _token_id(metadata, "eos", vocab),
        "pad_token_id": _token_id(metadata, "padding", vocab),
    }


# ---- model.safetensors


def _weights(config: dict[str, Any]) -> list[_Weight]:
    """Every parameter that a Llama of this config has, in the order in which it is written."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, kv = heads * head_dim, kv_heads * head_dim
    weights = [_Weight("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(config["num_hidden_layers"]):
        old, new = f"blk.{layer}", f"model.layers.{layer}"
        weights += [
            _Weight(f"{old}.attn_norm.weight", f"{new}.input_layernorm.weight", (hidden,)),
            _Weight(f"{old}.attn_q.weight", f"{new}.self_attn.q_proj.weight", (q, hidden), heads),
            _Weight(f"{old}.attn_k.weight", f"{new}.self_attn.k_proj.weight", (kv, hidden), kv_heads),
            _Weight(f"{old}.attn_v.weight", f"{new}.self_attn.v_proj.weight", (kv, hidden)),
            _Weight(f"{old}.attn_output.weight", f"{new}.self_attn.o_proj.weight", (hidden, q)),
            _Weight(f"{old}.ffn_norm.weight", f"{new}.post_attention_layernorm.weight", (hidden,)),
            _Weight(f"{old}.ffn_gate.weight", f"{new}.mlp.gate_proj.weight", (ffn, hidden)),
            _Weight(f"{old}.ffn_up.weight", f"{new}.mlp.up_proj.weight", (ffn, hidden)),
            _Weight(f"{old}.ffn_down.weight", f"{new}.mlp.down_proj.weight", (hidden, ffn)),
        ]
    weights.append(_Weight("output_norm.weight", "model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        weights.append(_Weight("output.weight", "lm_head.weight", (vocab, hidden)))
    return weights


def _check_tensors(weights: list[_Weight], tensors: dict[str, Any]) -> None:
    """Refuse a file that lacks a tensor, has one that a plain Llama does not have, or has one of another shape."""
    expected = {weight.gguf_name: weight.shape for weight in weights}
    for name in tensors:
        if name not in expected:
            raise _unreadable(f"the tensor {name!r} is not part of a plain Llama", "give a GGUF file of a plain Llama")
    for name, shape in expected.items():
        if name not in tensors:
            raise _unreadable(f"the tensor {name!r} is missing")
        found = tuple(reversed(tensors[name].shape.tolist()))  # GGUF puts the fastest dim first
        if found != shape:
            raise _unreadable(f"the tensor {name!r} has the shape {list(found)}; its config asks for {list(shape)}")


def _load(weight: _Weight, tensor: Any) -> torch.Tensor:
    """The parameter in float32, its rows in Hugging Face order.

    GGUF interleaves the halves of each query and key head (row 2i is Hugging Face's i, row 2i + 1 its D/2 + i), because
    llama.cpp rotates neighbours where Hugging Face rotates halves. See ``permute`` in llama.cpp's conversion script.
    """
    try:
        array = import_extra("gguf").dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise _unreadable(f"the tensor {weight.gguf_name!r} has the unknown type {tensor.tensor_type.name}") from None
    values = torch.from_numpy(array.astype("float32"))
    if weight.permuted_heads:
        values = values.unflatten(0, (weight.permuted_heads, -1, 2)).transpose(1, 2)
    return values.reshape(weight.shape)


def _write_safetensors(
    path: Path, weights: list[_Weight], tensors: dict[str, Any], stored: torch.dtype, on_progress: OnProgress | None
) -> None:
    """Write the parameters one at a time, so that a model larger than memory can be converted."""

    def loaded() -> Iterator[torch.Tensor]:
        for done, weight in enumerate(weights, start=1):
            yield _load(weight, tensors[weight.gguf_name]).to(stored)
            if on_progress is not None:
                on_progress(done, len(weights), weight.name)

    write_stream(path, [(weight.name, stored, weight.shape) for weight in weights], loaded())


# ---- tokenizer.json and tokenizer_config.json


def _tokenizer(metadata: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The ``tokenizers.Tokenizer`` and the tokenizer_config.json of a byte-level BPE."""
    _refuse_unless("the tokenizer", _need(metadata, "tokenizer.ggml.model", str), ("gpt2",))
    _refuse_unless("the pre-tokenizer", metadata.get("tokenizer.ggml.pre"), PRE_TOKENIZERS)
    _refuse_unless("add_bos_token", metadata.get("tokenizer.ggml.add_bos_token", False), (False,))
    _refuse_unless("add_eos_token", metadata.get("tokenizer.ggml.add_eos_token", False), (False,))
    tokens, kinds = _strings(metadata, "tokenizer.ggml.tokens"), _need(metadata, "tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise _unreadable(f"it names {len(tokens)} tokens and the kinds of {len(kinds)}")
    tokenizer = _byte_level_bpe(tokens, _strings(metadata, "tokenizer.ggml.merges"))
    added_token = import_extra("tokenizers").AddedToken
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([added_token(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([added_token(token, special=False, normalized=False)])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _count(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for key, gguf_key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(metadata, gguf_key, len(tokens))
        if token_id is not None:
            config[f"{key}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = _need(metadata, "tokenizer.chat_template", str)
    return tokenizer, config


def _byte_level_bpe(tokens: list[str], merges: list[str]) -> Any:
    """A byte-level BPE with SmolLM's pre-tokenizer: single digits, then the words of GPT-2 without a space in front."""
    library = import_extra("tokenizers")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(vocab) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise _unreadable("its vocabulary names a token twice, or a merge is not of two tokens")
    try:
        tokenizer = library.Tokenizer(library.models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # tokenizers raises nothing more particular
        raise _unreadable(f"its merges do not fit its vocabulary: {error}") from None
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Digits(individual_digits=True),
            library.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


# ---- writing


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _appearing_whole(out_dir: Path) -> Iterator[Path]:
    """A new folder that becomes ``out_dir`` when the block ends well, and vanishes when it does not."""
    target = out_dir.resolve()
    refuse_fixed(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{str(out_dir)!r} exists and is not an empty folder", code="bad-option", fix="name a new folder")
    if not target.parent.is_dir():
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", code="file-missing", fix="create it first")
    part: str | None = None
    try:
        part = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        yield Path(part)
        os.chmod(part, 0o755)
        os.rename(part, target)
    except OSError as error:
        raise UsageError(
            f"{str(out_dir)!r} cannot be written: {error.strerror or error}",
            code="bad-option",
            fix="name a folder on a disk that has room and that you may write to",
        ) from None
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
