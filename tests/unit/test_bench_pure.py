"""What bench does without ranks: reading shapes, judging rows, sampling rules."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from crosscut.bench.shapes import Shape, parse_counts, parse_dtype, parse_list, parse_shape
from crosscut.bench.timing import copies
from crosscut.bench.verdict import allowed_error, label, noisy, pays_from, speedup, wrong_results
from crosscut.errors import UsageError
from crosscut.records import Row, Times
from crosscut.units import ROUNDOFF


def row(impl: str, tokens: int, us: float, error: float | None = 1e-7, mode: str = "eager", spread: float = 1.0) -> Row:
    times = Times(us, us, us * spread, us * spread)
    shape = {"tokens": tokens, "in": 8, "out": 8}
    return Row("linear", impl, mode, 1 if impl == "single" else 2, "float32", shape, us=times, error=error)


def test_shapes_are_read() -> None:
    assert parse_shape("32x4096->8192") == Shape(False, (32, 4096, 8192))
    assert parse_shape(" 1 x 4096 -> 14336 -> 4096 ") == Shape(True, (1, 4096, 14336))


@pytest.mark.parametrize("text", ["", "32x4096", "32*4096->8192", "0x4->4", "1x4->8->5", "1x4->8->4->8", "-1x4->8"])
def test_shape_typos_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(text)
    assert caught.value.code == "bad-shape"
    assert caught.value.fix


def test_dtypes_and_lists() -> None:
    assert [parse_dtype(name) for name in ("bf16", "FP32", "float64", "auto")] == ["bfloat16", "float32", "float64", "auto"]
    assert parse_list("eager, graph", "mode", ("eager", "graph")) == ("eager", "graph")
    assert parse_counts("1,32", "--tokens") == (1, 32)
    for bad in ("bf17", ""):
        with pytest.raises(UsageError, match="dtype"):
            parse_dtype(bad)
    with pytest.raises(UsageError, match="did you mean 'graph'"):
        parse_list("eager,grpah", "mode", ("eager", "graph"))
    for bad in ("1,x", "0", "", "-4"):
        with pytest.raises(UsageError, match="--tokens"):
            parse_counts(bad, "--tokens")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_rounding_is_torchs_eps_halved(dtype: str) -> None:
    assert ROUNDOFF[dtype] == torch.finfo(getattr(torch, dtype)).eps / 2


def test_verdict_names_the_break_even_size() -> None:
    rows = [row("single", 1, 10), row("crosscut", 1, 20), row("single", 8, 100), row("crosscut", 8, 60)]
    assert speedup(rows[3], rows) == pytest.approx(100 / 60)
    sentence = pays_from("crosscut", "eager", rows)
    assert "pays from 8 x 8 -> 8 on" in sentence
    assert "100 us" in sentence
    assert "best 1.67x" in sentence
    assert "0.50x" in sentence


def test_verdict_when_it_never_or_always_or_oddly_pays() -> None:
    never = [row("single", 1, 10), row("crosscut", 1, 20)]
    always = [row("single", 1, 10), row("crosscut", 1, 5)]
    oddly = [*always, row("single", 8, 100), row("crosscut", 8, 200)]
    assert "does not pay at any size measured (best 0.50x" in pays_from("crosscut", "eager", never)
    assert "pays at every size measured (best 2.00x" in pays_from("crosscut", "eager", always)
    assert "at some sizes only, and not at the largest: 1 x 8 -> 8" in pays_from("crosscut", "eager", oddly)
    assert "not measured in graph mode" in pays_from("crosscut", "graph", always)


def test_a_wrong_result_is_named_and_a_rounded_one_is_not() -> None:
    right = [row("single", 1, 10, 3e-7), row("crosscut", 1, 20, 4e-7), row("no_comm", 1, 5, None)]
    assert wrong_results(right) == []
    for bad in (0.3, float("inf"), float("nan")):
        (sentence,) = wrong_results([*right, row("nccl", 1, 20, bad)])
        assert sentence.startswith("nccl (eager) at 1 x 8 -> 8: relative error")
    assert allowed_error("bfloat16", 0.0, 8) < 0.05


def test_a_noisy_run_is_called_noisy() -> None:
    assert noisy([row("single", 1, 10)] * 5) is None
    assert noisy([row("single", 1, 10)] * 5 + [row("gloo", 1, 10, spread=2.5)] * 5) is None
    assert noisy([row("gloo", 1, 10, spread=2.5)] * 5) is not None
    sentence = noisy([row("single", 1, 10)] * 3 + [row("no_comm", 1, 10, spread=2.5)] * 2)
    assert sentence is not None
    assert "2 of 5 cases" in sentence


def test_labels() -> None:
    assert label({"tokens": 1, "hidden": 4, "ffn": 16}) == "1 x 4 -> 16 -> 4"


def test_weights_rotate_past_the_cache() -> None:
    for nbytes in (1, 1 << 20, 40 << 20, 1 << 32):
        count = copies(nbytes, torch.device("cuda"))
        assert count == 12 or count * nbytes >= 512 << 20
        assert count >= 1


def test_help_and_bad_flags_start_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['crosscut', 'bench', 'linear', '--help']\n"
        "from crosscut.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'plotly', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "--shape" in run.stdout
