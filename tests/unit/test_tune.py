"""crosscut tune: the table it draws from measurements, its check of every result, and what --explain says of a layer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from crosscut.bench import layers, linear, tune
from crosscut.bench.timing import Sampling, time_case
from crosscut.bench.tune import MARGIN, TuneConfig, classes_from, measure, medians, summary, wrong_algorithms
from crosscut.collectives import fast
from crosscut.collectives.select import ALGORITHMS, OPS, Choice, Table, table_for
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Group, Mesh
from crosscut.distributed.progress import Progress
from crosscut.errors import UsageError
from crosscut.records import Row, RunRecord

OnRanks = Callable[..., list[Any]]
NAMES = ("lanes", "lanes_two_shot", "blocks", "blocks_two_shot")
MICROSECONDS = st.floats(0.5, 1e4)
MEDIANS = st.dictionaries(
    st.integers(1, 1 << 30),
    st.builds(lambda nccl, ours: {"nccl": nccl} | ours, MICROSECONDS, st.dictionaries(st.sampled_from(NAMES), MICROSECONDS)),
    max_size=12,
)


@given(MEDIANS, st.sampled_from([0.0, MARGIN, 0.5]))
def test_a_class_never_costs_more_than_the_margin_and_its_end_is_a_win(
    times: dict[int, dict[str, float]], margin: float
) -> None:
    classes = classes_from(times, margin)
    table = Table({"op": classes}, "a test")
    assert [size for size, _ in classes] == sorted({size for size, _ in classes})
    assert all(a[1] != b[1] for a, b in pairwise(classes)), "equal winners are one class"
    for size, found in times.items():
        name = table.algorithm("op", size)
        if name is not None:
            assert found[name] <= found["nccl"] * (1 + margin)
            assert found[name] == min(us for other, us in found.items() if other != "nccl")
    for size, name in classes:
        assert name in times[size]
    if classes:
        largest, name = classes[-1]
        assert times[largest][name] <= times[largest]["nccl"] * (1 - margin)


@given(MEDIANS)
def test_nothing_slower_than_nccl_is_chosen_without_a_margin(times: dict[int, dict[str, float]]) -> None:
    table = Table({"op": classes_from(times, 0.0)}, "a test")
    for size, found in times.items():
        name = table.algorithm("op", size)
        assert name is None or found[name] <= found["nccl"]


@given(MEDIANS)
def test_no_win_below_the_first_loss_is_given_away(times: dict[int, dict[str, float]]) -> None:
    table = Table({"op": classes_from(times)}, "a test")
    for size in sorted(times):
        ours = min((us for name, us in times[size].items() if name != "nccl"), default=float("inf"))
        if ours > times[size]["nccl"] * (1 - MARGIN):
            break
        assert table.algorithm("op", size) is not None


def us(nccl: float, lanes: float, blocks: float) -> dict[str, float]:
    return {"nccl": nccl, "lanes": lanes, "blocks": blocks}


def test_winners_merge_and_the_first_loss_ends_the_table() -> None:
    times = {1: us(10, 3, 5), 2: us(10, 4, 5), 4: us(10, 8, 6), 8: us(10, 50, 9.6), 16: us(10, 50, 11), 32: us(10, 1, 1)}
    assert classes_from(times) == ((2, "lanes"), (8, "blocks"))
    assert classes_from({1: us(10, 9.8, 12)}) == (), "faster, but not by the margin"
    assert classes_from({1: us(10, 9.7, 12)}) == ((1, "lanes"),)
    assert classes_from({}) == ()
    assert classes_from({1: {"nccl": 10.0}, 2: us(10, 1, 1)}) == (), "nothing measured but NCCL"


def test_a_narrow_loss_is_bridged_when_a_kernel_wins_again_above() -> None:
    wins, narrow, clear = us(10, 8, 9), us(10, 10.2, 20), us(10, 10.4, 20)
    assert classes_from({1: wins, 2: narrow, 4: wins}) == ((4, "lanes"),)
    assert classes_from({1: wins, 2: narrow, 4: narrow}) == ((1, "lanes"),)
    assert classes_from({1: wins, 2: clear, 4: wins}) == ((1, "lanes"),)
    assert classes_from({1: narrow, 2: wins}) == ((2, "lanes"),)


def test_a_line_for_each_class_and_one_for_the_rest() -> None:
    times = {1024: us(10, 2, 5), 2048: us(10, 4, 5), 4096: us(20, 18, 16), 8192: us(20, 30, 30)}
    lines = summary("all_reduce", times, classes_from(times))
    assert [" ".join(line.split()) for line in lines] == [
        "all_reduce 1 KiB to 2 KiB lanes 2 us to 4 us NCCL 10 us 2.50x to 5.00x",
        "all_reduce 4 KiB blocks 16 us NCCL 20 us 1.25x",
        "all_reduce above 4 KiB nccl",
    ]
    assert [line.split() for line in summary("broadcast", times, ())] == [["broadcast", "any", "size", "nccl"]]


class OverTorch:
    """What an Exchange does, by torch.distributed; ``faulty`` names an algorithm that spoils one element on rank 1."""

    def __init__(self, group: Group, faulty: str = "") -> None:
        self.group, self.size, self.faulty = group, group.size, faulty

    def most(self, op: str, algorithm: str) -> float:
        return 512 if algorithm == "lanes" else float("inf")

    def _done(self, out: Tensor, result: Tensor, algorithm: str) -> Tensor:
        out.copy_(result)
        if algorithm == self.faulty and self.group.rank == 1:
            out[-1] += 1
        return out

    def all_reduce(self, x: Tensor, out: Tensor, op: str, algorithm: str) -> Tensor:
        return self._done(out, tune._torch("all_reduce", x.clone(), self.group), algorithm)

    def broadcast(self, x: Tensor, out: Tensor, root: int, algorithm: str) -> Tensor:
        return self._done(out, tune._torch("broadcast", x.clone(), self.group), algorithm)

    def all_gather(self, x: Tensor, out: Tensor, algorithm: str) -> Tensor:
        return self._done(out, tune._torch("all_gather", x, self.group), algorithm)

    def all_to_all(self, x: Tensor, out: Tensor, algorithm: str) -> Tensor:
        return self._done(out, tune._torch("all_to_all", x, self.group), algorithm)

    def reduce_scatter(self, x: Tensor, out: Tensor, op: str, algorithm: str) -> Tensor:
        return self._done(out, tune._torch("reduce_scatter", x, self.group), algorithm)


def measured(mesh: Mesh, op: str, size: int, faulty: str = "") -> list[Row]:
    exchange: Any = OverTorch(mesh.tp, faulty)
    return measure(exchange, mesh.tp, op, size, "eager", Sampling(0.001, least=2, most=2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3])
def test_each_algorithm_that_fits_is_measured_and_checked(on_ranks: OnRanks, world: int, op: str) -> None:
    size = 1024
    whole = size // (16 * world) * 16 * world
    for rows in on_ranks(world, measured, op, size):
        fits = (whole if op in ("all_reduce", "broadcast") else whole // world) <= 512
        expected = [None, *(name for name in ALGORITHMS[op] if (name != "lanes" or fits) and (world > 2 or "two" not in name))]
        assert [row.path for row in rows] == expected
        assert [row.impl for row in rows] == ["nccl"] + ["crosscut"] * (len(rows) - 1)
        factor = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}.get(op, (world - 1) / world)
        for row in rows:
            assert (row.subject, row.mode, row.world, row.bytes) == (op, "eager", world, whole)
            assert row.us is not None
            assert row.algbw_gbps == pytest.approx(whole / row.us.p50 / 1e3)
            assert row.busbw_gbps == pytest.approx(row.algbw_gbps * factor)
            assert row.path is None or row.extra == {"difference": 0.0}
        assert wrong_algorithms(rows) == []
        assert list(medians(rows)[op][whole]) == ["nccl", *expected[1:]]


@pytest.mark.parametrize("op", OPS)
def test_an_algorithm_that_is_wrong_on_one_rank_is_left_out_by_all(on_ranks: OnRanks, op: str) -> None:
    for rows in on_ranks(2, measured, op, 4096, "blocks"):
        (sentence,) = wrong_algorithms(rows)
        assert sentence.startswith(f"WRONG, and therefore left out: {op} by blocks differs from NCCL's result by ")
        assert "blocks" not in medians(rows)[op][4096]
        later = Row(op, "crosscut", "graph", 2, "bfloat16", bytes=8192, us=rows[0].us, path="blocks", extra={"difference": 0.0})
        assert 8192 not in medians([*rows, later])[op], "not trusted at other sizes either"


def test_an_element_that_nobody_wrote_is_a_difference(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> float:
        whole = torch.arange(1.0, 5.0)
        late = torch.where(whole == 3.0, float("nan"), whole)
        return tune._difference([whole, late if mesh.rank == 1 else whole], whole, mesh.tp)

    assert on_ranks(2, body) == [float("inf")] * 2


def context(mesh: Mesh) -> RankContext:
    return RankContext(mesh.rank, mesh.world_size, mesh.rank, torch.device("cpu"), "gloo", Progress())


@pytest.mark.parametrize(
    ("world", "why"), [(1, "a group of one does not communicate"), (2, "threaded carries tensors in host")]
)
def test_where_kernels_cannot_run_the_reason_is_given(on_ranks: OnRanks, world: int, why: str) -> None:
    with pytest.raises(UsageError, match=f"nothing to tune.*{why}") as caught:
        on_ranks(world, lambda mesh: tune.run(context(mesh), TuneConfig(world)))
    assert caught.value.code == "no-backend"


def test_the_command_on_a_host_without_gpus(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CROSSCUT_")}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from crosscut.cli.main import main; main()"
    command = [sys.executable, "-c", code, "tune", "--tp", "2", "--out", str(tmp_path / "tune.json")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environ)
    assert ended.returncode == 2
    assert ended.stdout == ""
    first, second = ended.stderr.splitlines()
    why = "crosscut's kernels cannot run here: gloo carries tensors in host memory"
    assert first == f"error: there is nothing to tune, because {why} [no-backend]"
    assert second.startswith("what to do: run it on a host with 2 to 8 linked NVIDIA GPUs")
    assert list(tmp_path.iterdir()) == []


def explained(mesh: Mesh, **config: Any) -> RunRecord:
    wanted = linear.LinearConfig(mesh.tp.size, shapes=("2x8->12",), seconds=0.001, **config)
    return linear.run(context(mesh), wanted)


def paths(record: RunRecord) -> dict[str, tuple[str, str | None]]:
    return {row.impl if row.subject == "linear" else row.subject: (row.impl, row.path) for row in record.rows}


def test_rows_name_what_carried_the_collective_and_notes_say_why_when_asked(on_ranks: OnRanks) -> None:
    record = on_ranks(2, lambda mesh: explained(mesh, explain=True))[0]
    assert paths(record)["crosscut"] == ("crosscut", "threaded")
    assert paths(record)["all_gather"] == ("threaded", "threaded")
    assert paths(record)["gloo"] == ("gloo", None)
    sentence = "2 x 8 -> 12: all_gather of 96 B goes by threaded: threaded carries tensors in host memory"
    assert sentence in record.notes
    assert sentence not in on_ranks(2, explained)[0].notes
    alone = on_ranks(1, lambda mesh: explained(mesh, explain=True))[0]
    assert alone.notes[-1].endswith("goes by none: a group of one does not communicate")


def test_rows_name_the_kernel_only_if_it_takes_the_tensor(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "choice", lambda op, nbytes, group: Choice("crosscut", "lanes", "a test"))
    declined = on_ranks(2, lambda mesh: explained(mesh, explain=True, split="row"))[0]
    assert paths(declined)["all_reduce"] == ("threaded", "threaded")
    told = "2 x 8 -> 12: all_reduce of 96 B goes by threaded: the kernels sum bfloat16"
    assert any(note.startswith(told) for note in declined.notes)

    def kernel(x: Tensor, group: Group, op: str = "sum", out: Tensor | None = None) -> Tensor:
        dist.all_reduce(x, group=group.process_group)
        return x

    monkeypatch.setattr(fast, "all_reduce", kernel)
    taken = on_ranks(2, lambda mesh: explained(mesh, explain=True, split="row"))[0]
    assert paths(taken)["crosscut"] == ("crosscut", "lanes")
    assert paths(taken)["all_reduce"] == ("crosscut", "lanes")
    assert "2 x 8 -> 12: all_reduce of 96 B goes by crosscut:lanes: a test" in taken.notes


def test_a_whole_run_is_kept_for_later_runs(on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's function over a stand-in for the kernels, without graphs: from measuring to the table that is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CROSSCUT_COLLECTIVES", raising=False)
    monkeypatch.setattr(tune, "_kernels", lambda group: OverTorch(group, "lanes"))
    monkeypatch.setattr(tune, "time_case", lambda calls, group, mode, how: time_case(calls, group, "eager", how))
    monkeypatch.setattr(tune, "machine", lambda device: ["a test"])
    monkeypatch.setattr(tune, "noisy", lambda rows: None)
    monkeypatch.setattr(tune, "classes_from", lambda times: ((max(times), "blocks"),))
    config = TuneConfig(2, (512, 2048), 0.001)
    first, second = on_ranks(2, lambda mesh: tune.run(context(mesh), config))
    assert len(first.rows) == len(OPS) * (3 + 2), "nccl, lanes and blocks at 512 bytes, lanes no more at 2048"
    assert {row.mode for row in first.rows} == {"graph"}
    assert sum(note.startswith("WRONG, and therefore left out") and "by lanes" in note for note in first.notes) == len(OPS)
    (path,) = tmp_path.glob("crosscut/tuned/*.json")
    assert first.notes[-1] == f"Saved in {path}; later runs with 2 ranks here use it."
    assert not second.notes[-1].startswith("Saved"), "only rank 0 writes"
    assert table_for(["a test"], 2).classes == dict.fromkeys(OPS, ((2048, "blocks"),))
    assert RunRecord.from_json(first.to_json()).config["classes"] == {op: [[2048, "blocks"]] for op in OPS}

    path.unlink()
    monkeypatch.setattr(tune, "noisy", lambda rows: "This run is noisy.")
    assert on_ranks(2, lambda mesh: tune.run(context(mesh), config))[0].notes[-1] == "This run is noisy. Nothing was saved."
    assert not path.exists()
