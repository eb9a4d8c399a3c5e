"""Records as one web page that needs nothing else: styles, script, plotly.js, figures and the records are all inside.

The page makes no network request (its own Content-Security-Policy forbids them), so it can be mailed, archived and
opened on a machine without a network. Everything that comes from a record is escaped: text by jinja2, JSON inside
``<script>`` by :func:`embed`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscut.errors import UsageError
from crosscut.records import RunRecord, check_target, write_file
from crosscut.report import tables
from crosscut.report.compare import compare_records, comparison_sheet, sentences

if TYPE_CHECKING:
    from crosscut.report.plots import Chart

HERE = Path(__file__).resolve().parent
MOST_NAMED = 4
"""Subjects that the title names."""


def render(records: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """The page of ``records`` as a string; ``labels`` (one a record) tell several apart in charts and headings.

    Raises UsageError (``extra-missing``) when plotly or jinja2 is not installed.
    """
    assert len(records) == len(labels) > 0, "one label for each record"
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from plotly.offline import get_plotlyjs

        from crosscut.report.plots import charts
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a report needs {str(error.name).partition('.')[0]}, which is not installed",
            code="extra-missing",
            fix="pip install 'crosscut[report]'",
        ) from None
    loader = FileSystemLoader(HERE)
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawn = charts(records, labels)
    return env.get_template("page.html.j2").render(
        title=title(records),
        sections=[_section(record, label) for record, label in zip(records, labels, strict=True)],
        comparisons=[_comparison(records, labels, other) for other in range(1, len(records))],
        charts=drawn,
        figures=embed(_figures(drawn)),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )


def title(records: Sequence[RunRecord]) -> str:
    """``'linear, mlp on 2 x NVIDIA H200'``, or the number of records when there are several."""
    if len(records) > 1:
        return f"{len(records)} crosscut records side by side"
    subjects = list(dict.fromkeys(row.subject for row in records[0].rows if row.subject not in ("fit", "crossover", "verdict")))
    layers = [subject for subject in subjects if subject in tables.LAYERS]
    named = layers or subjects
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"{', '.join(named[:MOST_NAMED]) or 'no rows'}{more} on {records[0].hardware.label}"


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """What ran, on what and with what, as pairs of a name and a text; facts that are not known are left out."""
    hardware = record.hardware
    chosen = [f"{name} {_text(value)}" for name, value in record.config.items() if value not in (None, [], {})]
    pairs = [
        ("Command", record.command),
        ("Settings", ", ".join(chosen)),
        ("Hardware", hardware.label),
        ("Driver", hardware.driver),
        ("Versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("Commit", record.commit),
        ("Started", record.started),
    ]
    return [(name, str(text)) for name, text in pairs if text]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _section(record: RunRecord, label: str) -> dict[str, Any]:
    """What the template shows of one record."""
    return {
        "label": label,
        "notes": record.notes,
        "facts": facts(record),
        "links": record.hardware.links,
        "sheets": tables.sheets(record),
        "json": embed(record.to_json()),
    }


def _comparison(records: Sequence[RunRecord], labels: Sequence[str], other: int) -> dict[str, Any]:
    """What the template shows of the first record (A) next to another one (B)."""
    comparison = compare_records(records[0], records[other])
    return {
        "sentences": sentences(comparison, [labels[0], labels[other]]),
        "sheets": [comparison_sheet(comparison)] if comparison.matches else [],
    }


def _figures(drawn: Sequence[Chart]) -> str:
    return "{" + ",".join(f"{json.dumps(chart.id)}:{chart.figure.to_json()}" for chart in drawn) + "}"


def embed(text: str) -> str:
    """JSON text that is safe inside ``<script>`` and reads back as the same value.

    ``<``, ``>`` and ``&`` occur only inside JSON strings, where their ``\\u`` escapes mean the same; without ``<`` no
    ``</script>`` and no comment can end or hide the rest of the page.
    """
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def write(paths: Sequence[Path], out: Path) -> Path:
    """Read the records in ``paths``, write their page to ``out`` whole or not at all, and return ``out``.

    Raises UsageError: ``file-missing`` (a record, or the folder of ``out``), ``file-unreadable`` (not a record),
    ``bad-option`` (``out`` is a folder, one of the records or cannot be written; no record given), ``extra-missing``.
    """
    if not paths:
        raise UsageError("no record was given", code="bad-option", fix="name a file that a crosscut command wrote")
    check_target(out)
    if out.exists() and any(path.exists() and path.samefile(out) for path in paths):
        raise UsageError(
            f"the page would replace the record {str(out)!r}",
            code="bad-option",
            fix="give --out another name, as page.html",
        )
    return write_file(out, render(*load(paths)))


def load(paths: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """The records in ``paths`` with a label for each. Raises UsageError (``file-missing``, ``file-unreadable``)."""
    records = [_read(path) for path in paths]
    return records, _labels(records, paths)


def _labels(records: Sequence[RunRecord], paths: Sequence[Path]) -> list[str]:
    """A label for each record, with its file's name where two would be equal, and its place where even those are."""
    names = [tables.label(record) for record in records]
    named = [f"{name} ({path.name})" if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]
    return [f"{name} #{i + 1}" if named.count(name) > 1 else name for i, name in enumerate(named)]


def _read(path: Path) -> RunRecord:
    """The record in ``path``, whose fields hold the kinds of values that a report walks through."""
    record = RunRecord.read(path)
    kinds: list[tuple[str, Any, type | tuple[type, ...]]] = [
        ("command", record.command, str),
        ("commit", record.commit, (str, type(None))),
        ("started", record.started, str),
        ("config", record.config, dict),
        ("versions", record.versions, dict),
        ("notes", record.notes, list),
        ("hardware.links", record.hardware.links, list),
        *((f"hardware.links[{i}]", link, list) for i, link in enumerate(_each(record.hardware.links))),
    ]
    for i, row in enumerate(record.rows):
        kinds += [
            *((f"rows[{i}].{name}", getattr(row, name), str) for name in ("subject", "impl", "mode", "dtype")),
            (f"rows[{i}].world", row.world, int),
            (f"rows[{i}].bytes", row.bytes, (int, type(None))),
            (f"rows[{i}].path", row.path, (str, type(None))),
            (f"rows[{i}].extra", row.extra, dict),
            (f"rows[{i}].extra.split", dict(_items(row.extra)).get("split"), (str, type(None))),
            (f"rows[{i}].shape", row.shape, (dict, type(None))),
            *((f"rows[{i}].shape.{name}", size, int) for name, size in _items(row.shape)),
        ]
    for where, value, kind in kinds:
        if not isinstance(value, kind):
            raise UsageError(
                f"{str(path)!r} is not a crosscut record: its {where} is {value!r}",
                code="file-unreadable",
                fix="give a file that a crosscut command wrote (crosscut bench ... --out FILE)",
            )
    return record


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
