"""scripts/readme_tables: a table of each kind of layer record says what the record says."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from crosscut.records import Row
from report_samples import layer_rows, record, times, training_rows


@pytest.fixture
def script(tmp_path: Path) -> Any:
    loader = SourceFileLoader("readme_tables", str(Path(__file__).parents[2] / "scripts" / "readme_tables"))
    spec = spec_from_loader("readme_tables", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    module.ROOT = tmp_path  # type: ignore[attr-defined]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    return module


def test_each_name_picks_its_newest_record(script: Any, tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    for name in (
        "h200x2_linear_2026-01-01",
        "h200x2_linear_2026-02-01",
        "h200x2_linear_nccl_2026-03-01",
        "h200x2_mlp_2026-01-01",
    ):
        (folder / f"{name}.json").write_text("{}")
    assert script.newest("gpus").name == "h200x2_linear_2026-02-01.json"
    assert script.newest("gpus_mlp").name == "h200x2_mlp_2026-01-01.json"
    assert script.newest("gpus_block") is None


def test_an_mlps_table_has_both_passes_and_what_is_hidden(script: Any, tmp_path: Path) -> None:
    rows = [*layer_rows("graph", "mlp", "pair")[:7], *training_rows()]
    rows = [Row(**{**vars(row), "error": 1e-3}) for row in rows if row.subject == "mlp"]
    path = record(rows).write(tmp_path / "benchmarks" / "results" / "h200x2_mlp_2026-01-01.json")
    head, _, first, second, *_ = script.table(path).splitlines()
    assert head == (
        "| bfloat16, tokens x in -> out | single, us | textbook, us | nccl, us | dtensor, us | crosscut, us | crosscut_sp, us "
        "| hidden | error |"
    )
    assert first.startswith("| 1 x 4096 -> 14336 -> 4096 | 12.1 |")
    assert second == "| 8 x 8 -> 16 -> 8, with backward | 30 | - | 24 (1.25x) | - | 20 (1.50x) | 26 (1.15x) | 50% | 1.0e-03 |"


def test_a_blocks_table(script: Any, tmp_path: Path) -> None:
    shape = {"tokens": 8, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 32}
    rows = [
        Row("block", impl, "graph", n, "bfloat16", shape, us=times(30 / n), error=1e-3)
        for impl, n in (("single", 1), ("crosscut", 2))
    ]
    path = record(rows).write(tmp_path / "benchmarks" / "results" / "h200x2_block_2026-01-01.json")
    line = script.table(path).splitlines()[2]
    assert line == "| 8 tokens, 16 hidden, 4 heads, 2 KV heads, 32 ffn | 30 | 15 (2.00x) | 1.0e-03 |"
