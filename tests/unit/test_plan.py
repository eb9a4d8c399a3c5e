"""crosscut plan: figures equal to published ones and to a count by hand, every bad checkpoint refused in one message."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from crosscut.cli.main import main
from crosscut.errors import UsageError
from crosscut.hardware import GPUS, named_gpu
from crosscut.model_config import ModelConfig
from crosscut.sharding import Family
from crosscut.sharding import describe as describe_module
from crosscut.sharding.describe import ROPE_TYPES, Model, describe
from crosscut.sharding.family import Registry
from crosscut.sharding.plan import Split, even_sizes, notes, refused, remedy, require, split

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
QWEN = {
    **LLAMA, "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
    "intermediate_size": 18432, "torch_dtype": "bfloat16", "max_position_embeddings": 163840,
}  # fmt: skip


Cli = Callable[..., tuple[int, str, str]]


def model(config: dict[str, Any], directory: Path, dtype: str | None = None) -> Model:
    """The model of a config alone."""
    (directory / "config.json").write_text(json.dumps(config))
    return describe(directory, dtype)


def checkpoint(directory: Path, config: dict[str, Any] = SMALL, **changed: Any) -> dict[str, torch.Tensor]:
    """A whole checkpoint of zeros for ``config`` (SMALL's tensors unless changed: a tensor, or None to leave one out)."""
    found = model(config, directory)
    tensors = {tensor.place.name: torch.zeros(tensor.shape) for tensor in found.tensors}
    tensors |= changed
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA, 8_030_261_248),
        (QWEN, 7_615_616_512),
        (
            {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
            124_439_808,
        ),
        ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8}, 46_702_792_704),
        (DEEPSEEK, 671_026_404_352),
    ],
)
def test_parameter_counts_are_the_published_ones(config: dict[str, Any], count: int, tmp_path: Path) -> None:
    """Llama-3-8B, Qwen2-7B, GPT-2, Mixtral-8x7B and DeepSeek-V3 (main model, without buffers) as the hub counts them."""
    assert split(model(config, tmp_path, "float32"), 1).total == 4 * count


def test_llama_3_8b_on_two_ranks_by_hand(tmp_path: Path) -> None:
    two = split(model(LLAMA, tmp_path), 2)
    norms = (2 * 32 + 1) * 4096
    assert two.weights == ((8_030_261_248 - norms) // 2 * 2 + 2 * norms,) * 2
    assert two.copied == 2 * norms
    assert two.kv_token == 32 * 2 * 4 * 128 * 2
    assert (two.kv_heads, two.query_heads, two.kv_copies, two.even) == ((4, 4), (16, 16), 1, True)
    free = (80 << 30) - two.weights[0]
    assert two.context(80 << 30) == free // two.kv_token
    assert two.sequences(80 << 30, 8192) == free // (two.kv_token * 8192)
    assert two.context(two.weights[0] - 1) == two.sequences(0, 8192) == 0


def test_more_ranks_than_kv_heads(tmp_path: Path) -> None:
    found = model(LLAMA, tmp_path)
    sixteen = split(found, 16)
    assert sixteen.kv_copies == 2
    assert sixteen.kv_token == split(found, 8).kv_token
    assert any("a KV head is on up to 2 ranks (8 KV heads)" in note for note in notes(found, [sixteen]))
    assert not any("KV head" in note for note in notes(found, [split(found, 8)]))


def test_uneven_heads_and_sizes(tmp_path: Path) -> None:
    smol = {**LLAMA, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    found = model(smol, tmp_path)
    four = split(found, 4)
    assert (four.query_heads, four.kv_heads) == ((3, 2, 2, 2), (1, 1, 2, 1))
    assert not four.even
    assert split(found, 2).kv_token == 2 * split(found, 2).full_token[1]
    seven = split(model(QWEN, tmp_path), 7)  # 4 query heads a rank, 7 for each KV head: rank 1 uses KV heads 0, 0, 0, 1
    assert (seven.even, seven.kv_heads) == (True, (1, 4, 1, 2, 1, 4, 1))
    assert any("tp 7 does not divide vocabulary 152064, ffn 18944" in note for note in notes(model(QWEN, tmp_path), [seven]))


def test_latent_attention_has_one_cache_for_all_heads(tmp_path: Path) -> None:
    found = model(DEEPSEEK, tmp_path)
    assert [split(found, tp).kv_token for tp in (1, 8)] == [61 * (512 + 64) * 2] * 2
    assert "latent attention: every rank holds the whole KV cache" in notes(found, [])


def test_sliding_windows_stop_the_cache_from_growing(tmp_path: Path) -> None:
    gemma = {**SMALL, "model_type": "gemma2", "num_hidden_layers": 4, "head_dim": 4, "sliding_window": 16}
    one = split(model(gemma, tmp_path), 1)
    assert (one.full_token, one.window_token, one.kv_token) == ((2 * 2 * 2 * 4 * 4,), (128,), 256)
    assert one.cache(0, 10) == 2560
    assert one.cache(0, 100) == 128 * 100 + 128 * 16
    for tokens in (1, 15, 16, 17, 500):
        assert one.context(one.weights[0] + one.cache(0, tokens)) == tokens
        assert one.context(one.weights[0] + one.cache(0, tokens) - 1) == tokens - 1
    mistral = {**SMALL, "model_type": "mistral", "sliding_window": 16}
    assert split(model(mistral, tmp_path), 1).context(1 << 30) > 1 << 40


def test_legal_sizes_and_remedies() -> None:
    qwen = ModelConfig.from_dict(QWEN)
    assert even_sizes(qwen) == [1, 2, 4, 7, 14, 28]
    assert refused(qwen, [1, 2, 3, 4, 8, 32]) == [3, 8, 32]
    assert refused(qwen, [3, 8, 32], uneven=True) == [32]
    assert remedy(qwen, [3, 8, 32]) == "tp 1, 2, 4, 7, 14, 28 divide; 3 and 8 are possible unevenly with --uneven"
    with pytest.raises(
        UsageError, match=r"32 query heads in 8 groups do not divide by 5\n.*tp 1, 2, 4, 8, 16, 32 divide"
    ) as caught:
        require(ModelConfig.from_dict(LLAMA), 5)
    assert caught.value.code == "bad-size"
    with pytest.raises(UsageError, match=r"are fewer than 33 ranks"):
        require(ModelConfig.from_dict(LLAMA), 33, uneven=True)
    require(ModelConfig.from_dict(LLAMA), 5, uneven=True)
    six_groups = ModelConfig.from_dict({**SMALL, "hidden_size": 48, "num_attention_heads": 24, "num_key_value_heads": 6})
    assert 4 not in even_sizes(six_groups), "24 heads divide by 4, but 6 groups do not"


def test_dtypes(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    as_stored, half = describe(tmp_path), describe(tmp_path, "bfloat16")
    assert (as_stored.dtype, half.dtype) == ("F32", "BF16")
    assert split(as_stored, 1).total == 2 * split(half, 1).total
    assert split(as_stored, 1).kv_token == 2 * split(half, 1).kv_token


def test_a_plan_is_in_the_dtype_that_loading_takes(tmp_path: Path) -> None:
    """config.json's, whatever is stored; without it what most weights have, for all of them."""
    tensors = checkpoint(tmp_path, {**SMALL, "torch_dtype": "float16"})
    half = describe(tmp_path)
    assert {tensor.dtype for tensor in half.tensors} == {half.dtype} == {"F16"}
    save_file({**tensors, "model.norm.weight": torch.zeros(32, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "torch_dtype": None}))
    assert {tensor.dtype for tensor in describe(tmp_path).tensors} == {"F32"}


def test_positions_that_transformers_does_not_compute_are_refused(tmp_path: Path) -> None:
    assert set(ROPE_TYPES) >= {"default", *ROPE_INIT_FUNCTIONS}
    for said in ({"rope_scaling": {"type": "su"}}, {"rope_parameters": {"full_attention": {"rope_type": "mrope"}}}):
        with pytest.raises(UsageError, match=r"rotary positions of type '(su|mrope)', which") as caught:
            model({**SMALL, **said}, tmp_path)
        assert caught.value.code == "bad-config"
    for said in ({"rope_scaling": None}, {"rope_scaling": {}}, {"model_type": "phi3", "rope_scaling": {"type": "su"}}):
        model({**SMALL, **said}, tmp_path)


def test_tied_weights_are_counted_once(tmp_path: Path) -> None:
    tied = {**SMALL, "tie_word_embeddings": True}
    tensors = checkpoint(tmp_path, tied)
    once = split(describe(tmp_path), 1).total
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": torch.zeros(50, 32)}, tmp_path / "model.safetensors")
    both = describe(tmp_path)
    assert split(both, 1).total == once
    assert {"not loaded: lm_head.weight", "embedding and output head are one parameter, counted once"} <= set(notes(both, []))


def damage(name: str, directory: Path) -> None:
    """Make one thing wrong with a good checkpoint."""
    weights, config, q = directory / "model.safetensors", {**SMALL}, "model.layers.1.self_attn.q_proj.weight"
    if name == "truncated":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif name in ("missing shard", "wrong index"):
        tensors = load_file(weights)
        weights.rename(directory / "a.safetensors")
        where = dict.fromkeys(tensors, "a.safetensors")
        where[q] = "b.safetensors"
        if name == "wrong index":
            save_file({"other": torch.zeros(1)}, directory / "b.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    elif name == "missing parameter":
        checkpoint(directory, **{q: None})
    elif name == "unmatched":
        checkpoint(directory, **{"model.layers.0.self_attn.sinks": torch.zeros(8)})
    elif name == "contradiction":
        config["num_key_value_heads"] = 4
    else:
        config |= {"unknown": {"model_type": "lama"}, "quantized": {"quantization_config": {"quant_method": "gptq"}}}[name]
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("truncated", "file-unreadable", "model.safetensors' cannot be read as safetensors: it is truncated"),
        ("missing shard", "file-missing", "lacks b.safetensors, which its index names"),
        ("wrong index", "parameter-missing", "does not hold model.layers.1.self_attn.q_proj.weight, which"),
        (
            "missing parameter",
            "parameter-missing",
            "lacks model.layers.1.self_attn.q_proj.weight, which a model of this config has",
        ),
        ("unmatched", "parameter-missing", "no rule of the family 'Llama 2, Llama 3' matches model.layers.0.self_attn.sinks"),
        (
            "contradiction",
            "bad-config",
            "contradict each other: model.layers.0.self_attn.k_proj.weight is [8, 32], and by config.json it would be [16, 32]",
        ),
        ("unknown", "unknown-model", "no table for model_type 'lama'; did you mean 'llama'?"),
        ("quantized", "bad-dtype", "the weights are quantized (gptq)"),
    ],
)
def test_bad_checkpoints_get_one_message(name: str, code: str, words: str, tmp_path: Path, cli: Cli) -> None:
    checkpoint(tmp_path)
    assert cli(str(tmp_path))[0] == 0
    damage(name, tmp_path)
    status, out, err = cli(str(tmp_path), "--tp", "2")
    assert (status, out) == (2, "")
    assert words in err
    assert f"[{code}]" in err
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "falcon", "alibi": True}, "has attention with ALiBi"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "has cross attention"),
        ({"model_type": "opt", "layer_norm_elementwise_affine": False, "ffn_dim": 24}, "has norms without weights"),
    ],
)
def test_what_a_family_cannot_split_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        model({**SMALL, **config}, tmp_path)
    assert caught.value.code == "unknown-model"


def test_a_guess_is_marked_and_must_be_asked_for(tmp_path: Path, cli: Cli) -> None:
    checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "something"}))
    assert cli(str(tmp_path))[0] == 2
    status, out, _ = cli(str(tmp_path), "--guess")
    assert status == 0
    assert "guessed from names and shapes: no table for 'something'" in out
    assert split(describe(tmp_path, accept_guess=True), 2) == split_of_known(tmp_path)


def test_a_guess_needs_weights(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "something"}))
    status, _, err = cli(str(tmp_path), "--guess")
    assert status == 2
    assert "no weights to guess one from [file-missing]\nwhat to do: download the safetensors files too" in err


def split_of_known(directory: Path) -> Split:
    (directory / "config.json").write_text(json.dumps(SMALL))
    return split(describe(directory), 2)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """``crosscut plan`` with arguments: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["crosscut", "plan", *words])
        with pytest.raises(SystemExit) as done:
            main()
        shown = capsys.readouterr()
        return int(done.value.code or 0), shown.out, shown.err

    return run


def test_the_table(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    status, out, _ = cli(str(tmp_path), "--tp", "1,2,3,8", "--gpu", "h200,4090")
    assert status == 1
    assert "28 query heads: tp 1, 2, 4, 7, 14, 28 divide; 3 and 8 are possible unevenly with --uneven" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "14.2", "GiB", "0", "B", "56", "KiB"] in [line[:7] for line in lines]
    assert ["3", *["-"] * 5, "no"] in lines
    assert cli(str(tmp_path), "--tp", "1,2,3,8", "--uneven")[0] == 0


def test_json(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    status, out, _ = cli(str(tmp_path), "--json", "--tp", "1,2,5", "--gpu", "l4", "--reserve", "1GiB")
    found = json.loads(out)
    assert status == 1
    assert (found["schema"], found["refused"], found["even_tp"]) == ("crosscut-plan/1", [5], [1, 2, 4, 8, 16, 32])
    assert found["weights_bytes"] == 2 * 8_030_261_248
    two = split(describe(tmp_path), 2)
    room = two.context((named_gpu("l4").memory_mib << 20) - (1 << 30))
    assert found["splits"][1]["longest_sequence"] == {"l4": min(room, 8192)}
    assert found["splits"][1]["weights_bytes"] == list(two.weights)


def test_a_gpu_named_twice_is_one_column(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    _, out, _ = cli(str(tmp_path), "--tp", "1", "--gpu", "h200,l4,h200")
    assert out.count("h200") == 1


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("--tp", "1"), 0),
        (("--tp", "1", "--gpu", "h200"), 0),
        (("--tp", "1", "--gpu", "4090"), 1),
        (("--tp", "8", "--gpu", "4090"), 0),
        (("--tp", "5"), 2),
        (("--tp", "64", "--uneven"), 2),
        (("--tp", "0"), 2),
        (("--tp", "1,x"), 2),
        (("--gpu", "h2000"), 2),
        (("--dtype", "int4"), 2),
        (("--reserve", "some"), 2),
    ],
)
def test_exit_codes(words: tuple[str, ...], status: int, tmp_path: Path, cli: Cli) -> None:
    big = {**LLAMA, "num_hidden_layers": 80, "intermediate_size": 28672, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(big))
    assert cli(str(tmp_path), *words)[0] == status


def test_no_weights_and_a_table_without_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscut.sharding.describe.FAMILIES", Registry())
    describe_module.FAMILIES.register(Family("mine", ("llama",), ()))
    with pytest.raises(UsageError, match="there are no weights, and the table of 'mine' does not say") as caught:
        model(SMALL, tmp_path)
    assert caught.value.code == "file-missing"


def test_files_without_an_index(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(UsageError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        describe(tmp_path)


def test_what_a_config_without_weights_leaves_open_is_said(tmp_path: Path) -> None:
    found = model({key: value for key, value in SMALL.items() if key != "torch_dtype"}, tmp_path)
    assert found.from_config
    assert found.dtype == "BF16"
    assert "config.json names no dtype: bfloat16 is assumed" in notes(found, [])


def test_gpus_have_keys_and_memory() -> None:
    keys = [gpu.key for gpu in GPUS]
    assert {"h200", "h100-80", "a100-80", "a100-40", "l40s", "l4", "a10", "4090", "3090"} <= set(keys)
    assert len(set(keys)) == len(keys)
    for gpu in GPUS:
        assert 20_000 < gpu.memory_mib < 200_000
    assert named_gpu("H200").key == "h200"


def test_plan_loads_no_torch(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    code = (
        f"import sys; sys.argv = ['crosscut', 'plan', {str(tmp_path)!r}, '--tp', '1,2']\n"
        "from crosscut.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'safetensors', 'transformers')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
