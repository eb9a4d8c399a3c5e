"""The layer benches on rank threads: every way gives the reference, what is timed is checked, a planted fault is found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.bench import block, calls, hand, linear, mlp, split
from crosscut.bench.block import Sizes, random_block
from crosscut.bench.calls import Ways
from crosscut.bench.split import random_problem
from crosscut.bench.timing import Sampling, time_case
from crosscut.bench.verdict import wrong_results
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Mesh
from crosscut.distributed.progress import Progress
from crosscut.errors import UsageError
from crosscut.records import RunRecord

OnRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer's weights; how many it takes to leave the cache is tested elsewhere."""
    for module in (calls, split):
        monkeypatch.setattr(module, "copies", lambda nbytes, device: 2)


def context(mesh: Mesh) -> RankContext:
    return RankContext(mesh.rank, mesh.world_size, mesh.rank, CPU, "gloo", Progress())


def measured(mesh: Mesh, **config: Any) -> RunRecord:
    config = {"tp": mesh.tp.size, "seconds": 0.001} | config
    return linear.run(context(mesh), linear.LinearConfig(**config))


@pytest.mark.parametrize(("world", "backward"), [(1, True), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("kind", ["column", "row", "pair", "gated"])
@pytest.mark.parametrize("sizes", [(3, 8, 12), (4, 8, 12), (1, 7, 13)])
def test_all_ways_give_the_unsplit_result(
    on_ranks: OnRanks, world: int, kind: str, sizes: tuple[int, int, int], backward: bool
) -> None:
    """Result, gradient of the input and of each weight; sizes that divide, and tokens or features that do not."""
    pair, even = kind in ("pair", "gated"), sizes[1] == 8

    def body(mesh: Mesh) -> dict[str, int]:
        problem = random_problem("pair" if pair else kind, sizes, torch.float64, CPU, gated=kind == "gated")
        with torch.set_grad_enabled(backward):
            return check_ways(problem.ways(mesh, ("gloo", "dtensor"), backward))

    outputs = 1 if not backward else 3 if not pair else 4
    expected = {"single": outputs + (kind == "gated" and backward)}
    if world > 1:
        names = ["crosscut", "no_comm", *(["crosscut_sp"] if pair and sizes[0] >= world else [])]
        packed = dict.fromkeys(names, outputs) | {"no_comm": 0}  # gate and up are one parameter of ours
        peers = ["gloo", "dtensor", *(["textbook"] if kind != "row" else [])] if even else []
        expected |= packed | dict.fromkeys(peers, expected["single"])
    assert on_ranks(world, body) == [expected] * world


@pytest.mark.parametrize(("world", "backward"), [(1, True), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize(("sizes", "tokens"), [(Sizes(32, 8, 4, 48), 6), (Sizes(36, 6, 2, 25), 5)])
def test_every_block_equals_the_one_written_from_the_papers(
    on_ranks: OnRanks, world: int, sizes: Sizes, tokens: int, backward: bool
) -> None:
    def body(mesh: Mesh) -> dict[str, int]:
        problem = random_block(sizes, 2, tokens, torch.float64, CPU)
        with torch.set_grad_enabled(backward):
            return check_ways(problem.ways(mesh, ("gloo",), backward))

    outputs = 8 if backward else 1
    expected = {"single": outputs}
    if world > 1:
        expected |= {"crosscut": outputs, "crosscut_sp": outputs, "no_comm": 0}
        expected |= {"gloo": outputs} if sizes.ffn % world == 0 and sizes.kv_heads % world == 0 else {}
    assert on_ranks(world, body) == [expected] * world


def check_ways(ways: Ways) -> dict[str, int]:
    """Compare every output of every call; how many outputs of each way were compared."""
    compared = {}
    for name, build in ways.items():
        way = build()
        for call in way.calls:
            for out, reference in zip(call(), way.expected, strict=bool(way.expected)):
                torch.testing.assert_close(out, reference, msg=lambda m, name=name: f"{name}: {m}")
        compared[name] = len(way.expected)
    return compared


def test_a_record_holds_every_way_size_and_the_collective(on_ranks: OnRanks) -> None:
    record = on_ranks(2, lambda mesh: measured(mesh, shapes=("2x8->12", "2x8->12->8")))[0]
    assert [(r.subject, r.impl) for r in record.rows] == [
        *(("linear", impl) for impl in ("single", "textbook", "gloo", "crosscut", "no_comm")), ("all_gather", "threaded"),
        *(("mlp", impl) for impl in ("single", "textbook", "gloo", "crosscut", "crosscut_sp", "no_comm")),
        ("all_reduce", "threaded"),
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
    monkeypatch.setattr(hand, "summed", lambda y, group: y)
    record = on_ranks(2, lambda mesh: measured(mesh, shapes=("2x8->12",), split="row"))[0]
    assert record.config["correct"] is False
    assert [s.split()[0] for s in wrong_results(record.rows)] == ["gloo"]
    assert any(note.startswith("gloo (eager) at 2 x 8 -> 12: relative error") for note in record.notes)


def test_a_wrong_gradient_is_found_on_any_rank(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 1's weight gradient is off, and rank 0's record says so."""
    outputs = calls.outputs

    def off(fn: Any, x: Tensor, parameters: Any, dy: Tensor | None) -> tuple[Tensor, ...]:
        found = outputs(fn, x, parameters, dy)
        faulty = dy is not None and x.dtype == torch.float32 and threading.current_thread().name == "rank 1"
        return (*found[:-1], found[-1] * 1.01) if faulty else found

    monkeypatch.setattr(calls, "outputs", off)
    config = mlp.MLPConfig(2, shapes=("4x8x12",), seconds=0.001, backward=True)
    record = on_ranks(2, lambda mesh: mlp.run(context(mesh), config))[0]
    found = [sentence.partition(" at ")[0] for sentence in wrong_results(record.rows)]
    assert found == [f"{impl} (eager, with backward)" for impl in ("textbook", "gloo", "crosscut", "crosscut_sp")]


def test_bench_mlp_weighs_both_forms_and_says_what_is_hidden(on_ranks: OnRanks) -> None:
    config = mlp.MLPConfig(2, shapes=("8x16x32",), gated=True, activation="silu", seconds=0.001, backward=True, explain=True)
    record = on_ranks(2, lambda mesh: mlp.run(context(mesh), config))[0]
    assert record.command == "bench mlp"
    assert record.config["correct"] is True
    both = {row.impl: row for row in record.rows if row.extra.get("pass") == "forward+backward"}
    assert list(both) == ["single", "textbook", "gloo", "crosscut", "crosscut_sp", "no_comm"]
    x, inner = 8 * 16 * 4, 8 * 32 * 4  # float32
    kept = {name: row.extra.get("saved_bytes") for name, row in both.items()}
    assert kept["single"] == x + 4 * inner  # x; gate, up, silu(gate) and the product
    assert kept["crosscut"] == x + 4 * inner // 2  # gate and up are one tensor here
    assert kept["crosscut_sp"] == x // 2 + 4 * inner // 2
    assert kept["no_comm"] is None
    for row in both.values():
        us = {r.impl: r.us.p50 for r in both.values() if r.us is not None}
        floor, plain = us["no_comm"], us["gloo"]
        if row.impl.startswith("crosscut") and plain > floor:
            assert row.extra["hidden_share"] == pytest.approx(1 - (us[row.impl] - floor) / (plain - floor), abs=1e-3)
        else:
            assert "hidden_share" not in row.extra
    assert any("all_reduce of 512 B goes by" in note for note in record.notes)
    assert any("a rank keeps 2.5 KiB for the backward, with sequence parallelism 2.2 KiB" in note for note in record.notes)


def test_bench_block_holds_both_passes_and_both_forms(on_ranks: OnRanks) -> None:
    config = block.BlockConfig(2, tokens=(1, 4), hidden=32, heads=4, seconds=0.001, backward=True, explain=True)
    record = on_ranks(2, lambda mesh: block.run(context(mesh), config))[0]
    assert record.config["correct"] is True
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 1, "ffn": 112}
    ways = ["single", "crosscut", "no_comm"]  # one KV head does not divide, so there is no plain split
    rows = [row for row in record.rows if row.subject == "block"]
    assert [r.impl for r in rows if r.shape == {"tokens": 1, **sizes}] == 2 * ways
    assert [r.impl for r in rows if r.shape == {"tokens": 4, **sizes}] == 2 * ["single", "crosscut", "crosscut_sp", "no_comm"]
    schedules = [note.split(": ")[1:3] for note in record.notes if ": schedule" in note and note.startswith("4 x 32 ")]
    plain, split = ("attention.qkv", "attention.o", "mlp.up", "mlp.down"), ("attention.qkv", "mlp.up")  # what the form changes
    forms = ("schedule", plain), ("schedule with sequence parallelism", split)
    assert schedules == [[form, name] for form, names in forms for name in names]
    with pytest.raises(UsageError, match="hidden 32 with 5 heads and 5 KV heads does not work out"):
        block.BlockConfig(2, hidden=32, heads=5).sizes(CPU)


def test_an_unwritten_output_is_found(on_ranks: OnRanks) -> None:
    """The check poisons memory first, so a call that forgets to write cannot show an earlier call's right result."""

    def body(mesh: Mesh) -> bool:
        right = torch.ones(64, 64)

        def forgetful() -> tuple[Tensor]:
            return (right.clone() if forgetful.first else torch.empty(64, 64),)  # type: ignore[attr-defined]

        forgetful.first = True  # type: ignore[attr-defined]
        assert torch.equal(time_case([forgetful], mesh.tp, "eager", Sampling(0.001)).outputs[0][0], right)
        forgetful.first = False  # type: ignore[attr-defined]
        return torch.equal(time_case([forgetful], mesh.tp, "eager", Sampling(0.001)).outputs[0][0], right)

    assert on_ranks(1, body) == [False]


@pytest.mark.parametrize(("seconds", "lead"), [(0.0, 1), (0.003, 0)], ids=["short", "long"])
def test_a_short_eager_call_has_another_one_before_the_clock(on_ranks: OnRanks, seconds: float, lead: int) -> None:
    import time

    def body(mesh: Mesh) -> tuple[int, int]:
        made: list[int] = []

        def call() -> tuple[Tensor]:
            made.append(1)
            time.sleep(seconds)
            return (torch.zeros(1),)

        return time_case([call], mesh.tp, "eager", Sampling(0.0, sample_us=0.1)).calls, len(made)

    ((timed, made),) = on_ranks(1, body)
    assert timed == 7  # the least samples, a call each
    assert made == 3 + 3 + 1 + timed * (1 + lead) + 1  # to warm up, roughly, once more, the samples, the check


def test_the_slowest_rank_counts_and_one_device_is_alone(on_ranks: OnRanks) -> None:
    import time

    def body(mesh: Mesh) -> tuple[list[float], list[float], int]:
        calls: list[int] = []

        def call() -> tuple[Tensor]:
            calls.append(1)
            time.sleep(0.002 if mesh.rank == 1 else 0)
            return (torch.zeros(1),)

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
