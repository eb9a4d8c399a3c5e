"""Attention cut by heads equals its unsplit self: output, every gradient, one optimizer step. Each check can fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosscut as cc
from crosscut import collectives
from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.errors import UsageError
from crosscut.layers import norm as norm_module
from crosscut.layers import qkv as qkv_module
from crosscut.layers import sdpa as sdpa_module
from crosscut.layers.random import HeadDropout
from crosscut.layers.shards import gather, take
from crosscut.sharding import Column, Heads, shard_sizes
from parity import expected, step

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]
BATCH, LENGTH, HIDDEN = 2, 7, 12


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    qk_norm: bool = False
    rope_theta: float | None = None
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        names = ("heads", "kv_heads", "rope_theta", "causal", "window", "scale", "softcap", "dropout")
        return {name: getattr(self, name) for name in names}


CASES = {
    "multi-head": Case(8, 8, 4, causal=False),
    "grouped": Case(8, 2, 2, bias=True, rope_theta=100.0),
    "multi-query": Case(8, 1, 4, rope_theta=50.0, window=3),
    "9 over 3": Case(9, 3, 6, bias=True, qk_norm=True, rope_theta=100.0),
    "free head_dim": Case(6, 2, 5, bias=True, qk_norm=True, causal=False, window=4),
    "8 over 2, norms": Case(8, 2, 4, qk_norm=True, rope_theta=100.0, window=20),
    "scale": Case(8, 4, 3, scale=0.9),
    "soft cap": Case(8, 2, 4, softcap=0.5, rope_theta=100.0),
    "dropout": Case(8, 2, 4, dropout=0.3),
    "dropout, 9 over 3, window, soft cap": Case(9, 3, 4, dropout=0.5, window=3, softcap=2.0, bias=True),
}
SEED = 9  # of the generator that dropout draws from, alike on all ranks


class Unsplit(nn.Module):
    """Attention by its formula: explicit scores, mask and softmax; the rotation as a product of complex numbers."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.case = case
        width, kv_width = case.heads * case.head_dim, case.kv_heads * case.head_dim
        self.q, self.o = nn.Linear(HIDDEN, width, case.bias), nn.Linear(width, HIDDEN, case.bias)
        self.k, self.v = nn.Linear(HIDDEN, kv_width, case.bias), nn.Linear(HIDDEN, kv_width, case.bias)
        if case.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(case.head_dim, eps=1e-5) for _ in range(2))
            for norm in (self.q_norm, self.k_norm):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        case = self.case
        q, k, v = (layer(x).unflatten(-1, (-1, case.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if case.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if case.rope_theta is not None:
            q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * (case.scale or 1 / math.sqrt(case.head_dim))
        if case.softcap is not None:
            scores = case.softcap * (scores / case.softcap).tanh()
        weights = scores.masked_fill(~self.seen(x.shape[1]), float("-inf")).softmax(-1)
        if case.dropout:
            weights = weights * self.kept(weights.shape) / (1 - case.dropout)
        return self.o((weights @ v).transpose(1, 2).flatten(-2))

    def kept(self, shape: torch.Size) -> Tensor:
        """The masks of all heads, true where a weight stays."""
        generator = torch.Generator().manual_seed(SEED)
        drop = HeadDropout(self.case.dropout, slice(0, shape[1]), mesh=make_mesh(device="cpu"), generator=generator)
        with drop.drawn(torch.device("cpu")) as masked:
            return masked(torch.ones(shape)) > 0

    def rotate(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        half = self.case.head_dim // 2
        angle = torch.arange(x.shape[-2], dtype=wide)[:, None] / self.case.rope_theta ** (torch.arange(half, dtype=wide) / half)
        turned = torch.complex(*x.to(wide).split(half, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)

    def seen(self, length: int) -> Tensor:
        mask = torch.ones(length, length, dtype=torch.bool)
        if self.case.causal:
            mask = mask.tril()
        return mask if self.case.window is None else mask.triu(1 - self.case.window).tril(self.case.window - 1)


def inputs(dtype: torch.dtype, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(22)
    x, upstream = (torch.randn(BATCH, length, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    return x, upstream


def split_of(unsplit: Unsplit, mesh: Mesh, **options: Any) -> cc.ParallelAttention:
    options = unsplit.case.options | options
    if unsplit.case.qk_norm:
        options |= {"q_norm": unsplit.q_norm, "k_norm": unsplit.k_norm}
    options["generator"] = torch.Generator().manual_seed(SEED)
    return cc.ParallelAttention.from_linears(unsplit.q, unsplit.k, unsplit.v, unsplit.o, mesh, **options)


def split_step(mesh: Mesh, unsplit: Unsplit, sequence: bool, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """One training step of the split layer; results in the unsplit shapes, replicas checked to be equal on the way."""
    split = split_of(unsplit, mesh, sequence_parallel=sequence)
    if not sequence:
        out = step(split, x, upstream, split)
    else:
        tokens = shard_sizes(x.shape[1], mesh.tp.size)
        own = [t.split(tokens, 1)[mesh.rank] for t in (x, upstream)]
        out = step(split, *own, lambda mine: split(mine, total_tokens=x.shape[1]))
        out["y"], out["dx"] = (collectives.all_gather(out[key], mesh.tp, 1, tokens) for key in ("y", "dx"))
    joined: dict[str, Tensor] = {}
    for key, value in out.items():
        if " of " not in key:
            joined[key] = value
            continue
        what, path = key.rsplit(" ", 1)
        layer, name = path.split(".")
        parallel = split.get_submodule(layer)
        full = gather(value, parallel.cuts[name], parallel.shapes[name], mesh.tp)
        assert torch.equal(take(full, parallel.cuts[name], mesh.tp.size, mesh.tp.rank), value), f"replicas differ: {key}"
        joined |= unpacked(what, layer, name, full, unsplit.case)
    return joined


def unpacked(what: str, layer: str, name: str, full: Tensor, case: Case) -> dict[str, Tensor]:
    if layer != "qkv":
        return {f"{what} {layer}.{name}": full}
    sizes = [count * case.head_dim for count in (case.heads, case.kv_heads, case.kv_heads)]
    return {f"{what} {part}.{name}": rows for part, rows in zip("qkv", full.split(sizes), strict=True)}


def check(on_ranks: OnRanks, world: int, case: Case, dtype: torch.dtype, sequence: bool = False, length: int = LENGTH) -> None:
    unsplit = Unsplit(case, dtype)
    x, upstream = inputs(dtype, length)
    right = expected(unsplit, x, upstream, world)
    for rank, got in enumerate(on_ranks(world, split_step, unsplit, sequence, x, upstream)):
        right.check(got, f"tp {world}, rank {rank}")


def legal(names: dict[str, Case]) -> list[Any]:
    """Each case with each world in which every rank has a head."""
    return [
        pytest.param(world, case, id=f"{name}, tp {world}")
        for name, case in names.items()
        for world in WORLDS
        if world <= case.heads
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("world", "case"), legal(CASES))
def test_attention_equals_unsplit(on_ranks: OnRanks, world: int, case: Case, dtype: torch.dtype) -> None:
    check(on_ranks, world, case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length", [8, 7, 3], ids=["even", "uneven", "fewer tokens than ranks"])
@pytest.mark.parametrize(
    ("world", "case"), legal({name: CASES[name] for name in ("grouped", "9 over 3", "dropout, 9 over 3, window, soft cap")})
)
def test_sequence_parallel_attention_equals_unsplit(
    on_ranks: OnRanks, world: int, case: Case, length: int, dtype: torch.dtype
) -> None:
    check(on_ranks, world, case, dtype, sequence=True, length=length)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 13])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize("kind", ["grouped", "soft cap"])
def test_a_window_in_blocks_equals_one_mask(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, kind: str, causal: bool, window: int
) -> None:
    monkeypatch.setattr(sdpa_module, "BLOCK", 2)
    case = replace(CASES[kind], causal=causal, window=window, rope_theta=100.0)
    for length in (13, 12, 3):
        check(on_ranks, 3, case, torch.float32, length=length)


# ------------------------------------------------------------------------------------------- the checks above can fail


def test_a_window_off_by_one_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sdpa_module.window_mask
    monkeypatch.setattr(sdpa_module, "window_mask", lambda *args: right(*args[:3], args[3] + 1, *args[4:]))
    with pytest.raises(AssertionError, match=r"tp 2, rank 0: y: relative error"):
        check(on_ranks, 2, CASES["multi-query"], torch.bfloat16)


def test_masks_that_follow_the_rank_turn_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's dropout with equal seeds: the first head of every rank gets the first mask."""
    right = HeadDropout.__init__
    monkeypatch.setattr(
        HeadDropout, "__init__", lambda self, p, heads, **o: right(self, p, slice(0, heads.stop - heads.start), **o)
    )
    with pytest.raises(AssertionError, match=r"tp 2, rank 0: y: relative error"):
        check(on_ranks, 2, CASES["dropout"], torch.bfloat16)


def test_a_contiguous_cut_of_packed_qkv_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo Automodel PR 1324, sglang PR 34529, DeepSpeed PR 3844: the right shape, the wrong rows, no error."""
    monkeypatch.setattr(qkv_module, "PackedQKV", lambda heads: Column())
    with pytest.raises(AssertionError, match=r"tp 2, rank 0: y: relative error"):
        check(on_ranks, 2, CASES["multi-head"], torch.bfloat16)


@pytest.mark.parametrize(
    ("times", "words"), [(0, "replicas differ: grad of qkv.weight"), (2, "grad of k.weight: relative error")]
)
def test_kv_gradients_not_summed_once_turn_the_check_red(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, times: int, words: str
) -> None:
    right = qkv_module.sum_kv_gradient

    def faulty(rows: Tensor, heads: Heads, group: Any) -> Tensor:
        for _ in range(times):
            rows = right(rows, heads, group)
        return rows

    monkeypatch.setattr(qkv_module, "sum_kv_gradient", faulty)
    check(on_ranks, 2, CASES["8 over 2, norms"], torch.bfloat16)  # no head is replicated: nothing to sum
    with pytest.raises(AssertionError, match=words):
        check(on_ranks, 4, CASES["8 over 2, norms"], torch.bfloat16)


def test_a_qk_norm_gradient_not_summed_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL issue 3716: the train step missed the reduction of the q and k norms' gradients, and replicas drifted."""
    monkeypatch.setattr(norm_module, "copy_to_tp", lambda x, group: x)
    with pytest.raises(AssertionError, match=r"grad of q_norm.weight: relative error"):
        check(on_ranks, 2, CASES["9 over 3"], torch.bfloat16)


def test_query_heads_sent_to_the_wrong_kv_head_turn_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """tp 3 on 8 over 2 heads: the middle rank's three query heads need one KV head once and the other twice."""
    monkeypatch.setattr(sdpa_module, "one_per_query", lambda kv, counts: kv[:, [0, 0, 1]])
    with pytest.raises(AssertionError, match=r"tp 3, rank 0: y: relative error"):
        check(on_ranks, 3, CASES["grouped"], torch.bfloat16)


# --------------------------------------------------------------------------------------------- round trips and starts


@pytest.mark.parametrize(("world", "case"), legal({name: CASES[name] for name in ("9 over 3", "multi-query")}))
def test_linears_come_back_exactly(on_ranks: OnRanks, world: int, case: Case) -> None:
    unsplit = Unsplit(case, torch.bfloat16)
    unsplit.requires_grad_(False)
    linears = {name: unsplit.get_submodule(name) for name in "qkvo"}
    packed = nn.Linear(HIDDEN, sum(linears[name].out_features for name in "qkv"), case.bias, dtype=torch.bfloat16)
    for name, parameter in packed.named_parameters():
        parameter.data = torch.cat([linears[part].get_parameter(name) for part in "qkv"])

    def body(mesh: Mesh) -> None:
        split = split_of(unsplit, mesh)
        assert not any(parameter.requires_grad for parameter in split.parameters())
        fused = cc.ParallelAttention.from_packed(packed, unsplit.o, mesh, **case.options)
        for attention in (split, fused):
            back = attention.to_linears()
            assert back.keys() == linears.keys()
            for name, linear in back.items():
                for what, parameter in linear.named_parameters():
                    assert parameter.dtype == torch.bfloat16
                    assert torch.equal(parameter, linears[name].get_parameter(what)), f"{name}.{what}"

    on_ranks(world, body)


def initial(mesh: Mesh, seed: int | None, heads: int = 9, kv_heads: int = 3) -> list[Tensor]:
    split = cc.ParallelAttention(10, heads, mesh=mesh, kv_heads=kv_heads, head_dim=8, bias=True, qk_norm=True, seed=seed)
    return [p.detach() for linear in split.to_linears().values() for p in (linear.weight, linear.bias)]


def test_initial_weights_do_not_depend_on_tp(on_ranks: OnRanks) -> None:
    (alone,) = on_ranks(1, initial, 7)
    assert all(float(values.abs().max()) <= bound for values, bound in zip(alone, [10**-0.5] * 6 + [72**-0.5] * 2, strict=True))
    for world in (2, 3, 8):
        for split in on_ranks(world, initial, 7):
            assert all(torch.equal(a, b) for a, b in zip(alone, split, strict=True))
    (other,) = on_ranks(1, initial, 8)
    assert not any(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    assert len({round(float(values.flatten()[0]), 7) for values in alone}) == len(alone)  # no two draw the same stream
    torch.manual_seed(3)
    first, *others = on_ranks(4, initial, None)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# ------------------------------------------------------------------------------------------------------ shapes and use


def test_sequence_first_and_given_positions(on_ranks: OnRanks) -> None:
    """x [S, B, H] gives the same; positions shifted alike change nothing, others do (rotation sees differences alone)."""
    unsplit = Unsplit(CASES["9 over 3"], torch.float32)
    x, _ = inputs(torch.float32)
    expected = unsplit(x)

    def body(mesh: Mesh) -> None:
        split, first = split_of(unsplit, mesh), split_of(unsplit, mesh, sequence_dim=0)
        torch.testing.assert_close(first(x.transpose(0, 1)).transpose(0, 1), expected)
        positions = torch.arange(LENGTH)
        for same in (positions, positions + 5, positions.expand(BATCH, -1) + torch.tensor([[0], [9]])):
            torch.testing.assert_close(split(x, same), expected)
        assert not torch.allclose(split(x, positions * 2), expected, atol=1e-3)

    on_ranks(2, body)


def test_frozen_weights_autocast_and_checkpointing(on_ranks: OnRanks) -> None:
    from torch.utils.checkpoint import checkpoint

    case, (x, upstream) = CASES["grouped"], inputs(torch.float32)
    unsplit = Unsplit(case, torch.float32)

    def dx(layer: Any, how: str) -> Tensor | None:
        layer.requires_grad_(how != "frozen")
        start = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            y = checkpoint(layer, start, use_reentrant=False) if how == "checkpoint" else layer(start)
        y.float().backward(upstream)
        return start.grad

    def body(mesh: Mesh, how: str) -> tuple[Tensor | None, Tensor]:
        split = split_of(unsplit, mesh)
        got, qkv = dx(split, how), split.qkv
        return got, gather(
            qkv.weight if how == "frozen" else qkv.weight.grad, qkv.cuts["weight"], qkv.shapes["weight"], mesh.tp
        )

    for how in ("frozen", "autocast", "checkpoint"):
        whole = Unsplit(case, torch.float32)
        expected = dx(whole, how)
        rows = torch.cat([p if how == "frozen" else p.grad for p in (whole.q.weight, whole.k.weight, whole.v.weight)])
        rough = {"atol": 0.1 if how == "autocast" else 1e-5, "rtol": 1e-2}
        for got, got_rows in on_ranks(4, body, how):
            torch.testing.assert_close(got, expected, **rough)
            torch.testing.assert_close(got_rows, rows.detach(), **rough)


def test_collectives_of_a_step(on_ranks: OnRanks) -> None:
    """One all-reduce forward, one backward, and one for each replicated KV weight: no more."""

    def body(mesh: Mesh, kv_heads: int) -> list[str]:
        seen: list[str] = []

        class Observer:
            def begin(self, op: str, group: str, shape: tuple[int, ...], dtype: str, detail: str) -> int:
                seen.append(f"{op} {list(shape)}")
                return 0

            def end(self, token: int) -> None:
                pass

        observed = replace(mesh, tp=mesh.tp.observed_by(Observer()))
        split = cc.ParallelAttention(HIDDEN, 4, mesh=observed, kv_heads=kv_heads, seed=1)
        seen.clear()
        split(torch.randn(1, 5, HIDDEN, requires_grad=True)).sum().backward()
        return seen

    exchange = "all_reduce [1, 5, 12]"
    assert on_ranks(2, body, 2) == [[exchange, exchange]] * 2
    assert on_ranks(2, body, 1) == [[exchange, exchange, "all_reduce [2, 3, 12]"]] * 2


def attention(**options: Any) -> Any:
    return cc.ParallelAttention(**({"hidden": 8, "heads": 4, "mesh": make_mesh(device="cpu")} | options))


BAD: dict[str, Callable[[], object]] = {
    r"got x \[2, 8\]": lambda: attention()(torch.ones(2, 8)),
    r"got x \[1, 2, 7\]; the input must have 8": lambda: attention()(torch.ones(1, 2, 7)),
    r"positions \[3\] for 1 sequences of 2 tokens": lambda: attention(rope_theta=9.0)(torch.ones(1, 2, 8), torch.arange(3)),
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_work_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BAD[words]()


def test_softmax_over_the_window_is_what_the_words_say() -> None:
    """Token i sees the W tokens up to itself: with equal keys the output is the mean of their values."""
    layer = attention(window=2)
    with torch.no_grad():
        layer.qkv.weight[:16] = 0  # q and k
    x = torch.randn(1, 5, 8)
    values = F.linear(x, layer.qkv.weight[16:])
    mean = torch.cat([values[:, :1], (values[:, 1:] + values[:, :-1]) / 2], 1)
    torch.testing.assert_close(layer(x), F.linear(mean, layer.o.weight))
