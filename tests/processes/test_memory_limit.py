"""The out-of-memory case that sequence parallelism cures, in a process whose address space is limited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SCRIPT = """
import sys
import torch
from crosscut.bench.block_memory import GPTBlock, _Stack, limited
from rank_threads import run_ranks

gpt = GPTBlock(batch=64, tokens=128, hidden=64, heads=4, number=4, statistic=4)

def body(mesh, sequence_parallel, layers):
    _Stack(gpt, mesh, torch.float32, sequence_parallel, layers).both()

run_ranks(4, body, True, 1)  # what libraries take at their first call is not the layers'
with limited(torch.device("cpu"), int(sys.argv[1])):
    for sequence_parallel in (True, False):
        try:
            run_ranks(4, body, sequence_parallel, 8)
            print("fits")
        except RuntimeError as error:
            print("memory" if "can't allocate memory" in str(error) else repr(error))
"""


def test_layers_that_do_not_fit_whole_fit_with_sequence_parallelism() -> None:
    """Eight layers keep 600 MB on four ranks together, with sequence parallelism 300 MB; beside it what one layer works on."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-c", SCRIPT, str(525 << 20)]
    run = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["fits", "memory"]
