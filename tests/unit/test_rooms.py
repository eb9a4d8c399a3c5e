"""The rooms' rules that import-linter cannot state while some rooms are not yet built (it wants every module it names)."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

SOURCE = Path(__file__).parents[2] / "src" / "crosscut"
ROOMS = {
    "cli", "server", "bench", "diagnose", "planner", "report", "engine", "models", "layers", "collectives", "distributed",
    "kernels", "sharding", "records", "hardware", "model_config", "units", "env", "errors", "version",
}  # fmt: skip
FORBIDDEN = {
    "errors": {"torch"}, "units": {"torch"}, "env": {"torch"}, "records": {"torch"}, "hardware": {"torch"},
    "model_config": {"torch"},
    "sharding": {"torch", "crosscut.distributed", "crosscut.kernels"},
    "planner": {"torch"},
    "report": {"torch"},
    "kernels": {"crosscut.distributed", "crosscut.sharding"},
    "diagnose": {"crosscut.layers", "crosscut.models", "crosscut.engine"},
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def test_every_room_of_the_design_is_in_the_contract() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    named = {name for layer in layers for name in re.findall(r"\w+", layer)}
    assert named == ROOMS
    built = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert built - {"__init__"} <= ROOMS


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_import_nothing_they_must_not(room: str) -> None:
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else list((SOURCE / room).rglob("*.py"))
    for path in files:
        for module in imports(path):
            broken = [bad for bad in FORBIDDEN[room] if module == bad or module.startswith(f"{bad}.")]
            assert not broken, f"{path.relative_to(SOURCE)} imports {module}"


def test_only_env_reads_the_environment() -> None:
    """distributed hands the environment on to ranks and to torch; nobody else may even look."""
    allowed = {"env.py", "distributed"}
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in allowed:
            assert not re.search(r"os\.environ|os\.getenv", path.read_text()), f"{path} reads the environment"
