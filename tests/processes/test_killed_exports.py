"""A save of a whole model that SIGKILL ends, at any moment, leaves the old directory whole, or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import killed_exports


def test_a_killed_save_leaves_a_whole_directory(tmp_path: Path) -> None:
    script = Path(killed_exports.__file__)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == killed_exports.MOMENTS.keys()
    for moment, (killed, equal, again, left) in found.items():
        assert killed, f"{moment}: the save ended before it was killed"
        assert equal, moment
        assert again, moment
        assert left == ["0", "1", "model"], moment
