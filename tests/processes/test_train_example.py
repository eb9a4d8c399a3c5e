"""The training example gives one loss curve however its ranks are used, and goes on where it was killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_examples import EXAMPLES, TORCHRUN, _environment, _run

from crosscut.records import Row, RunRecord

SCRIPT = str(EXAMPLES[0].with_name("train_tiny_llama.py"))
STEPS = 12


def trained(tmp_path: Path, ranks: int, *flags: str) -> Row:
    record = tmp_path / "run.json"
    launcher = (*TORCHRUN[:-1], str(ranks)) if ranks > 1 else TORCHRUN[:1]
    done = _run(*launcher, SCRIPT, "--steps", str(STEPS), "--record", str(record), *flags)
    assert done.returncode == 0, done.stderr
    (row,) = RunRecord.read(record).rows
    assert row.extra["tokens_per_s"] > 0
    return row


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    row = trained(tmp_path_factory.mktemp("alone"), 1)
    found: list[float] = row.extra["loss"]
    assert row.impl == "tp 1, dp 1"
    assert len(found) == row.n == STEPS
    assert found[-1] < found[0] - 1.5, "it does not learn"
    return found


ARRANGEMENTS = {"tp 2, dp 1, sp": (2, ("--sp",)), "tp 1, dp 2": (2, ("--tp", "1")), "tp 3, dp 1, sp": (3, ("--sp",))}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_the_loss_curve_does_not_depend_on_the_ranks(tmp_path: Path, alone: list[float], arrangement: str) -> None:
    ranks, flags = ARRANGEMENTS[arrangement]
    row = trained(tmp_path, ranks, *flags)
    assert row.impl == arrangement
    assert row.extra["loss"] == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--steps", "0"), "invalid positive value: '0'"),
        (("--tp", "3"), "error: tp=3 does not divide the 1 rank of this run"),
        (("--text", "nowhere.txt"), "error: --text: there is no nowhere.txt"),
        (("--length", "999999"), "error: the text has "),
        (("--lr", "nan"), "error: --lr nan: a number above 0"),
        (("--checkpoint", "nowhere/tiny.safetensors"), "error: --checkpoint: nowhere/tiny.safetensors is"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(flags: tuple[str, ...], words: str) -> None:
    done = _run(*TORCHRUN[:1], SCRIPT, *flags)
    assert done.returncode
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_that_would_be_dealt_unequally_is_refused() -> None:
    done = _run(*TORCHRUN[:-1], "2", SCRIPT, "--tp", "1", "--batch", "3", "--steps", "1")
    assert "--batch 3 does not divide over 2 data-parallel groups" in done.stderr
    assert "[rank0]: Traceback" not in done.stderr


def test_a_record_with_a_gap_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """Steps 1 to 2 in the record, 1 to 4 in the checkpoint: the curve would put the first two at 3 and 4."""
    record, checkpoint = ("--record", str(tmp_path / "run.json")), ("--checkpoint", str(tmp_path / "tiny.safetensors"))
    for flags in (("2", *record, *checkpoint), ("4", *checkpoint)):
        assert _run(*TORCHRUN[:1], SCRIPT, "--steps", *flags).returncode == 0
    done = _run(*TORCHRUN[:1], SCRIPT, "--steps", "6", *record, *checkpoint)
    assert done.returncode
    assert "run.json has no losses up to step 4" in done.stderr
    assert RunRecord.read(tmp_path / "run.json").rows[0].n == 2


def test_it_goes_on_where_it_was_killed_on_other_ranks(tmp_path: Path, alone: list[float]) -> None:
    """SIGKILL in the middle, perhaps of a save; then two ranks, whose record continues the one rank's curve."""
    flags = ("--checkpoint", str(tmp_path / "tiny.safetensors"), "--every", "1")
    command = (*TORCHRUN[:1], SCRIPT, "--steps", str(STEPS), "--record", str(tmp_path / "run.json"), *flags)
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        while "step    3" not in first.stdout.readline():  # the checkpoint of step 2 is written
            assert first.poll() is None
        first.kill()
    before = RunRecord.read(tmp_path / "run.json").rows[0]
    assert 2 <= (before.n or 0) < STEPS
    row = trained(tmp_path, 2, *flags)
    assert row.impl == "tp 2, dp 1"
    assert row.extra["first_step"] == 0
    assert row.extra["loss"] == pytest.approx(alone, abs=2e-3)
