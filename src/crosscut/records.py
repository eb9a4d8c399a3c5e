"""RunRecord: what a measurement leaves behind, and the only thing that reports and planners read.

One record is one JSON object (schema ``crosscut.record/1``). Times are microseconds over iterations, each iteration
the slowest rank's; ``bytes`` is of the whole tensor (for all_gather the gathered one, for reduce_scatter the input);
``error`` is relative to a float64 reference, ||out - ref|| / ||ref||.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crosscut.env import settings
from crosscut.errors import UsageError
from crosscut.version import __version__

SCHEMA = "crosscut.record/1"


@dataclass(frozen=True)
class Times:
    """Percentiles of one call, in microseconds."""

    p10: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        """Percentiles of ``samples`` by the nearest-rank rule; ``samples`` holds at least one number."""
        ordered = sorted(samples)

        def at(q: float) -> float:
            return round(ordered[max(0, math.ceil(q * len(ordered)) - 1)], 3)

        return cls(at(0.10), at(0.50), at(0.90), at(0.99))


@dataclass(frozen=True)
class Row:
    """One measured thing. Fields that do not apply are None and absent from the JSON."""

    subject: str
    impl: str
    mode: str
    world: int
    dtype: str
    shape: dict[str, int] | None = None
    bytes: int | None = None
    us: Times | None = None
    n: int | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    error: float | None = None
    path: str | None = None
    note: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """The devices of one host. ``links[i][j]`` describes the link between devices i and j (see distributed.topology)."""

    device: str
    count: int
    links: list[list[str]] = field(default_factory=list)
    driver: str | None = None

    @property
    def label(self) -> str:
        """``'2 x NVIDIA H200'``; of one CPU that ranks share: ``'CPU, 2 threads, AMD EPYC, 2 ranks'``."""
        if str(self.device).startswith("CPU"):
            return f"{self.device}, {self.count} {'rank' if self.count == 1 else 'ranks'}"
        return f"{self.count} x {self.device}"


@dataclass(frozen=True)
class RunRecord:
    """What ran, on what, with what, and what came out."""

    command: str
    config: dict[str, Any]
    hardware: Hardware
    versions: dict[str, str]
    rows: list[Row]
    commit: str | None = None
    started: str = ""
    notes: list[str] = field(default_factory=list)
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The record as indented JSON, one row a line, without absent fields."""
        head = {k: v for k, v in _plain(self).items() if k != "rows"}
        lines = ",\n".join("    " + json.dumps(_plain(row), allow_nan=False) for row in self.rows)
        rows = f"[\n{lines}\n  ]" if self.rows else "[]"
        body = json.dumps(head, indent=2, allow_nan=False)
        return body.removesuffix("\n}") + f',\n  "rows": {rows}\n}}\n'

    def write(self, path: str | Path) -> Path:
        """Write the record to ``path`` whole or not at all, and return the path.

        Raises UsageError (``file-missing``, ``bad-option``) when it cannot be written.
        """
        return write_file(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, source: str = "record") -> RunRecord:
        """Read a record back. Raises UsageError (``file-unreadable``) that says what is wrong with it."""

        def bad(why: str) -> UsageError:
            return UsageError(
                f"{source} is not a crosscut record: {why}",
                code="file-unreadable",
                fix="give a file that a crosscut command wrote (crosscut bench ... --out FILE)",
            )

        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise bad(f"not JSON ({error})") from None
        if not isinstance(data, dict):
            raise bad("not a JSON object")
        if data.get("schema") != SCHEMA:
            raise bad(f"its schema is {data.get('schema')!r}, this version reads {SCHEMA!r}")
        try:
            rows = [_row(row) for row in data.pop("rows")]
            hardware = Hardware(**data.pop("hardware"))
            return cls(rows=rows, hardware=hardware, **data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise bad(f"a field is missing or unknown ({error})") from None

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read the record in file ``path``. Raises UsageError (``file-missing``, ``file-unreadable``)."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except IsADirectoryError:
            raise UsageError(f"{str(path)!r} is a folder", code="file-missing", fix="name the record in it") from None
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"there is no file {str(path)!r}", code="file-missing", fix="check the path") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{str(path)!r} cannot be read: {error}", code="file-unreadable", fix="check the file") from None
        return cls.from_json(text, source=repr(str(path)))


def write_file(path: str | Path, text: str) -> Path:
    """Write ``text`` to the file ``path`` whole or not at all, and return the path; an existing file is replaced.

    What is no regular file (``/dev/null``, a pipe) is written to and stays what it is, and so does the
    file that ``/dev/stdout`` leads to. Raises as :func:`check_target`.
    """
    target = check_target(path)
    data = text.encode(errors="backslashreplace")  # what a file's odd name left in it
    try:
        if _stays(target):
            number = _descriptor(target)
            with open(target if number is None else os.dup(number), "wb") as out:
                out.write(data)
            return target
        place = target.resolve()  # a link stays one
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=".crosscut", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise _unwritable(target, error) from None
    return target


def check_target(path: str | Path) -> Path:
    """``path`` as a place where a file can be written. Raises UsageError (``file-missing``, ``bad-option``).

    Commands ask before they measure, so that no result is lost to a typo.
    """
    target = Path(path)
    try:
        if not target.parent.is_dir():
            raise UsageError(f"the folder {str(target.parent)!r} does not exist", code="file-missing", fix="create it first")
        if target.is_dir():
            raise UsageError(f"{str(target)!r} is a folder", code="bad-option", fix="give the name of a file")
        if not _stays(target):  # asking for permission is not enough: root has it even where nothing can be written
            with tempfile.NamedTemporaryFile(dir=target.resolve().parent, prefix=".crosscut", suffix=".part"):
                pass
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead round in a circle
        raise _unwritable(target, error) from None
    return target


def _stays(target: Path) -> bool:
    """Whether ``target`` is written to as it is, and not replaced by a new file."""
    return target.exists() and (not target.is_file() or _descriptor(target) is not None)


def _descriptor(target: Path) -> int | None:
    """The number of the open file that ``/dev/stdout`` and its kin name; it may be a regular one that holds more already."""
    name = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}.get(str(target), str(target))
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", name)
    return None if match is None else int(match.group(1))


def _unwritable(target: Path, error: OSError | RuntimeError) -> UsageError:
    why = error.strerror if isinstance(error, OSError) else error
    return UsageError(
        f"{str(target)!r} cannot be written: {why}", code="bad-option", fix="name another file, or make room for it"
    )


def _row(row: dict[str, Any]) -> Row:
    us, error = row.get("us"), row.get("error")
    return Row(**{**row, "us": Times(**us) if us else None, "error": None if error is None else float(error)})


def _plain(value: Any) -> Any:
    """Dataclasses to dicts without None and empty fields, floats to at most six significant digits."""
    if dataclasses.is_dataclass(value):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        kept = {k: _plain(v) for k, v in pairs if v is not None}
        return {k: v for k, v in kept.items() if k not in ("extra", "notes") or v}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def base_versions() -> dict[str, str]:
    """The versions known without torch: python and crosscut."""
    return {"python": platform.python_version(), "crosscut": __version__}


def source_commit() -> str | None:
    """The commit of the checkout that crosscut runs from ('-dirty' when it has local changes).

    Outside a checkout what CROSSCUT_COMMIT says, else None.
    """
    here = Path(__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in here.parents):
        return settings().commit

    def git(*args: str) -> str | None:
        try:
            run = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return run.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
