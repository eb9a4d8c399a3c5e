"""SmolLM2-135M-Instruct, a real model for several tests here, fetched once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's directory, fetched and converted when it is not there; skipped where that is not possible."""
    script, environment = ROOT / "scripts" / "fetch_smollm2", {**os.environ, "PYTHON": sys.executable}
    fetched = subprocess.run([script], check=False, env=environment, text=True, capture_output=True, timeout=150)
    if fetched.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched here: {fetched.stderr.strip()[-300:]}")
    return Path(fetched.stdout.strip())
