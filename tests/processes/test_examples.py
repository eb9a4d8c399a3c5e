"""Every example runs as its reader would run it: with plain python, and with torchrun on two gloo ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 90.0


def _environment() -> dict[str, str]:
    """For a command on the CPU, with nothing in it that makes it somebody's rank."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("command", [(sys.executable,), TORCHRUN], ids=["python", "torchrun"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example: Path, command: tuple[str, ...]) -> None:
    if command is TORCHRUN and example.name == "train_tiny_llama.py":
        pytest.skip("test_train_example.py runs it on ranks")
    done = _run(*command, str(example))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_first_split_says_what_each_rank_holds() -> None:
    first, last = _run(*TORCHRUN, str(EXAMPLES[0].with_name("first_split.py"))).stdout.splitlines()
    assert first == "2 rank(s); rank 0 holds [128, 64] of up's [256, 64]"
    assert 0 < float(last.split()[2].rstrip(",")) < 1e-5


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('activation="gelu"', 'activation="relu"'),
        ("up.weight.grad[mine]", "up.weight.grad[mine].flip(0)"),
        ("down.bias.grad),", "down.bias.grad * 1.001),"),
    ],
)
def test_first_split_sees_a_planted_fault(tmp_path: Path, right: str, wrong: str) -> None:
    text = EXAMPLES[0].with_name("first_split.py").read_text()
    assert text.count(right) == 1
    faulty = tmp_path / "faulty.py"
    faulty.write_text(text.replace(right, wrong))
    done = _run(sys.executable, str(faulty))
    assert done.returncode == 1
    assert "the split MLP differs" in done.stderr
