"""A save that SIGKILL ends, at any moment, leaves the older checkpoint whole and a later save possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import killed_saves


def test_a_killed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    script = Path(killed_saves.__file__)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == killed_saves.MOMENTS.keys()
    for moment, (killed, notes, equal, again, left) in found.items():
        assert killed, f"{moment}: the save ended before it was killed"
        assert notes == {"step": "1"}, moment
        assert equal, moment
        assert again == {"step": "3"}, moment
        assert left in (["weights"], ["dcp", "weights"]), moment
