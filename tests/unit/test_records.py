"""Records: what is written is what is read; units and hardware as people write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.env import settings
from crosscut.errors import CODES, RankError, UsageError
from crosscut.hardware import find_gpu
from crosscut.records import SCHEMA, Hardware, Row, RunRecord, Times, base_versions, check_target, now, write_file
from crosscut.units import format_gain, format_size, format_us, parse_size


def record(**row: object) -> RunRecord:
    rows = [Row("linear", "single", "eager", 1, "float32", {"tokens": 1, "in": 2, "out": 3}, us=Times.of([3.0, 1.0, 2.0]))]
    if row:
        rows.append(Row("all_reduce", "nccl", "graph", 2, "bfloat16", bytes=64, **row))  # type: ignore[arg-type]
    return RunRecord("bench linear", {"tp": 2}, Hardware("cpu", 1), base_versions(), rows, started=now(), notes=["a note"])


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    written = record(error=1.25e-7, algbw_gbps=3.5, extra={"split": "row"})
    path = written.write(tmp_path / "r.json")
    assert RunRecord.read(path) == written
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert json.loads(path.read_text())["schema"] == SCHEMA
    assert "NaN" not in record(error=float("nan")).to_json()
    assert RunRecord.from_json(record(error=float("inf")).to_json()).rows[1].error == float("inf")


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50))
def test_percentiles_are_samples_in_order(samples: list[float]) -> None:
    times = Times.of(samples)
    assert times.p10 <= times.p50 <= times.p90 <= times.p99
    assert times.p99 == round(max(samples), 3)
    assert round(min(samples), 3) <= times.p50


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "its schema is None"),
        (json.dumps({"schema": SCHEMA}), "a field is missing"),
        (record().to_json().replace('"command"', '"comand"'), "a field is missing or unknown"),
        (record().to_json().replace('"impl": "single"', '"imp": "single"'), "a field is missing or unknown"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        RunRecord.read(path)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        RunRecord.read(tmp_path / "nope.json")
    with pytest.raises(UsageError, match="is a folder"):
        RunRecord.read(tmp_path)
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        record().write(tmp_path / "nope" / "r.json")
    with pytest.raises(UsageError, match="is a folder"):
        record().write(tmp_path)


def test_a_place_that_cannot_be_written_is_refused_before_and_after() -> None:
    for write in (check_target, record().write):  # the first is asked before a measurement, so that none is lost
        with pytest.raises(UsageError, match=r"'/proc/r.json' cannot be written: .") as caught:
            write("/proc/r.json")
        assert caught.value.code == "bad-option"


def test_a_name_is_refused_only_when_the_system_does(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name, words in (("n" * 256, "File name too long"), ("a", "loop")):
        with pytest.raises(UsageError, match=f"cannot be written: .*{words}"):
            check_target(tmp_path / name)
    assert record().write(tmp_path / ("n" * 255)).is_file()


def test_standard_output_keeps_what_it_holds(tmp_path: Path) -> None:
    code = "from crosscut.records import write_file as w; w('/dev/stdout', 'a\\n'); print('b'); w('/dev/fd/1', 'c\\n')"
    log = tmp_path / "log"
    for held in ("", "before\n"):
        log.write_text(held)
        with log.open("a") as out:
            subprocess.run([sys.executable, "-uc", code], stdout=out, check=True, timeout=60)
        assert log.read_text() == f"{held}a\nb\nc\n"


def test_half_a_character_does_not_cost_the_file(tmp_path: Path) -> None:
    assert write_file(tmp_path / "page.html", "a\udcff").read_text() == "a\\udcff"


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    link, pipe = tmp_path / "latest.json", tmp_path / "pipe"
    link.symlink_to("r.json")
    record().write(link)
    assert link.is_symlink()
    assert RunRecord.read(tmp_path / "r.json") == record()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        record().write(pipe)
        assert pipe.is_fifo()
        assert RunRecord.from_json(os.read(reader, 1 << 16).decode()) == record()
    finally:
        os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "pipe", "r.json"]


def test_hardware_is_named_for_people() -> None:
    assert Hardware("NVIDIA H200", 2).label == "2 x NVIDIA H200"
    assert Hardware("CPU, 4 threads, AMD EPYC", 2).label == "CPU, 4 threads, AMD EPYC, 2 ranks", "not two CPUs"


@given(st.integers(0, 1 << 40))
def test_sizes_come_back(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= max(0.06 * nbytes, 1)


def test_sizes_and_times_as_people_write_them() -> None:
    assert [parse_size(t) for t in ("8K", "64KiB", "1.5MB", "1G")] == [8192, 65536, 1_500_000, 1 << 30]
    assert [format_us(t) for t in (2.9, 18.8, 115.7, 2739, 3e7)] == ["2.9 us", "18.8 us", "116 us", "2.74 ms", "30 s"]
    assert [format_gain(g) for g in (12.345, 1, 0.1, 0.0949, 0.0043)] == ["12.35x", "1.00x", "0.10x", "0.09x", "0.004x"]
    for bad in ("", "K", "8X", "-1K"):
        with pytest.raises(UsageError, match="is not a size"):
            parse_size(bad)


def test_gpus_are_found_by_the_drivers_name() -> None:
    names = {"NVIDIA H200": "h200", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H100 80GB HBM3": "h100-80", "NVIDIA L4": "l4"}
    names |= {"NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA GeForce RTX 4090": "4090", "NVIDIA L40S": "l40s"}
    found = {name: gpu.key for name in names if (gpu := find_gpu(name))}
    assert found == names
    assert find_gpu("NVIDIA A1000") is None


def test_settings_are_read_and_typos_refused() -> None:
    assert settings({"CROSSCUT_TIMEOUT": "2.5", "CROSSCUT_LOG": "DEBUG"}).timeout == 2.5
    for environ, words in (
        ({"CROSSCUT_TIMEOTU": "2"}, "did you mean 'CROSSCUT_TIMEOUT'"),
        ({"CROSSCUT_TIMEOUT": "soon"}, "not a number of seconds"),
        ({"CROSSCUT_TIMEOUT": "0"}, "not a number of seconds"),
        ({"CROSSCUT_LOG": "loud"}, "CROSSCUT_LOG 'loud'"),
    ):
        with pytest.raises(UsageError, match=words):
            settings(environ)


def test_errors_cross_process_borders_whole() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(RankError("rank 1 died", code="rank-died", fix="look")))
    assert (type(error), error.code, error.fix, error.message) == (RankError, "rank-died", "look", "rank 1 died")


def test_every_error_code_is_explained_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    missing = [code for code in CODES if f"## {code}\n" not in text]
    assert not missing
