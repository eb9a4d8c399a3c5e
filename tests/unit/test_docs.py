"""The documentation holds: its code runs, its links lead somewhere, its command lines parse, its messages are real."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from crosscut.cli.app import app
from crosscut.cli.main import main
from crosscut.errors import CODES
from crosscut.records import Hardware, Row, RunRecord, Times
from crosscut.sharding import FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
RUN = [page for page in PAGES if page in DOCS or page.name == "README.md"]
LAUNCHERS = ("torchrun", "srun", "mpirun")
OPERATORS = ("|", "||", "&&", "&", ";", ">", ">>", "<")
VARIABLES = r'"((?:RANK|WORLD|LOCAL|MASTER|SLURM|PMI|PMIX|OMPI|MPI|TORCHELASTIC|PBS|LSB|CROSSCUT)(?:_\w*[A-Z])?)"'


class Block(NamedTuple):
    """One fenced block. ``output`` is the text block that follows at once, None when there is none."""

    language: str
    text: str
    line: int
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fence = r"^```(\w*)[^\n]*\n(.*?)^```$(?=(?:\n+```text\n(.*?)^```$)?)"
    found = re.finditer(fence, text, re.DOTALL | re.MULTILINE)
    return [Block(match[1], match[2], text.count("\n", 0, match.start(2)), match[3]) for match in found]


def run_python(page: Path) -> int:
    """Run the page's python blocks in order, as one reader would; compare what they print. How many there were."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    python = [block for block in blocks(page) if block.language == "python"]
    for block in python:
        printed = io.StringIO()
        code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
        with redirect_stdout(printed):
            exec(code, namespace)
        assert block.output in (None, printed.getvalue()), f"{page.name}, line {block.line}: printed {printed.getvalue()}"
    return len(python)


def broken_links(page: Path) -> list[str]:
    """Relative links of the page whose file or heading is not there."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(page: Path) -> list[str]:
    """The shell lines of the page: of console blocks what stands behind the prompt, of bash blocks all."""
    lines = []
    for block in blocks(page):
        whole = block.text.replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines += [line[2:] for line in whole if line.startswith("$ ")]
        elif block.language in ("bash", "sh", "shell"):
            lines += whole
    return lines


def arguments(line: str) -> list[str] | None:
    """The arguments of the crosscut command in ``line``, started plainly or by a launcher; None when there is none."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    starts = [i for i, word in enumerate(words) if Path(word).name == "crosscut"]
    if not starts or not (starts[0] == 0 or words[0] in LAUNCHERS):
        return None
    rest = words[starts[0] + 1 :]
    end = next((i for i, word in enumerate(rest) if word in OPERATORS), len(rest))
    return rest[:end]


def parse(args: list[str]) -> None:
    """Have the program's own parser read ``args``, and run nothing. Raises the parser's error."""

    def silence(command: Any) -> None:
        command.callback = lambda **_: None
        for inner in getattr(command, "commands", {}).values():
            silence(inner)

    program = typer.main.get_command(app)
    silence(program)
    program.main(args, prog_name="crosscut", standalone_mode=False)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FAMILIES, "_families", dict(FAMILIES._families))  # a page registers a table of its own
    run_python(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_parse(page: Path) -> None:
    for line in command_lines(page):
        args = arguments(line)
        if args:
            parse(args)


def unwritten(page: Path) -> list[str]:
    """Records that a page has `crosscut report` read before any of its commands wrote them with --out."""
    written, missing = set[str](), []
    for args in filter(None, map(arguments, command_lines(page))):
        written |= {args[i + 1] for i, word in enumerate(args[:-1]) if word == "--out"}
        if args[0] == "report":
            missing += [word for word in args[1:] if word.endswith(".json") and word not in written]
    return missing


@pytest.mark.parametrize("page", [page for page in RUN if page.name != "errors.md"], ids=lambda page: page.name)
def test_a_reader_has_the_records_that_a_page_draws(page: Path) -> None:
    assert [name for name in unwritten(page) if name.islower()] == []


def test_these_checks_see_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A Title: one\n\n[a](nowhere.md) [b](#a-title-one) [c](page.md#two) [d](https://x.org) `[e](f)`\n")
    assert broken_links(page) == ["nowhere.md", "page.md#two"]
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="printed 1"):
        run_python(page)
    page.write_text("```python\nx = 1\n```\nand\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_python(page)
    page.write_text("```bash\nA=1 crosscut report \\\n  x.json | cat # read\npip install crosscut\n```\n")
    assert [arguments(line) for line in command_lines(page)] == [["report", "x.json"], None]
    assert unwritten(page) == ["x.json"]
    assert arguments("torchrun --no-python crosscut bench linear --tp 2") == ["bench", "linear", "--tp", "2"]


@pytest.mark.parametrize("line", ["bench linear --no-such-flag", "bench nothing", "nothing", "bench linear --tp two", "report"])
def test_wrong_command_lines_do_not_parse(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|valid integer"):
        parse(line.split())


def test_errors_page_has_each_code_once_and_no_other() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert headings == list(CODES)


SHOWN = ("tp-mismatch", "bad-shape", "bad-dtype", "bad-option", "bad-env", "file-missing", "file-unreadable")
"""Codes whose example gives the same message on every machine, before any rank starts."""


@pytest.mark.parametrize("code", SHOWN)
def test_messages_of_the_errors_page_are_real(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = tmp_path / "section.md"
    section.write_text((ROOT / "docs" / "errors.md").read_text().split(f"## {code}\n")[1].split("\n## ")[0])
    console = next(block.text for block in blocks(section) if block.language == "console")
    command = command_lines(section)[-1]
    (tmp_path / "notes.json").write_text("hi\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # main sets it: undone after the test
    for name, value in re.findall(r"(\w+)=(\S+) ", command.partition("crosscut")[0]):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["crosscut", *(arguments(command) or ())])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = [line for line in console.splitlines() if not line.startswith("$ ")]
    assert capsys.readouterr().err.splitlines() == shown
    assert f"[{code}]" in shown[0]


@pytest.mark.parametrize("kind", [RunRecord, Row, Hardware, Times])
def test_records_page_explains_each_field(kind: Any) -> None:
    tables = "".join(re.findall(r"^\|.*$", (ROOT / "docs" / "records.md").read_text(), re.MULTILINE))
    assert [field.name for field in fields(kind) if f"`{field.name}`" not in tables] == []


def test_launching_page_names_each_variable_that_is_read() -> None:
    names = set(re.findall(VARIABLES, (ROOT / "src" / "crosscut" / "env.py").read_text()))
    text = (ROOT / "docs" / "launching.md").read_text()
    assert {"RANK", "SLURM_STEPID", "CROSSCUT_TIMEOUT", "PMI_JOBID", "LSB_JOBID"} <= names
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_readmes_tables_are_made_from_the_records() -> None:
    script = Path(__file__).parents[2] / "scripts" / "readme_tables"
    run = subprocess.run([sys.executable, str(script), "--check"], check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
