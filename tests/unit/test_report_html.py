"""The page and the command: self-contained, escaped, written whole, and clear about what a user got wrong."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from crosscut.cli.report import report
from crosscut.errors import UsageError
from crosscut.records import RunRecord
from crosscut.report.html import embed, facts, render, title, write
from report_samples import bench_record, collectives_record, layer_rows, linear_record, record


class Page(HTMLParser):
    """Tags with their attributes, the text outside scripts and styles, and the JSON scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag in ("script", "style"):
            self._inside = values.get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        else:
            self.data[self._inside] = self.data.get(self._inside, "") + data


def test_order_of_the_page() -> None:
    run = linear_record()
    page = render([run], ["a"])
    order = ("<h1>", run.notes[0].replace("'", "&#39;"), "How it was measured", "NV18", "<h2>Charts", "<h2>Tables", "Raw data")
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    assert title([run]) == "linear, mlp on 2 x NVIDIA H200"


def test_everything_is_inside_and_nothing_is_fetched() -> None:
    page = Page(render([linear_record()], ["a"]))
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "embed", "base"), tag
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_the_record_and_the_figures_read_back() -> None:
    runs = [linear_record(), collectives_record()]
    page = Page(render(runs, ["a", "b"]))
    assert [RunRecord.from_json(page.data[f"record-{i}"]).notes for i in (1, 2)] == [run.notes for run in runs]
    assert len(RunRecord.from_json(page.data["record-1"]).rows) == len(runs[0].rows)
    plots = [a["id"] for tag, a in page.tags if tag == "div" and a.get("class") == "plot"]
    assert list(json.loads(page.data["figures"])) == plots
    assert len(plots) == len([a for tag, a in page.tags if a.get("class") == "png"]) >= 14


def test_the_title_names_a_few_subjects_and_no_conclusions() -> None:
    assert title([bench_record()]) == "all_reduce, pair, simulate on 2 x NVIDIA H200"
    rows = [replace(bench_record().rows[0], subject=subject) for subject in "abcdef"]
    assert title([record(rows)]) == "a, b, c, d and 2 more on 2 x NVIDIA H200"


def test_facts_leave_out_what_is_not_known() -> None:
    names = [name for name, _ in facts(record([], commit=None, started="", config={"source": None, "modes": []}))]
    assert names == ["Command", "Hardware", "Driver", "Versions"]
    assert dict(facts(linear_record()))["Settings"] == "tp 2, dtype bfloat16, tokens [1, 32, 512, 4096]"


TEXT = st.text(st.sampled_from("<>&'\"/!-sciptSCRIPT{}%\\\u2028 "), max_size=30)


@given(TEXT)
def test_embedded_json_reads_back_and_cannot_end_the_script(text: str) -> None:
    safe = embed(json.dumps({text: text}))
    assert json.loads(safe) == {text: text}
    assert not set(safe) & set("<>&")


@pytest.mark.parametrize("hostile", ["</script><script>alert(1)</script>", "<!--<script>", "{{ 7*7 }}", "\"'><img src=x>"])
def test_hostile_text_stays_text(hostile: str) -> None:
    rows = [row for row in layer_rows("graph") if row.shape and row.shape["tokens"] == 1]
    calm = Page(render([record(rows)], ["a"]))
    changes = {"notes": [hostile], "commit": hostile, "command": hostile, "config": {hostile: hostile}}
    page = Page(render([record(rows, versions={hostile: hostile}, **changes)], [hostile]))
    assert page.text.count(hostile) >= 6
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in calm.tags} | {"p"}
    assert [tag for tag, _ in page.tags].count("script") == [tag for tag, _ in calm.tags].count("script")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, child in items for found in ((*path, key), *leaves(child, (*path, key)))]


SMALL = json.loads(record([row for row in layer_rows("graph") if row.bytes or row.shape["tokens"] == 1][:8]).to_json())  # type: ignore[index]
ONE_OF_EACH = {(row.subject, row.bytes is not None and row.bytes < 5000): row for row in bench_record().rows}
CONCLUDED = json.loads(record(list(ONE_OF_EACH.values()), notes=[]).to_json())
JUNK = st.sampled_from([None, True, -1, 0, 1e308, 10**30, "", "inf", "x", [], [1], [[]], {}, {"a": 1}, {"split": []}])


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([(whole, path) for whole in (SMALL, CONCLUDED) for path in leaves(whole)]), JUNK)
def test_a_damaged_record_is_drawn_or_refused_but_never_crashes(tmp_path_factory: Any, spot: Any, junk: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole, path = spot
    damaged = json.loads(json.dumps(whole))
    inner = damaged
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    (folder / "damaged.json").write_text(json.dumps(damaged), encoding="utf-8")
    (folder / "whole.json").write_text(json.dumps(whole), encoding="utf-8")
    refusal: UsageError | None = None
    try:
        write([folder / "damaged.json", folder / "whole.json"], folder / "damaged.html")
    except UsageError as error:
        refusal = error
    assert refusal is None or (refusal.code == "file-unreadable" and "damaged.json" in refusal.message)


def test_write_replaces_whole_and_tells_equal_records_apart(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("old", encoding="utf-8")
    files = [collectives_record().write(tmp_path / name) for name in ("a.json", "b.json")]
    assert write([*files, files[0]], out) == out
    page = out.read_text(encoding="utf-8")
    for name in ("(a.json) #1", "(b.json)", "(a.json) #3"):
        assert name in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json", "page.html"]


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    out = tmp_path / "page.html"
    out.write_text("old", encoding="utf-8")
    source = collectives_record().write(tmp_path / "a.json")
    monkeypatch.setattr("crosscut.records.os.replace", refuse)
    with pytest.raises(UsageError, match=r"page\.html.*cannot be written: Permission denied"):
        write([source], out)
    assert out.read_text(encoding="utf-8") == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "page.html"]


@pytest.mark.parametrize(
    ("content", "out", "code", "words"),
    [
        (None, "page.html", "file-missing", "there is no file"),
        ("{}", "page.html", "file-unreadable", "its schema is None"),
        ("not json", "page.html", "file-unreadable", "not JSON"),
        (SMALL | {"notes": "one"}, "page.html", "file-unreadable", "its notes is 'one'"),
        (SMALL, "nowhere/page.html", "file-missing", "nowhere' does not exist"),
        (SMALL, ".", "bad-option", "is a folder"),
    ],
)
def test_what_a_user_gets_wrong(tmp_path: Path, content: Any, out: str, code: str, words: str) -> None:
    source = tmp_path / "record.json"
    if content is not None:
        source.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        write([source], tmp_path / out)
    assert caught.value.code == code
    assert caught.value.fix
    assert not (tmp_path / "page.html").exists()


def test_a_page_never_replaces_a_record(tmp_path: Path) -> None:
    sources = [collectives_record().write(tmp_path / name) for name in ("a.json", "b.json")]
    before = sources[1].read_text(encoding="utf-8")
    with pytest.raises(UsageError, match=r"would replace the record .*b\.json") as caught:
        write(sources, tmp_path / "." / "b.json")
    assert caught.value.code == "bad-option"
    assert sources[1].read_text(encoding="utf-8") == before


@pytest.mark.parametrize("library", ["jinja2", "plotly"])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str) -> None:
    source = collectives_record().write(tmp_path / "a.json")
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "crosscut.report.plots", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=library) as caught:
        write([source], tmp_path / "page.html")
    assert (caught.value.code, caught.value.fix) == ("extra-missing", "pip install 'crosscut[report]'")


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report)
    source, out = collectives_record().write(tmp_path / "a.json"), tmp_path / "page.html"
    result = CliRunner().invoke(app, [str(source), "-o", str(out)])
    assert (result.exit_code, result.stdout.strip()) == (0, str(out))
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    failed = CliRunner().invoke(app, [str(tmp_path / "none.json"), "--out", str(out)])
    assert isinstance(failed.exception, UsageError), "left to main, which prints it"
