"""The rule that chooses between cuBLAS and the skinny kernel, and how that kernel deals a shape out."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from crosscut.kernels.skinny import HALF_SHARED, MOST_STAGES, MOST_TOKENS, SHARED, tile
from crosscut.layers.matmul import Rule, choose, explain, linear
from crosscut.records import RunRecord

GPU = "NVIDIA H200"
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_a_gpu_that_was_not_measured_keeps_cublas() -> None:
    for tokens in (1, 32, 128):
        choice = choose("NVIDIA H100 80GB HBM3", tokens, 4096, 4096, 2, exchanged=True)
        assert (choice.impl, choice.reason) == ("cublas", "NVIDIA H100 80GB HBM3 was not measured")


def test_the_setting_overrules() -> None:
    assert choose("NVIDIA A100", 1000, 64, 64, 2, forced="skinny").impl == "skinny"
    assert choose(GPU, 1, 4096, 4096, 2, forced="cublas").reason == "CROSSCUT_MATMUL=cublas"


def test_a_rule_ends_where_it_was_measured() -> None:
    rule = Rule(48, (512, 1024), (1024, 4096), (1, 8))
    inside = {"tokens": 48, "n": 1024, "k": 4096, "mib": 8.0, "exchanged": False}
    assert rule.fits(**inside)  # type: ignore[arg-type]
    assert rule.fits(1, 512, 1024, 1.0, True)
    for change in ({"tokens": 49}, {"n": 1032}, {"k": 4104}, {"mib": 8.01}, {"n": 504}, {"k": 1016}, {"mib": 0.99}):
        assert not rule.fits(**inside | change), change  # type: ignore[arg-type]
    late = Rule(48, (512, 1024), (1024, 4096), (1, 8), exchanged=True)
    assert not late.fits(**inside)  # type: ignore[arg-type]
    assert late.fits(**inside | {"exchanged": True})  # type: ignore[arg-type]
    assert str(late) == "up to 48 tokens, N 512 to 1024, K 1024 to 4096, MiB 1 to 8, before an exchange"


@pytest.mark.parametrize("record", sorted(RECORDS.glob("h200x1_skinny_*.json")), ids=lambda path: path.stem)
def test_rules_choose_skinny_only_where_the_record_says_that_it_won(record: Path) -> None:
    times: dict[tuple[int, int, int], dict[tuple[str, str], float]] = defaultdict(dict)
    for row in RunRecord.read(record).rows:
        if row.shape and row.us and row.mode == "graph" and "tokens" in row.shape:
            key = row.shape["tokens"], row.shape["out"], row.shape["in"]
            times[key][row.impl, row.extra["surroundings"]] = row.us.p50
    chosen = 0
    for (tokens, n, k), found in times.items():
        for exchanged, surroundings in ((False, ("none", "elementwise", "exchange")), (True, ("exchange",))):
            gains = [found["cublas", s] / found["skinny", s] for s in surroundings if ("skinny", s) in found]
            if choose(GPU, tokens, n, k, 2, exchanged).impl == "skinny" and gains:
                chosen += 1
                sure = choose(GPU, tokens, n, k, 2, False).impl == "skinny"
                assert min(gains) >= 1.04 or (sure and exchanged), (tokens, n, k, exchanged, gains)
    assert chosen > 100


def test_reasons_say_what_was_measured() -> None:
    assert choose(GPU, 1, 4096, 4096, 2).reason.startswith("measured faster on NVIDIA H200 for up to 48 tokens, N 1024 to 4096")
    assert choose(GPU, 129, 4096, 4096, 2).reason.endswith("for 129 tokens, N 4096, K 4096, 32 MiB")
    assert choose(GPU, 128, 4096, 4096, 2).impl == "cublas"
    assert choose(GPU, 128, 4096, 4096, 2, exchanged=True).impl == "skinny"


def test_on_a_cpu_the_layer_multiplies_as_torch_does() -> None:
    x, w = torch.randn(2, 3, 16), Parameter(torch.randn(8, 16))
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
    assert explain(x, w).reason == "x is on cpu, where torch's own multiply serves"
    linear(x, w).sum().backward()
    assert w.grad is not None


sizes = st.integers(1, 40_000)


@given(tokens=st.integers(1, MOST_TOKENS), n=sizes, k=st.integers(1, 5000), multiprocessors=st.integers(16, 160))
def test_a_tile_fits_and_its_ring_can_turn(tokens: int, n: int, k: int, multiprocessors: int) -> None:
    k *= 8
    t = tile(tokens, n, k, multiprocessors)
    steps = -(-k // (64 * t.boxes * t.split))
    assert t.tokens >= tokens
    assert 1 <= t.stages <= MOST_STAGES
    assert t.stages >= min(2, steps), "a stage is given back when the next one is multiplied"
    assert t.shared <= SHARED
    assert 64 * t.groups % t.split == 0
    assert t.blocks(n) * 64 * t.groups >= n * t.split
    if t.split > 1:
        assert t.blocks(n) <= multiprocessors or t.shared <= HALF_SHARED, "every block has a place at once"


def test_tiles_of_shapes_that_were_measured() -> None:
    def short(tokens: int, n: int, k: int) -> tuple[int, int, int]:
        t = tile(tokens, n, k, 132)
        return t.groups, t.split, t.blocks(n)

    assert short(1, 4096, 4096) == (1, 2, 128)
    assert short(1, 2048, 4096) == (1, 4, 128)
    assert short(32, 2048, 4096) == (1, 2, 64)
    assert short(1, 5120, 5120) == (1, 2, 160)
    assert short(32, 5120, 5120) == (1, 1, 80)
    assert short(128, 14336, 8192) == (2, 1, 112)
    assert short(1, 14336, 8192) == (1, 1, 224)
    assert short(8, 512, 1024) == (1, 8, 64)
    assert short(8, 512, 128) == (1, 1, 8), "there is no k for a second block"
