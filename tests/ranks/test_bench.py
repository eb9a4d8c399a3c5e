"""bench linear on rank threads: every way gives the reference, what is timed is what is checked, a planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.bench import linear, split
from crosscut.bench.split import implementations, random_problem
from crosscut.bench.timing import Sampling, time_case
from crosscut.bench.verdict import wrong_results
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Mesh
from crosscut.distributed.progress import Progress
from crosscut.errors import UsageError
from crosscut.records import RunRecord

OnRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def context(mesh: Mesh) -> RankContext:
    return RankContext(mesh.rank, mesh.world_size, mesh.rank, CPU, "gloo", Progress())


def measured(mesh: Mesh, **config: Any) -> RunRecord:
    config = {"tp": mesh.tp.size, "seconds": 0.001} | config
    return linear.run(context(mesh), linear.LinearConfig(**config))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["column", "row", "pair"])
@pytest.mark.parametrize("sizes", [(3, 8, 12), (1, 7, 13)])
def test_all_ways_give_the_unsplit_result(on_ranks: OnRanks, world: int, kind: str, sizes: tuple[int, int, int]) -> None:
    def body(mesh: Mesh) -> set[str]:
        problem = random_problem(kind, sizes, torch.float64, CPU)
        reference = problem.reference()
        ways = implementations(problem, mesh, ("gloo", "dtensor") if sizes[0] == 3 else ("gloo",))
        for name, build in ways.items():
            for call in build():
                if name != "no_comm":
                    torch.testing.assert_close(call(), reference, msg=lambda m, name=name: f"{name}: {m}")
        return set(ways)

    expected = {"single"} if world == 1 else {"single", "crosscut", "no_comm"}
    if world > 1 and sizes[0] == 3:
        expected |= {"gloo", "dtensor"} | ({"textbook"} if kind == "column" else set())
    assert on_ranks(world, body) == [expected] * world


def test_a_record_holds_every_way_size_and_the_collective(on_ranks: OnRanks) -> None:
    record = on_ranks(2, lambda mesh: measured(mesh, shapes=("2x8->12", "2x8->12->8")))[0]
    assert [(r.subject, r.impl) for r in record.rows] == [
        *(("linear", impl) for impl in ("single", "textbook", "gloo", "crosscut", "no_comm")), ("all_gather", "threaded"),
        *(("mlp", impl) for impl in ("single", "gloo", "crosscut", "no_comm")), ("all_reduce", "threaded"),
    ]  # fmt: skip
    assert record.config["correct"] is True
    gathered, reduced = (r for r in record.rows if r.bytes is not None)
    assert (gathered.bytes, reduced.bytes) == (2 * 12 * 4, 2 * 8 * 4)
    assert gathered.us is not None
    assert gathered.algbw_gbps == pytest.approx(gathered.bytes / gathered.us.p50 / 1e3)
    assert gathered.busbw_gbps == pytest.approx(gathered.algbw_gbps / 2)  # (n-1)/n
    assert reduced.busbw_gbps == pytest.approx(reduced.algbw_gbps)  # 2(n-1)/n
    crosscut = next(r for r in record.rows if r.impl == "crosscut")
    assert 0 <= crosscut.extra["comm_share"] < 1
    assert RunRecord.from_json(record.to_json()).rows[3].shape == {"tokens": 2, "in": 8, "out": 12}


def test_a_planted_fault_is_found_in_the_same_run(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_reduce", lambda y, group: y)
    record = on_ranks(2, lambda mesh: measured(mesh, shapes=("2x8->12",), split="row"))[0]
    assert record.config["correct"] is False
    assert [s.split()[0] for s in wrong_results(record.rows)] == ["gloo"]
    assert any(note.startswith("gloo (eager) at 2 x 8 -> 12: relative error") for note in record.notes)


def test_an_unwritten_output_is_found(on_ranks: OnRanks) -> None:
    """The check poisons memory first, so a call that forgets to write cannot show an earlier call's right result."""

    def body(mesh: Mesh) -> bool:
        right = torch.ones(64, 64)

        def forgetful() -> Tensor:
            return right.clone() if forgetful.first else torch.empty(64, 64)  # type: ignore[attr-defined]

        forgetful.first = True  # type: ignore[attr-defined]
        assert torch.equal(time_case([forgetful], mesh.tp, "eager", Sampling(0.001)).outputs[0], right)
        forgetful.first = False  # type: ignore[attr-defined]
        return torch.equal(time_case([forgetful], mesh.tp, "eager", Sampling(0.001)).outputs[0], right)

    assert on_ranks(1, body) == [False]


def test_the_slowest_rank_counts_and_one_device_is_alone(on_ranks: OnRanks) -> None:
    import time

    def body(mesh: Mesh) -> tuple[list[float], list[float], int]:
        calls: list[int] = []

        def call() -> Tensor:
            calls.append(1)
            time.sleep(0.002 if mesh.rank == 1 else 0)
            return torch.zeros(1)

        slow = time_case([call], mesh.tp, "eager", Sampling(0.01)).samples
        calls.clear()
        alone = time_case([call], mesh.tp, "eager", Sampling(0.001), alone=True)
        return slow, alone.samples, len(calls)

    (slow0, alone0, calls0), (slow1, alone1, calls1) = on_ranks(2, body)
    assert slow0 == slow1
    assert min(slow0) >= 2000
    assert alone0 == alone1
    assert max(alone0) < 2000
    assert calls0 > 0
    assert calls1 == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"modes": ("graph",)}, "mode 'graph' cannot run here"),
        ({"against": ("nccl",)}, "nccl cannot be compared: these ranks talk over gloo"),
        ({"source": "/nowhere:x"}, "there is no directory '/nowhere'"),
        ({"tp": 3}, "tp=3 does not divide the 2 ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused(on_ranks: OnRanks, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        on_ranks(2, lambda mesh: measured(mesh, shapes=("2x8->12",), **config))
