"""Rotary embedding: frequencies as transformers computes them, rotation as the paper says, at any tp what it is at one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import crosscut as cc
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers import rope as rope_module
from crosscut.layers.rope import Rope, make_rope

OnRanks = Callable[..., list[Any]]
TRAINED = "original_max_position_embeddings"
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, TRAINED: 128},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, TRAINED: 8192},
    "llama3, other bounds": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0, TRAINED: 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, TRAINED: 4096},
    "yarn, mscale": {
        "rope_type": "yarn", "factor": 40.0, TRAINED: 4096, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16,
        "beta_slow": 2, "truncate": False,
    },
    "yarn, factor given": {"rope_type": "yarn", "factor": 2.0, TRAINED: 64, "attention_factor": 1.25},
}  # fmt: skip


def theirs(scaling: dict[str, Any], part: float, theta: float, length: int) -> tuple[Tensor, float]:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=scaling.get(TRAINED, 2048),
        rope_parameters=scaling | {"rope_theta": theta, "partial_rotary_factor": part},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)


def check_frequencies(scaling: dict[str, Any], part: float, theta: float, length: int) -> None:
    expected, factor = theirs(scaling, part, theta, length)
    got, ours = make_rope(128, theta, scaling, part).frequencies(length)
    torch.testing.assert_close(got.float(), expected, rtol=2e-6, atol=0)
    assert ours == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("length", [64, 1000])
@pytest.mark.parametrize("part", [1.0, 0.25])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], theta: float, part: float, length: int) -> None:
    check_frequencies(scaling, part, theta, length)


def test_a_factor_left_out_turns_the_check_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_module, "_llama3", lambda plain, options: plain)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_frequencies(SCALINGS["llama3"], 1.0, 1e4, 64)


def test_dynamic_goes_by_the_length_of_this_call() -> None:
    rope = make_rope(16, 1e4, SCALINGS["dynamic"])
    inside, beyond = (rope.tables(length, torch.device("cpu"), torch.float64)[0][:100] for length in (100, 500))
    assert torch.equal(inside, Rope(16, 1e4).tables(100, torch.device("cpu"), torch.float64)[0])
    assert not torch.allclose(inside, beyond, atol=1e-3)
    positions = torch.arange(500)
    assert torch.equal(rope.tables(positions, positions.device, torch.float64)[0][:100], beyond)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_rotation_is_a_product_of_complex_numbers(interleaved: bool, part: float) -> None:
    rope, length = make_rope(8, 50.0, None, part, interleaved), 5
    x = torch.randn(2, 3, length, 8, dtype=torch.float64)
    turned, rest = x[..., : rope.features], x[..., rope.features :]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    half = rope.features // 2
    angle = torch.arange(length)[:, None] / 50.0 ** (torch.arange(half, dtype=torch.float64) / half)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    expected = product.flatten(-2) if interleaved else product.transpose(-1, -2).flatten(-2)
    got = rope.rotate(x, *rope.tables(length, x.device, x.dtype))
    torch.testing.assert_close(got, torch.cat([expected, rest], -1))
    assert rope.rotate(x.bfloat16(), *rope.tables(length, x.device, torch.bfloat16)).dtype == torch.bfloat16


def test_neighbours_are_halves_with_rows_permuted() -> None:
    """transformers PR 48519: q and k of a checkpoint that pairs neighbours, cut before its rows were brought in order."""
    halves, neighbours = make_rope(8, 50.0), make_rope(8, 50.0, interleaved=True)
    x = torch.randn(1, 1, 6, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    cos, sin = halves.tables(6, x.device, x.dtype)
    torch.testing.assert_close(halves.rotate(x[..., order], cos, sin), neighbours.rotate(x, cos, sin)[..., order])


@pytest.mark.parametrize("options", [
    {"rope_scaling": SCALINGS["llama3, other bounds"]},
    {"rope_scaling": SCALINGS["yarn, factor given"], "partial_rotary_factor": 0.5},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0, TRAINED: 4}, "rope_interleaved": True},
], ids=["llama3", "yarn, half of the features", "dynamic, neighbours"])  # fmt: skip
@pytest.mark.parametrize("world", [2, 3, 8])
def test_attention_with_scaling_does_not_depend_on_tp(on_ranks: OnRanks, world: int, options: dict[str, Any]) -> None:
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))

    def body(mesh: Mesh, options: dict[str, Any]) -> Tensor:
        return cc.ParallelAttention(16, 8, head_dim=8, kv_heads=2, rope_theta=100.0, mesh=mesh, seed=1, **options)(x).detach()

    (alone,) = on_ranks(1, body, options)
    for got in on_ranks(world, body, options):
        torch.testing.assert_close(got, alone)
    assert not torch.allclose(alone, on_ranks(1, body, {})[0], atol=1e-3)


def test_tables_are_made_once_and_serve_a_backward_after_inference_mode() -> None:
    rope, cpu = make_rope(8, 77.0), torch.device("cpu")
    with torch.inference_mode():
        first = rope.tables(6, cpu, torch.float32)
    assert all(a is b for a, b in zip(first, make_rope(8, 77.0).tables(6, cpu, torch.bfloat16), strict=True))
    x = torch.randn(1, 1, 6, 8, requires_grad=True)
    rope.rotate(x, *first).sum().backward()
    assert x.grad is not None


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown type": ("rope_type 'yarm' is not known; did you mean 'yarn'", {"scaling": {"rope_type": "yarm"}}),
    "missing key": ("'llama3' with high_freq_factor=None", {
        "scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, TRAINED: 9}}),
    "unknown key": ("'linear' has no 'factr'; did you mean 'factor'", {"scaling": {"rope_type": "linear", "factr": 2}}),
    "factor below 1": ("'linear' with factor=0.5", {"scaling": {"rope_type": "linear", "factor": 0.5}}),
    "bounds swapped": ("low_freq_factor=4.0 and high_freq_factor=1.0", {
        "scaling": SCALINGS["llama3"] | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}),
    "no number": ("'yarn' with beta_fast='32'", {"scaling": SCALINGS["yarn"] | {"beta_fast": "32"}}),
    "two features": ("'dynamic' with 2 features", {"scaling": SCALINGS["dynamic"], "partial_rotary_factor": 0.25}),
    "odd part": ("turns pairs of features, not 3", {"partial_rotary_factor": 0.4}),
    "no part": ("partial_rotary_factor=0", {"partial_rotary_factor": 0}),
    "theta": ("rope_theta=1", {"theta": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("words", "options"), BAD.values(), ids=BAD)
def test_what_cannot_work_is_refused(words: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=words):
        make_rope(**({"head_dim": 8, "theta": 1e4} | options))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_positions_of_no_tokens(shape: tuple[int, int]) -> None:
    from crosscut.distributed.mesh import make_mesh

    attention = cc.ParallelAttention(
        8, 4, rope_theta=1e4, rope_scaling=SCALINGS["dynamic"], head_dim=8, mesh=make_mesh(device="cpu")
    )
    positions = torch.zeros(shape, dtype=torch.long)
    assert attention(torch.zeros(*shape, 8), positions).shape == (*shape, 8)


def test_tables_of_no_real_tensors_are_not_kept() -> None:
    """A model run once on fake tensors, to count its memory, gave fake results for ever."""
    from crosscut.distributed.mesh import make_mesh

    attention = cc.ParallelAttention(8, 4, rope_theta=1e4, head_dim=4, window=2, mesh=make_mesh(device="cpu"))
    embedding = cc.VocabParallelEmbedding(9, 8, mesh=make_mesh(device="cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        attention(embedding(torch.zeros(2, 37, dtype=torch.long)))
    assert type(attention(torch.zeros(2, 37, 8))) is torch.Tensor
    x = torch.func.vmap(embedding)(torch.zeros(3, 41, dtype=torch.long))
    torch.func.grad(lambda x: attention(x).sum())(x.detach())
    tables = attention.rope.tables(41, torch.device("cpu"), torch.float32)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(table) for table in tables)
