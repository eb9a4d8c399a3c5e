"""docs/models.md: the table of families is the code's, the example of a new family works on a real one, the plan is real."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from crosscut.cli.main import main
from crosscut.model_config import ModelConfig
from crosscut.sharding import FAMILIES, Family, Role, cut_of
from crosscut.sharding.family import Registry

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
KNOWN = FAMILIES.all()
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


def words(roles: set[Role], names: dict[Role, str]) -> str:
    return ", ".join(dict.fromkeys(text for role, text in names.items() if role in roles)) or "-"


def line(family: Family) -> str:
    """A family's line of the table."""
    roles = {rule.role for rule in family.rules}
    shown = {rule.path for rule in family.rules}
    attention = {
        Role.QUERY: "q, k, v", Role.QKV: "q, k and v as one", Role.GROUPED_QKV: "as one, by KV head",
        Role.LATENT_QUERY: "latent",
    }  # fmt: skip
    norms = {
        Role.HEAD_NORM: "one for all heads", Role.QUERY_NORM: "one a head", Role.WIDE_QUERY_NORM: "over all heads",
    }  # fmt: skip
    gated = any("up_proj" in path and "experts" not in path for path in shown)
    dense = Role.COLUMN in roles and any("experts" not in p.path for p in family.rules if p.role is Role.COLUMN)
    mlp = ["gate and up as one"] * (Role.GATE_UP in roles) + ["gate, up, down" if gated else "two layers"] * dense
    mlp += ["experts"] * (Role.EXPERTS_DOWN in roles) + ["shared expert"] * any("shared_expert" in path for path in shown)
    if any(rule.transposed for rule in family.rules):
        mlp.append("stored [in, out]")
    cells = [family.name, ", ".join(f"`{t}`" for t in family.model_types), words(roles, attention), words(roles, norms)]
    return f"| {' | '.join([*cells, ', '.join(mlp)])} |"


def test_the_table_of_families_is_the_codes() -> None:
    found = re.search(r"<!-- families.*?-->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert found
    assert found[1].splitlines()[2:] == [line(family) for family in KNOWN]


def test_a_new_family_takes_under_20_lines_and_works_on_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's Granite, against transformers' parameters."""
    code = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "FAMILIES.register" in text)
    assert len(code.splitlines()) < 20
    registry = Registry()
    monkeypatch.setattr("crosscut.sharding.FAMILIES", registry)
    exec(code, {})
    hf: Any = AutoConfig.for_model(
        "granite", hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, intermediate_size=64,
        vocab_size=99, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    config = ModelConfig.from_dict(hf.to_dict())
    for name, parameter in model.named_parameters():
        place = cut_of(config, registry.of(config), name, tuple(parameter.shape))
        assert (place.role is Role.REPLICATED) == ("norm" in name)


def test_the_plan_shown_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```bash\n(crosscut plan .*?)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert found
    (tmp_path / "Qwen2-7B").mkdir()
    (tmp_path / "Qwen2-7B" / "config.json").write_text(json.dumps(QWEN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", found[1].split())
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 1
    assert [row.rstrip() for row in capsys.readouterr().out.splitlines()] == found[2].splitlines()


def test_the_errors_pages_unknown_model_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry()
    registry.register(*KNOWN)
    monkeypatch.setattr("crosscut.sharding.describe.FAMILIES", registry)
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    shown = page.split("## unknown-model\n")[1].split("```console\n$ crosscut plan ./model\n")[1].split("```")[0]
    (tmp_path / "model").mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 9}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "granite", **sizes}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["crosscut", "plan", "./model"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert capsys.readouterr().err == shown
