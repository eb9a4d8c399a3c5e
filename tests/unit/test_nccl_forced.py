"""NCCL's log is read in all its forms, and a choice is only called followed when the log says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.bench.collectives import CollectivesConfig
from crosscut.bench.extend import all_exact, extend
from crosscut.bench.nccl_forced import LINKS, Choice, measure, need_nccl, parse_choices, run
from crosscut.bench.nccl_log import Cost, Decision, explain, parse_costs, parse_decisions
from crosscut.env import exported
from crosscut.errors import RankError, UsageError
from crosscut.records import Hardware, Row, RunRecord, Times

TABLE_2_28 = """\
node:11:11 [0] NCCL INFO NCCL version 2.28.9+cuda12.9
node:11:40 [0] NCCL INFO   Algorithm   |                            Tree                  |                            Ring                  |
node:11:40 [0] NCCL INFO   Protocol    |             LL |          LL128 |         Simple |             LL |          LL128 |         Simple |
node:11:40 [0] NCCL INFO  Max NThreads |            512 |            640 |            512 |            512 |            640 |            512 |
node:11:40 [0] NCCL INFO     Broadcast |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |     7.2/  60.0 |    15.2/ 300.0 |    11.6/ 360.0 |
node:11:40 [0] NCCL INFO     AllReduce |     8.0/  60.0 |    16.5/ 200.0 |    28.0/ 180.0 |     7.8/  50.0 |    18.0/ 220.0 |    20.0/ 240.0 |
node:11:40 [0] NCCL INFO   Algorithm   |                            NVLS                  |                        NVLSTree                  |
node:11:40 [0] NCCL INFO   Protocol    |             LL |          LL128 |         Simple |             LL |          LL128 |         Simple |
node:11:40 [0] NCCL INFO     AllReduce |     0.0/   0.0 |     0.0/   0.0 |    25.0/ 300.0 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |
"""  # noqa: E501
TABLE_2_18 = """\
node:11:40 [0] NCCL INFO Latency/AlgBw |    Tree/    LL |    Tree/ LL128 |    Ring/Simple |
node:11:40 [0] NCCL INFO  Max NThreads |            512 |            640 |            512 |
node:11:40 [0] NCCL INFO ReduceScatter |     6.6/  40.1|    14.0/   0.0|     8.4/ 330.2|
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("h:3:9 [0] NCCL INFO 1048576 Bytes -> Algo 1 proto 2 time 28.6", Decision(None, 1 << 20, "ring", "simple", us=28.6)),
        ("h:3:9 [0] NCCL INFO Reduce: 64 Bytes -> Algo 1 proto 0 time 9.5", Decision("reduce", 64, "ring", "ll", us=9.5)),
        (
            "h:3:9 [0] NCCL INFO AllReduce: 8388608 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}",
            Decision("all_reduce", 1 << 23, "ring", "simple", 16),
        ),
        (
            "[2026-01-02 03:04:05] h:3:9 [0] NCCL INFO Reduce: 64 Bytes -> Algo NVLS_TREE proto LL128 channel{Lo..Hi}={2..2}",
            Decision("reduce", 64, "nvlstree", "ll128", 1),
        ),
        (
            "h:3:9 [0] NCCL INFO AllReduce: 512 Bytes -> Algo Tree proto LL channel{Lo..Hi}={0..1}",
            Decision("all_reduce", 512, "tree", "ll", 2),
        ),
        (
            "h:3:9 [0] NCCL INFO AllReduce [Symmetric]: 1024 Bytes -> Kernel AllReduce_AGxLL_R nchannels 4 nthreads 512",
            Decision("all_reduce", 1024, "AllReduce_AGxLL_R", None, 4),
        ),
        ("h:3:9 [0] NCCL INFO AllReduce: 64 Bytes -> Algo 9 proto 0 time 1.0", Decision("all_reduce", 64, "9", "ll", us=1.0)),
    ],
)  # fmt: skip
def test_decisions_of_all_versions(line: str, expected: Decision) -> None:
    assert parse_decisions(f"noise\n{line}\n{line}\n") == [expected]


def test_lines_without_a_decision_are_passed_over() -> None:
    assert parse_decisions(TABLE_2_28 + "Bytes -> Algo\n4096 Bytes -> Algo\n") == []
    assert parse_costs("a | b\n\nNCCL INFO Protocol | LL |\nAllReduce | 1.0/ 2.0 |\n") == []


def test_cost_tables_of_old_and_new_versions() -> None:
    new = {(cost.op, cost.path): cost for cost in parse_costs(TABLE_2_28)}
    assert new["all_reduce", "tree/ll"] == Cost("all_reduce", "tree/ll", 8.0, 60.0)
    assert new["all_reduce", "ring/simple"] == Cost("all_reduce", "ring/simple", 20.0, 240.0)
    assert new["all_reduce", "nvls/simple"].gbps == 300.0
    assert len(new) == 18
    assert parse_costs(TABLE_2_18) == [
        Cost("reduce_scatter", "tree/ll", 6.6, 40.1),
        Cost("reduce_scatter", "tree/ll128", 14.0, 0.0),
        Cost("reduce_scatter", "ring/simple", 8.4, 330.2),
    ]


def test_the_models_time() -> None:
    assert Cost("all_reduce", "ring/simple", 20.0, 240.0).us(24_000_000) == pytest.approx(20 + 100)


def test_explanation_names_switches_and_the_models_ranking() -> None:
    def took(nbytes: int, algorithm: str, protocol: str) -> Decision:
        return Decision("all_reduce", nbytes, algorithm, protocol)

    decisions = [took(1 << 24, "nvls", "simple"), took(1024, "ring", "ll"), took(4096, "ring", "ll")]
    (said,) = explain(decisions, parse_costs(TABLE_2_28), ["all_reduce", "reduce"])
    assert said == (
        "Left alone, NCCL takes for all_reduce: ring/ll from 1 KiB on, nvls/simple from 16 MiB on. Its own model (latency + "
        "size / bandwidth) says: at 1 KiB ring/ll 7.82 us, tree/ll 8.02 us, tree/ll128 16.5 us; "
        "at 16 MiB nvls/simple 80.9 us, ring/simple 89.9 us, ring/ll128 94.3 us."
    )
    assert explain([Decision(None, 64, "ring", "ll")], [], ["reduce"]) == [
        "Left alone, NCCL takes for reduce: ring/ll from 64 B on."
    ]


def test_choices_are_every_combination() -> None:
    assert [choice.label for choice in parse_choices("Ring, tree", "ll,simple")] == [
        "ring/ll", "ring/simple", "tree/ll", "tree/simple",
    ]  # fmt: skip
    assert [choice.label for choice in parse_choices(proto="ll128", link="shm,socket")] == [
        "ll128 over shm",
        "ll128 over socket",
    ]
    assert [choice.label for choice in parse_choices(link="nvlink")] == ["nvlink"]
    assert parse_choices() == ()
    assert Choice("ring", "ll", "socket").environ == {"NCCL_ALGO": "ring", "NCCL_PROTO": "ll"} | LINKS["socket"]
    assert Choice().environ == {"NCCL_ALGO": None, "NCCL_PROTO": None}


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"algo": "rign"}, "NCCL algorithm 'rign' is not known; did you mean 'ring'"),
        ({"proto": "ll12"}, "NCCL protocol 'll12' is not known; did you mean 'll128'"),
        ({"link": "nvlnik"}, "link 'nvlnik' is not known; did you mean 'nvlink'"),
    ],
)
def test_unknown_names_are_refused(given_: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_choices(**given_)


def test_ranks_without_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="these ranks talk over gloo") as caught:
        need_nccl(2, "auto", "cpu")
    assert caught.value.code == "no-backend"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="needs fresh ranks"):
        need_nccl(2, "auto", "cpu")


def test_exported_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    seen: list[object] = []

    def body() -> None:
        with exported({"NCCL_ALGO": None, "NCCL_PROTO": "LL"}):
            seen.extend(("NCCL_ALGO" in os.environ, os.environ["NCCL_PROTO"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert seen == [False, "LL"]
    assert (os.environ["NCCL_ALGO"], "NCCL_PROTO" in os.environ) == ("Tree", False)


CONFIG = CollectivesConfig(2, ops=("all_reduce", "send_recv"), sizes=(4096,), seconds=0.5, pairs=True)


def row(op: str, impl: str = "nccl", **extra: object) -> Row:
    us = Times(9.0, 10.0, 11.0, 12.0)
    return Row(
        op,
        impl,
        "eager",
        2,
        "float32",
        bytes=4096,
        us=us,
        n=9,
        algbw_gbps=1.0,
        busbw_gbps=1.0,
        extra={"in_place": False} | extra,
    )


class Nccl:
    """Stands for fresh ranks: looks at its environment as NCCL does, writes NCCL's log, and gives a record."""

    def __init__(self, takes: Callable[[str | None, str | None], tuple[str, str]]) -> None:
        self.takes, self.seen, self.configs = takes, list[dict[str, str]](), list[CollectivesConfig]()

    def __call__(self, config: CollectivesConfig) -> RunRecord:
        told = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        self.seen.append(told)
        self.configs.append(config)
        if "NCCL_DEBUG_FILE" in told:
            algorithm, protocol = self.takes(told.get("NCCL_ALGO"), told.get("NCCL_PROTO"))
            line = (
                f"h:1:1 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..1}}\n"
            )
            Path(told["NCCL_DEBUG_FILE"].replace("%h", "host").replace("%p", "17")).write_text(line)
        rows = [row(op) for op in config.ops] + ([row("all_reduce", "crosscut")] if "nccl" not in config.impls else [])
        return RunRecord("bench collectives", {}, Hardware("none", 2), {}, rows, notes=["base"])


def obedient(algorithm: str | None, protocol: str | None) -> tuple[str, str]:
    return algorithm or "RING", protocol or "LL"


def test_forced_rows_join_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")  # the user's own: it must not be mixed into a choice
    nccl = Nccl(obedient)
    record = run(CONFIG, parse_choices("tree", "ll128") + parse_choices(link="shm"), nccl)
    assert record is not None
    assert [(r.subject, r.impl, r.extra.get("forced"), r.path) for r in record.rows if r.us] == [
        ("all_reduce", "nccl", None, None), ("send_recv", "nccl", None, None), ("all_reduce", "crosscut", None, None),
        ("all_reduce", "nccl", "tree/ll128", "tree/ll128"),
        ("all_reduce", "nccl", "shm", "ring/ll"), ("send_recv", "nccl", "shm", None),
    ]  # fmt: skip
    assert record.notes[-2:] == ["base", "Left alone, NCCL takes for all_reduce: ring/ll from 4 KiB on."]
    assert record.config["correct"] is True
    own, natural, tried, timed, *_ = nccl.seen
    assert own == {"NCCL_PROTO": "Simple"}
    assert "NCCL_PROTO" not in natural
    assert natural["NCCL_DEBUG_SUBSYS"] == "TUNING"
    assert (tried["NCCL_ALGO"], tried["NCCL_DEBUG"]) == ("tree", "INFO")
    assert timed == {"NCCL_ALGO": "tree", "NCCL_PROTO": "ll128"}  # no log while it is timed
    assert nccl.configs[3].ops == ("all_reduce",)
    assert (nccl.configs[2].seconds, nccl.configs[3].seconds, nccl.configs[3].pairs) == (0.001, 0.5, False)
    assert nccl.seen[5] == {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}


def test_wrong_elements_of_a_choice_make_the_record_wrong() -> None:
    first = {"rank": 1, "index": 3, "got": 2.0, "expected": 5.0}
    base = RunRecord("bench collectives", {"correct": True}, Hardware("none", 2), {}, [row("all_reduce")])
    record = extend(base, [row("all_reduce", wrong=2, first_wrong=first, forced="tree")], ["more"])
    assert record.config["correct"] is False
    assert (
        "WRONG: all_reduce by nccl tree (eager, 4 KiB): 2 elements differ; the first is element 3 on rank 1, 2 instead of 5."
    ) in record.notes
    assert record.notes[-1] == "more"
    assert all_exact([row("barrier")]) == "What was measured has no result to check."


def test_a_choice_that_nccl_ignores_gives_no_rows() -> None:
    rows, notes = measure(Choice("nvls"), CONFIG, Nccl(lambda algorithm, protocol: ("RING", "LL")))
    assert rows == []
    assert notes == ["nccl nvls was not followed for all_reduce (took ring/ll): no such rows."]


def test_a_choice_that_nccl_refuses_is_noted_and_the_rest_goes_on() -> None:
    def refuse(config: CollectivesConfig) -> RunRecord:
        raise RankError("rank 1 of 2 failed: no algorithm/protocol available\nmore", code="rank-failed")

    assert measure(Choice("pat"), CONFIG, refuse) == (
        [],
        ["nccl pat cannot run here: rank 1 of 2 failed: no algorithm/protocol available"],
    )

    def interrupted(config: CollectivesConfig) -> RunRecord:
        raise RankError("stopped", code="interrupted")

    with pytest.raises(RankError, match="stopped"):
        measure(Choice("pat"), CONFIG, interrupted)


def test_a_choice_without_results_repeats_what_the_ranks_said() -> None:
    def nothing(config: CollectivesConfig) -> RunRecord:
        notes = ["nccl did not run all_reduce sum: NCCL error.", "other"]
        return RunRecord("bench collectives", {}, Hardware("none", 2), {}, [], notes=notes)

    assert measure(Choice("tree"), CONFIG, nothing) == (
        [],
        ["nccl tree gave no result. nccl did not run all_reduce sum: NCCL error."],
    )


def test_an_op_without_algorithms_is_not_forced() -> None:
    nccl = Nccl(obedient)
    rows, (note,) = measure(Choice("ring"), CollectivesConfig(2, ops=("send_recv",)), nccl)
    assert (rows, nccl.seen) == ([], [])
    assert "NCCL has algorithms for all_reduce" in note
