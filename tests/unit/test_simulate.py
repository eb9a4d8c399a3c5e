"""Schedules: the formulas count what the plans send, the plans end where the collective should, the picture tells the truth."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.bench.schedules import ALGORITHMS, Message, Steps, check, chunk_edges, formula, holdings, ops, schedule
from crosscut.bench.simulate import MOST_BYTES, SimulateConfig, refuse, sentences
from crosscut.cli.bench_simulate import WIDTH, picture
from crosscut.errors import UsageError
from crosscut.records import Row

CASES = [(algorithm, op) for algorithm in ALGORITHMS for op in ops(algorithm)]
cases = st.sampled_from(CASES)
worlds = st.integers(2, 17)


def sent_by(steps: Steps, world: int) -> list[int]:
    return [sum(m.nbytes for step in steps for m in step if m.src == rank) for rank in range(world)]


@given(cases, worlds, st.integers(1, 1000))
def test_formula_is_what_the_busiest_rank_sends(case: tuple[str, str], world: int, elements_of_a_chunk: int) -> None:
    nbytes = 4 * world * elements_of_a_chunk
    steps, told = schedule(*case, world, nbytes), formula(*case, world, nbytes)
    assert len(steps) == told.steps
    assert max(sent_by(steps, world)) == pytest.approx(told.bytes_per_rank, rel=1e-12)


@given(cases, worlds, st.integers(17, 5000))
def test_formula_holds_to_one_element_a_message_for_uneven_chunks(case: tuple[str, str], world: int, elements: int) -> None:
    steps, told = schedule(*case, world, 4 * elements), formula(*case, world, 4 * elements)
    messages = max(sum(m.src == rank for step in steps for m in step) for rank in range(world))
    assert abs(max(sent_by(steps, world)) - told.bytes_per_rank) <= 4 * messages


@given(worlds, st.integers(17, 5000))
def test_ring_all_reduce_moves_twice_the_tensor_less_one_chunk_in_all(world: int, elements: int) -> None:
    """2(n-1)/n x S for each of n ranks, exactly, however the chunks fall."""
    assert sum(sent_by(schedule("ring", "all_reduce", world, 4 * elements), world)) == 2 * (world - 1) * 4 * elements


@given(cases, worlds)
def test_every_plan_ends_where_its_collective_should(case: tuple[str, str], world: int) -> None:
    algorithm, op = case
    last = holdings(schedule(algorithm, op, world, 4 * world), op, world)[-1]
    if op == "all_reduce":
        assert last == [[world] * world] * world
    elif op == "reduce_scatter":
        assert [last[rank][rank] for rank in range(world)] == [world] * world
    elif op == "reduce":
        assert last[0] == [world] * world
    else:
        assert last == [[1] * world] * world


@given(cases, worlds)
def test_no_rank_sends_twice_to_another_in_a_step_nor_what_it_does_not_hold(case: tuple[str, str], world: int) -> None:
    steps = schedule(*case, world, 4 * world)
    states = holdings(steps, case[1], world)
    for step, state in zip(steps, states[:-1], strict=True):
        assert step, "a step without messages"
        assert len({(m.src, m.dst) for m in step}) == len(step)
        for m in step:
            assert m.src != m.dst
            assert m.nbytes > 0
            assert all(state[m.src][m.first : m.end])


def test_a_dropped_message_shows_in_the_holdings() -> None:
    steps = schedule("ring", "all_reduce", 4, 64)
    del steps[2][1]
    assert holdings(steps, "all_reduce", 4)[-1] != [[4] * 4] * 4


def test_known_plans() -> None:
    ring = schedule("ring", "all_gather", 3, 12)
    assert ring[0] == [Message(0, 1, 0, 1, 4), Message(1, 2, 1, 2, 4), Message(2, 0, 2, 3, 4)]
    tree = schedule("tree", "reduce", 4, 16)
    assert tree == [[Message(3, 1, 0, 4, 16, True)], [Message(1, 0, 0, 4, 16, True), Message(2, 0, 0, 4, 16, True)]]
    assert chunk_edges(3, 20) == [0, 1, 3, 5]
    assert formula("two-shot", "all_reduce", 8, 1 << 20).bytes_per_rank == 2 * 7 / 8 * (1 << 20)
    assert formula("tree", "all_reduce", 8, 100).bytes_per_rank == 300
    assert formula("one-shot", "all_reduce", 8, 100).bytes_per_rank == 700


@pytest.mark.parametrize(
    ("given_", "code", "words"),
    [
        (("rnig", "all_reduce", 4, 64), "bad-option", "'ring'"),
        (("two-shot", "all_gather", 4, 64), "bad-option", "no two-shot for 'all_gather'"),
        (("ring", "all_redcue", 4, 64), "bad-option", "did you mean 'all_reduce'"),
        (("ring", "all_reduce", 1, 64), "bad-size", "over 1 rank"),
        (("ring", "all_reduce", 4, 12), "bad-size", "12 bytes cannot be dealt to 4 ranks"),
        (("ring", "all_reduce", 4, 63), "bad-size", "63 bytes cannot be dealt"),
    ],
)
def test_what_cannot_be_planned_is_refused(given_: tuple[str, str, int, int], code: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check(*given_)
    assert caught.value.code == code


def test_what_this_host_cannot_hold_is_refused() -> None:
    refuse(SimulateConfig("ring", "all_reduce", 4, MOST_BYTES // 4))
    with pytest.raises(UsageError, match="at most 512 MiB"):
        refuse(SimulateConfig("ring", "all_reduce", 4, MOST_BYTES // 4 + 4))
    with pytest.raises(UsageError, match="at most 64 ranks"):
        refuse(SimulateConfig("ring", "all_reduce", 65, 1 << 20))


def row(algorithm: str, op: str, world: int, nbytes: int, **extra: object) -> Row:
    steps = schedule(algorithm, op, world, nbytes)
    told = formula(algorithm, op, world, nbytes)
    counted = {
        "op": op,
        "steps": [[{"src": m.src, "dst": m.dst, "bytes": m.nbytes} for m in step] for step in steps],
        "sent": sent_by(steps, world),
        "formula": {"steps": told.steps, "bytes_per_rank": told.bytes_per_rank, "text": told.text},
    }
    return Row("simulate", algorithm, "host", world, "float32", bytes=nbytes, extra=counted | extra)


def test_sentences_say_whether_the_count_agrees() -> None:
    said = sentences(row("ring", "all_reduce", 4, 64))
    assert said[0] == (
        "ring all_reduce of 64 B over 4 ranks: 6 steps and 24 messages were counted; the busiest rank sent 96 B."
    )
    assert said[1].endswith("2(n-1)/n x S = 96 B for the busiest rank: it agrees.")
    assert "1 step and 2 messages" in sentences(row("one-shot", "all_reduce", 2, 64))[0]
    more = sentences(row("ring", "all_reduce", 4, 64, sent=[96, 96, 96 + 4 * 6 + 4, 96]))
    assert more[1].endswith("IT DOES NOT AGREE.")
    first = {"rank": 2, "index": 5, "got": float("nan"), "expected": 7.0}
    assert sentences(row("ring", "all_gather", 4, 64, wrong=3, first_wrong=first))[2] == (
        "WRONG: 3 elements differ, the first on rank 2 at index 5: nan instead of 7."
    )


def test_picture_of_a_ring() -> None:
    lines = picture(row("ring", "all_reduce", 2, 64))
    assert [re.sub(r" +", " ", line) for line in lines[2:8]] == [
        " rank 0 rank 1",
        "start 1 1 1 1",
        " sends c1>1 c0>0",
        "step 1 [2] 1 1 [2]",
        " sends c0>1 c1>0",
        "step 2 2 [2] [2] 2",
    ]


@pytest.mark.parametrize(("algorithm", "op"), CASES)
@pytest.mark.parametrize("world", [2, 3, 5, 6, 9])
def test_pictures_fit_and_end_full(algorithm: str, op: str, world: int) -> None:
    lines = picture(row(algorithm, op, world, 4 * world))
    assert max(map(len, lines)) <= WIDTH
    last = [line for line in lines if line.startswith("step ")][-1]
    assert len([line for line in lines if line.startswith("step ")]) == len(schedule(algorithm, op, world, 4 * world))
    if op == "all_reduce":
        assert set(re.findall(r"\d", last.partition(" ")[2][3:])) == {str(world)}


def test_words_of_the_picture() -> None:
    def sends(algorithm: str, op: str, world: int) -> list[str]:
        return [line.split()[1:] for line in picture(row(algorithm, op, world, 4 * world)) if line.startswith("  sends")]

    assert sends("two-shot", "all_reduce", 3) == [["each>*"] * 3, ["c0>*", "c1>*", "c2>*"]]
    assert sends("tree", "broadcast", 4) == [["all>1,2", "-", "-", "-"], ["-", "all>3", "-", "-"]]
    assert "up to 9 ranks" in picture(row("ring", "all_reduce", 10, 40))[1]
