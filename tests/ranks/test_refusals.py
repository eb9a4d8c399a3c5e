"""What cannot work is refused when a layer is built, with the legal values: sizes, axes, dtypes, rates, options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

import crosscut as cc
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.layers import LayerNorm, ParallelBlock, ParallelDropout, RMSNorm

OnRanks = Callable[..., list[Any]]
LEGAL: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "column": (cc.ColumnParallelLinear, {"in_features": 8, "out_features": 8}),
    "row": (cc.RowParallelLinear, {"in_features": 8, "out_features": 8}),
    "mlp": (cc.ParallelMLP, {"hidden": 8, "ffn": 12}),
    "attention": (cc.ParallelAttention, {"hidden": 8, "heads": 4}),
    "block": (ParallelBlock, {"hidden": 8, "heads": 4, "ffn": 12}),
    "embedding": (cc.VocabParallelEmbedding, {"num_embeddings": 9, "embedding_dim": 8}),
    "head": (cc.VocabParallelHead, {"hidden": 8, "vocab": 9}),
    "rms": (RMSNorm, {"hidden": 8}),
    "layer": (LayerNorm, {"hidden": 8}),
    "dropout": (ParallelDropout, {"p": 0.1, "sharded": True}),
}
NAN, INF = float("nan"), float("inf")
SIZES = [
    (layer, {size: value}, "bad-size", "at least 1")
    for layer, (_, options) in LEGAL.items()
    for size in options
    if layer != "dropout"
    for value in (0, -3, 4.0)
]
DTYPES = [
    (layer, {"dtype": dtype}, "bad-dtype", "torch.float32, torch.bfloat16, torch.float16, torch.float64")
    for layer in LEGAL
    if layer != "dropout"
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, "float32")
]
OPTIONS: list[tuple[str, dict[str, Any], str, str]] = [
    *[(norm, {"eps": eps}, "bad-option", "not below 0") for norm in ("rms", "layer", "block") for eps in (-1e-5, NAN, INF)],
    *[("dropout", {"p": p}, "bad-option", "from 0 up to, not including, 1") for p in (-0.1, 1.0, 1.5, NAN)],
    *[(layer, {"dropout": 1.5}, "bad-option", "from 0 up to, not including, 1") for layer in ("attention", "block")],
    ("layer", {"eps": "1e-5"}, "bad-option", "not below 0"),  # as YAML reads 1e-5
    ("rms", {"eps": None}, "bad-option", "not below 0"),
    ("dropout", {"p": None}, "bad-option", "from 0 up to, not including, 1"),
    ("column", {"packed": (3, 4)}, "bad-size", "the sizes of the parts"),
    ("column", {"packed": (4, 4), "gather_output": True}, "bad-size", "one layer for each part"),
    *[(layer, {"activation": "swish"}, "bad-option", "gelu, gelu_tanh, relu, silu") for layer in ("mlp", "block")],
    ("mlp", {"activation": nn.functional.silu}, "bad-option", "gelu, gelu_tanh, relu, silu"),
    ("attention", {"heads": 3}, "bad-size", "head_dim"),
    ("attention", {"kv_heads": 3}, "bad-size", "kv_heads can be 1, 2, 4"),
    ("attention", {"kv_heads": 0}, "bad-size", "at least 1"),
    ("attention", {"head_dim": 0}, "bad-size", "at least 1"),
    ("attention", {"head_dim": 2.5}, "bad-size", "at least 1"),
    *[("attention", {"window": window}, "bad-option", "at least 1 token") for window in (0, -1, 2.5, INF)],
    *[("attention", {"sequence_dim": dim}, "bad-option", "1 for x [B, S, H]") for dim in (2, -1)],
    *[
        ("attention", {name: value}, "bad-option", "above 0")
        for name in ("scale", "softcap")
        for value in (0.0, -1.0, NAN, INF, "30")
    ],
    ("attention", {"qk_norm": True, "qk_norm_eps": -1.0}, "bad-option", "not below 0"),
    ("attention", {"rope_theta": 1e4, "head_dim": 3}, "bad-size", "even number of features"),
    *[("attention", {"rope_theta": theta}, "bad-option", "above 1") for theta in (0.0, 1.0, -5.0, NAN, INF, "1e4")],
    ("attention", {"rope_theta": 1e4, "rope_scaling": "linear"}, "bad-option", "give a dict"),
    ("attention", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "bad-option", "give rope_theta"),
    (
        "attention",
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope"}},
        "bad-option",
        "default, linear, dynamic, yarn",
    ),
    ("attention", {"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "bad-option", "above 0 up to 1"),
    ("block", {"norm": "batch"}, "bad-option", "rms, layer"),
    ("block", {"attention": {"kv_head": 2}}, "bad-option", "kv_heads"),
    ("block", {"attention": {"dtype": torch.float32}}, "bad-option", "kv_heads"),
    ("block", {"attention": {"window": 0}}, "bad-option", "at least 1 token"),
    *[("embedding", {"padding_idx": row}, "bad-size", "from -9 to 8") for row in (9, -10)],
    ("head", {"softcap": 0.0}, "bad-option", "above 0"),
]


def build(layer: str, mesh: Mesh, **options: Any) -> Any:
    kind, legal = LEGAL[layer]
    return kind(**(legal | {"mesh": mesh} | options))


@pytest.mark.parametrize("layer", LEGAL)
def test_the_options_that_the_others_change_are_legal(layer: str) -> None:
    assert build(layer, make_mesh(device="cpu"))


@pytest.mark.parametrize(
    ("layer", "options", "code", "legal"),
    [*SIZES, *DTYPES, *OPTIONS],
    ids=lambda value: str(value) if isinstance(value, dict) else value if value in LEGAL else "",
)
def test_bad_options_are_refused_at_construction(layer: str, options: dict[str, Any], code: str, legal: str) -> None:
    with pytest.raises(UsageError) as refused:
        build(layer, make_mesh(device="cpu"), **options)
    assert refused.value.code == code
    assert legal in (refused.value.fix or "")
    for given in options.values():
        if isinstance(given, int | float | str | torch.dtype) and not isinstance(given, bool):
            assert str(given) in refused.value.message or len(options) > 1


@pytest.mark.parametrize("layer", ["attention", "block"])
def test_more_ranks_than_heads_are_refused_at_construction(on_ranks: OnRanks, layer: str) -> None:
    """transformers issue 48307, torchtitan PR 2577: found out in the middle of a forward."""
    with pytest.raises(UsageError, match=r"2 query heads cannot be dealt to 3 ranks[\s\S]*a tp from 1 to 2"):
        on_ranks(3, lambda mesh: build(layer, mesh, heads=2, seed=1))


def linears(q: int = 8, k: int = 4, v: int = 4, o: int = 8, **options: Any) -> object:
    parts = nn.Linear(6, q), nn.Linear(6, k), nn.Linear(6, v), nn.Linear(o, 6)
    return cc.ParallelAttention.from_linears(*parts, make_mesh(device="cpu"), **({"heads": 4, "kv_heads": 2} | options))


UNSPLIT: dict[str, Callable[[], object]] = {
    "cannot be stored as one": lambda: linears(v=8),
    "q gives 9 features": lambda: linears(q=9),
    "k gives 8 features, which are not 2 heads": lambda: linears(k=8, v=8),
    "the output projection is 9 -> 6": lambda: linears(o=9),
    "only one of q_norm and k_norm": lambda: linears(q_norm=nn.RMSNorm(2)),
    r"LayerNorm\(.*is not an RMS norm": lambda: linears(q_norm=nn.LayerNorm(2), k_norm=nn.LayerNorm(2)),
    "is not an RMS norm with the factor weight": lambda: linears(q_norm=Gemma3RMSNorm(2), k_norm=Gemma3RMSNorm(2)),
    r"frozen: \['weight', 'bias'\].*frozen: \[\]": lambda: cc.ParallelMLP.from_linears(
        nn.Linear(6, 8), nn.Linear(8, 6), make_mesh(device="cpu"), gate=nn.Linear(6, 8).requires_grad_(False)
    ),
    r"in torch.float64.*in torch.float32": lambda: cc.ParallelMLP.from_linears(
        nn.Linear(6, 8), nn.Linear(8, 6), make_mesh(device="cpu"), gate=nn.Linear(6, 8).double()
    ),
    r"a QK-norm weight \[8\] for heads of 2": lambda: linears(q_norm=nn.RMSNorm(8), k_norm=nn.RMSNorm(4)),
    "does not divide into heads=4, kv_heads=None": lambda: cc.ParallelAttention.from_packed(
        nn.Linear(6, 16), nn.Linear(8, 6), make_mesh(device="cpu"), heads=4
    ),
}


@pytest.mark.parametrize("words", UNSPLIT)
def test_unsplit_layers_that_do_not_fit_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match=words):
        UNSPLIT[words]()


LOSS: dict[str, tuple[str, dict[str, Any]]] = {
    "z_loss=-1": ("bad-option", {"z_loss": -1.0}),
    "z_loss=nan": ("bad-option", {"z_loss": NAN}),
    "label_smoothing=nan": ("bad-option", {"label_smoothing": NAN}),
    "reduction 'average' is not known": ("bad-option", {"reduction": "average"}),
    "targets are torch.float32": ("bad-dtype", {"target": torch.zeros(2)}),
    "logits are torch.int64": ("bad-dtype", {"logits": torch.zeros(2, 4, dtype=torch.long)}),
}


@pytest.mark.parametrize("words", LOSS)
def test_what_the_loss_cannot_take_is_refused(words: str) -> None:
    code, options = LOSS[words]
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 4), "target": torch.zeros(2, dtype=torch.long)} | options
    with pytest.raises(UsageError, match=words) as refused:
        cc.vocab_parallel_cross_entropy(group=make_mesh(device="cpu").tp, **arguments)
    assert refused.value.code == code
    assert refused.value.fix


def test_tokens_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tokens are torch.float32"):
        build("embedding", make_mesh(device="cpu"))(torch.ones(2))


@pytest.mark.parametrize("dim", [-1, 2, 3, -4])
@pytest.mark.parametrize("layer", ["column", "row", "embedding", "head"])
def test_the_dim_of_the_features_is_no_dim_of_tokens(on_ranks: OnRanks, layer: str, dim: int) -> None:
    def body(mesh: Mesh) -> object:
        x = torch.zeros(2, 4, dtype=torch.long) if layer == "embedding" else torch.zeros(2, 4, 4 if layer == "row" else 8)
        return build(layer, mesh, sequence_parallel=True, sequence_dim=dim, seed=1)(x)

    with pytest.raises(UsageError, match=rf"sequence_dim={dim} for activations with 3 dims[\s\S]*from 0 to 1"):
        on_ranks(2, body)


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel residual"])
def test_a_block_needs_sequences(parallel: bool) -> None:
    """Without this check the heads of each token of [S, H] attended to each other."""
    block = build("block", make_mesh(device="cpu"), parallel_residual=parallel)
    with pytest.raises(UsageError, match=r"got x \[5, 8\][\s\S]*B, S, H=8"):
        block(torch.zeros(5, 8))


@pytest.mark.parametrize("theta", [None, 1e4])
def test_positions_are_a_tensor_that_fits(theta: float | None) -> None:
    attention = build("attention", make_mesh(device="cpu"), rope_theta=theta, head_dim=2)
    for positions, words in ((4, "positions 4"), ([0, 1, 2, 3], r"positions \[0, 1, 2, 3\]"), (torch.arange(9), r"\[9\]")):
        with pytest.raises(UsageError, match=rf"{words} for 2 sequences of 4 tokens"):
            attention(torch.zeros(2, 4, 8), positions)


def test_a_mesh_is_no_group() -> None:
    with pytest.raises(UsageError, match=r"with a mesh[\s\S]*mesh.tp"):
        cc.vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), make_mesh(device="cpu"), 4)  # type: ignore[arg-type]
