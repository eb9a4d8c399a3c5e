"""docs/complaints.md names tests that exist and whose docstrings name the complaint."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", (ROOT / "docs" / "complaints.md").read_text(), re.MULTILINE)


def docstring(test: str) -> str:
    """Of ``file.py::function`` below tests/ranks. KeyError when there is no such function."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / "ranks" / file).read_text(encoding="utf-8"))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return ast.get_docstring(found[name]) or ""


def unnamed(complaint: str, test: str) -> list[str]:
    """The reports of a row's first cell, such as 'TGI issue 1036', that the test's docstring does not name."""
    text = " ".join(docstring(test).split())
    reports = [part.strip() for part in complaint.partition(":")[0].split(";")]
    assert all(re.search(r" (issue|issues|PR) \d+", report) for report in reports), complaint
    return [report for report in reports if not re.search(rf"{re.escape(report)}\b", text)]


@pytest.mark.parametrize(("complaint", "test"), ROWS, ids=[test for _, test in ROWS])
def test_each_complaint_has_a_test_that_names_it(complaint: str, test: str) -> None:
    assert unnamed(complaint, test) == []


def test_every_row_of_the_table_was_read() -> None:
    lines = [line for line in (ROOT / "docs" / "complaints.md").read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(lines) - 1 >= 19


def test_these_checks_see_faults() -> None:
    with pytest.raises(KeyError):
        docstring("test_complaints.py::test_that_is_not_there")
    assert unnamed("TGI issue 1: wrong", "test_complaints.py::test_a_row_bias_counts_once") == ["TGI issue 1"]
