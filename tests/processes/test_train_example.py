"""The training example gives one loss curve however its ranks are used, and goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_examples import EXAMPLES, TORCHRUN, _run

SCRIPT = str(EXAMPLES[0].with_name("train_tiny_llama.py"))
STEPS = 12


def losses(tmp_path: Path, ranks: int, *flags: str, steps: int = STEPS) -> list[float]:
    out = tmp_path / "losses.json"
    launcher = (*TORCHRUN[:-1], str(ranks)) if ranks > 1 else TORCHRUN[:1]
    done = _run(*launcher, SCRIPT, "--steps", str(steps), "--losses", str(out), *flags)
    assert done.returncode == 0, done.stderr
    return list(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses(tmp_path_factory.mktemp("alone"), 1)
    assert found[-1] < found[0] - 1.5, "it does not learn"
    return found


ARRANGEMENTS = {"sp 2": (2, ("--sp",)), "dp 2": (2, ("--tp", "1")), "sp 3": (3, ("--sp",))}


@pytest.mark.parametrize(("ranks", "flags"), ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_the_loss_curve_does_not_depend_on_the_ranks(
    tmp_path: Path, alone: list[float], ranks: int, flags: tuple[str, ...]
) -> None:
    assert losses(tmp_path, ranks, *flags) == pytest.approx(alone, abs=2e-3)


def test_it_goes_on_where_it_was_stopped_on_other_ranks(tmp_path: Path, alone: list[float]) -> None:
    checkpoint = ("--checkpoint", str(tmp_path / "tiny.safetensors"))
    assert losses(tmp_path, 2, *checkpoint, steps=5) == pytest.approx(alone[:5], abs=2e-3)
    assert losses(tmp_path, 1, *checkpoint) == pytest.approx(alone[5:], abs=2e-3)
