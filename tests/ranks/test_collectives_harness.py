"""bench collectives on rank threads: what it finds wrong, whom it calls slow, and that one declaration adds a collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crosscut.bench import collectives
from crosscut.bench.backends import Implementation
from crosscut.bench.collective_cases import CASES, Ask, Buffers, Case, Piece, Place, Works
from crosscut.bench.collective_timing import Problem
from crosscut.bench.timing import Sampling
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Mesh
from crosscut.distributed.progress import Progress
from crosscut.errors import UsageError
from crosscut.records import Row, RunRecord

OnRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def measured(mesh: Mesh, cases: dict[str, Case] = CASES, **config: Any) -> RunRecord:
    config = {"tp": mesh.tp.size, "sizes": (64,), "seconds": 0.002} | config
    context = RankContext(mesh.rank, mesh.world_size, mesh.rank, CPU, "gloo", Progress())
    return collectives.run(context, collectives.CollectivesConfig(**config), cases)


def timed(record: RunRecord) -> list[Row]:
    return [row for row in record.rows if row.us is not None]


def changed(name: str, after: Callable[[Ask, Buffers], object]) -> dict[str, Case]:
    """The collective ``name``, whose call ends with ``after``."""
    case = CASES[name]

    def call(ask: Ask, buffers: Buffers) -> Works:
        works = case.call(ask, buffers)
        after(ask, buffers)
        return works

    return {name: replace(case, call=call)}


def test_rows_hold_times_rates_and_exact_results(on_ranks: OnRanks) -> None:
    config = {"ops": ("all_reduce", "all_gather", "broadcast"), "sizes": (64, 4096), "modes": ("eager", "host"), "root": 1}
    record = on_ranks(2, lambda mesh: measured(mesh, **config))[0]
    rows = timed(record)
    assert len(rows) == 3 * 2 * 2 * 2
    assert record.config["correct"] is True
    for row in rows:
        assert row.us is not None
        assert (row.impl, row.error, row.extra["wrong"]) == ("threaded", 0.0, 0)
        assert row.algbw_gbps == pytest.approx(row.bytes / row.us.p50 / 1e3)
        assert row.busbw_gbps == pytest.approx(row.algbw_gbps * CASES[row.subject].busbw(2))
        assert len(row.extra["ranks_us"]) == 2
    assert {row.extra.get("root") for row in rows if row.subject == "broadcast"} == {1}
    assert {row.extra.get("redop") for row in rows if row.subject == "all_reduce"} == {"sum"}
    assert RunRecord.from_json(record.to_json()).rows[0].extra["in_place"] is False
    assert f"All {len(rows)} results are exact" in " ".join(record.notes)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "int64", "float64", "float16"])
def test_every_dtype_is_exact(on_ranks: OnRanks, world: int, dtype: str) -> None:
    ops = ("all_reduce", "all_gather", "scatter", "all_to_all_uneven", "barrier")
    record = on_ranks(world, lambda mesh: measured(mesh, ops=ops, dtype=dtype, seconds=0.001))[0]
    assert {row.subject for row in timed(record)} == set(ops)
    assert record.config["correct"] is True, record.notes


def test_a_hypercube_has_a_power_of_two_of_corners(on_ranks: OnRanks) -> None:
    record = on_ranks(3, lambda mesh: measured(mesh, ops=("all_reduce", "hypercube")))[0]
    assert {row.subject for row in timed(record)} == {"all_reduce"}
    assert any("hypercube" in note and "a power of two, not 3" in note for note in record.notes)


@pytest.mark.parametrize("in_place", ["out", "in"])
def test_a_planted_wrong_element_is_found_and_located(on_ranks: OnRanks, in_place: str) -> None:
    def spoil(ask: Ask, buffers: Buffers) -> None:
        if ask.place.rank == 1:
            buffers.output[5] += 1

    record = on_ranks(2, lambda mesh: measured(mesh, changed("all_reduce", spoil), places=(in_place,)))[0]
    (row,) = timed(record)
    right = float(CASES["all_reduce"].expected(1, 2, 16, torch.float32)[5])
    assert row.extra["first_wrong"] == {"rank": 1, "index": 5, "got": right + 1, "expected": right}
    assert row.extra["wrong"] > 0
    assert row.error is not None
    assert 0 < row.error < 1
    assert record.config["correct"] is False
    assert any("the first is element 5 on rank 1" in note for note in record.notes)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all"])
def test_a_call_that_stops_writing_is_found(on_ranks: OnRanks, name: str) -> None:
    """The last timed calls are the checked ones: right results of earlier calls do not hide that nothing is written."""
    case, made = CASES[name], dict[int, int]()

    def call(ask: Ask, buffers: Buffers) -> Works:
        rank = ask.place.rank
        made[rank] = made.get(rank, 0) + 1
        return case.call(ask, buffers) if made[rank] <= 5 else ()

    cases = {name: replace(case, call=call)}
    (row,) = timed(on_ranks(2, lambda mesh: measured(mesh, cases, places=("out",)))[0])
    assert row.error == float("inf")
    assert row.extra["first_wrong"]["index"] == 0


def test_a_planted_slow_rank_is_named(on_ranks: OnRanks) -> None:
    def dawdle(ask: Ask, buffers: Buffers) -> None:
        time.sleep(0.012 if ask.place.rank == 1 else 0.004)

    def body(mesh: Mesh) -> RunRecord:
        return measured(mesh, changed("all_gather", dawdle), sizes=(64, 256))

    record = on_ranks(3, body)[0]
    named = [note for note in record.notes if "slower than the others" in note]
    assert len(named) == 1
    assert named[0].startswith("Rank 1 is ")
    assert "in all_gather (threaded)" in named[0]
    for row in timed(record):  # a busy machine sleeps longer than it was told to, never shorter
        quick, slow, other = row.extra["ranks_us"]
        assert min(quick, other) >= 4000
        assert slow >= 12000
        assert slow > max(quick, other)


def test_a_rank_that_comes_late_is_named_though_all_wait_for_it(on_ranks: OnRanks) -> None:
    """All ranks take the same time then; only a rank's own time tells."""
    case = CASES["all_reduce"]

    def late(ask: Ask, buffers: Buffers) -> Works:
        time.sleep(0.01 if ask.place.rank == 0 else 0)
        return case.call(ask, buffers)

    record = on_ranks(2, lambda mesh: measured(mesh, {"all_reduce": replace(case, call=late)}))[0]
    assert any(note.startswith("Rank 0 is ") for note in record.notes)


def mirrored(ask: Ask, buffers: Buffers) -> Works:
    sizes = [ask.place.count if rank == ask.place.world - 1 - ask.place.rank else 0 for rank in range(ask.place.world)]
    return [dist.all_to_all_single(buffers.output, buffers.input, sizes, sizes, **ask.how)]


def test_one_declaration_adds_a_collective(on_ranks: OnRanks) -> None:
    mirror = Case("mirror", lambda n: 1.0, lambda p: p.count, lambda p: [Piece(p.world - 1 - p.rank, 0, p.count)], mirrored)
    record = on_ranks(3, lambda mesh: measured(mesh, {"mirror": mirror}))[0]
    (row,) = timed(record)
    assert (row.subject, row.bytes, row.error, row.extra["wrong"]) == ("mirror", 64, 0.0, 0)
    assert row.busbw_gbps == row.algbw_gbps
    claimed = replace(mirror, receives=lambda p: [Piece(p.rank, 0, p.count)])
    assert on_ranks(3, lambda mesh: measured(mesh, {"mirror": claimed}))[0].config["correct"] is False


def test_what_the_backend_refuses_is_a_note(on_ranks: OnRanks) -> None:
    config = {"ops": ("reduce_scatter", "all_gather"), "redops": ("max",), "impls": ("threaded", "crosscut", "torch_one_shot")}
    record = on_ranks(2, lambda mesh: measured(mesh, **config))[0]
    assert {row.subject for row in timed(record)} == {"all_gather"}
    notes = " ".join(record.notes)
    assert "threaded did not run reduce_scatter max of float32: ReduceScatter does not support" in notes
    assert "torch_one_shot did not run anything: it needs a GPU for each rank and NCCL." in notes
    assert "crosscut did not run anything: threaded carries tensors in host memory." in notes


@pytest.mark.parametrize(
    ("world", "config", "words"),
    [
        (1, {}, "one rank has nobody to talk to"),
        (2, {"root": 2}, "the root 2 is not one of the 2 ranks"),
        (2, {"modes": ("graph",)}, "mode 'graph' cannot run here"),
        (2, {"ops": ("all_reduced",)}, "did you mean 'all_reduce'"),
        (2, {"tp": 3}, "tp=3 does not divide the 2 ranks"),
        (2, {"impls": ("crosscut",)}, "nothing could be measured. crosscut did not run anything"),
        (2, {"sizes": (1 << 50,), "ops": ("all_gather",)}, "(?s)its buffers take more than the.*what to do: change .*--sizes"),
    ],
)
def test_what_cannot_be_measured_is_refused(on_ranks: OnRanks, world: int, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        on_ranks(world, lambda mesh: measured(mesh, **config))


def problems(mesh: Mesh, names: Sequence[str], in_place: bool) -> dict[str, Problem]:
    impl, place = Implementation("threaded", mesh.tp, 1 << 20), Place(mesh.rank, mesh.tp.size, 6, 1)
    numbers = {name: CASES[name].numbers(mesh.tp.size, torch.float32) for name in names}
    return {name: Problem(CASES[name], impl, numbers[name], place, in_place, 1 << 20) for name in names}


def test_buffers_overlap_in_place_as_nccl_has_them(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name, problem in problems(mesh, ("all_reduce", "all_gather", "reduce_scatter", "scatter"), True).items():
            (slot,) = problem.slots
            shared = slot.input.untyped_storage().data_ptr() == slot.output.untyped_storage().data_ptr()
            found[name] = slot.input.storage_offset() - slot.output.storage_offset() if shared else None
        return found

    first, second = on_ranks(2, body)
    assert first == {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0, "scatter": None}
    assert second == {"all_reduce": 0, "all_gather": 6, "reduce_scatter": -6, "scatter": -6}


def test_a_sample_is_many_calls_each_on_its_own_buffers(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> tuple[int, int, int]:
        problem = problems(mesh, ("all_gather",), False)["all_gather"]
        problem.fill_a_sample(Sampling(0.001, least=5, sample_us=1e6))
        found = problem.measure("eager", cold=True)
        return len(problem.slots), len({slot.output.data_ptr() for slot in problem.slots}), found.calls

    assert on_ranks(2, body) == [(64, 64, 64 * 5)] * 2
