"""When a multiply is cut into pieces: the rule against measured figures, its bounds, and its words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from crosscut.env import settings
from crosscut.errors import UsageError
from crosscut.hardware import Wire
from crosscut.layers.schedule import (
    COUNTS,
    LEAST_GAIN,
    LEAST_HIDDEN,
    LEAST_MULTIPLY_US,
    LEAST_PIECE,
    OPS,
    Case,
    Machine,
    choose,
    forced_pieces,
    machine,
    multiply_us,
    pieces_us,
    plain_us,
    sent_bytes,
)

NVLINK = Wire("nvlink", 450.0, "NV18")
BOTH = ("library", "copies")
cases = some.builds(
    Case,
    op=some.sampled_from(OPS),
    tokens=some.integers(0, 40_000),
    inner=some.integers(1, 32_768),
    outer=some.integers(1, 32_768),
    tp=some.integers(1, 8),
    itemsize=some.sampled_from([2, 4, 8]),
)
carriers = some.sampled_from([("library",), BOTH])


@pytest.fixture
def h200() -> Machine:
    found = machine("NVIDIA H200", NVLINK)
    assert isinstance(found, Machine)
    return found


def gathered(tokens: int, inner: int, outer: int) -> Case:
    """Column-parallel with gathered output on two ranks, in bf16."""
    return Case("multiply_gather", tokens, inner, outer // 2, 2, 2)


# Two H200 joined by 18 NVLinks: tokens, in, out; half of the multiply by cuBLAS, NCCL textbook, copy-engine overlap in us
MEASURED = [
    (512, 4096, 8192, 24.0, 73.4, 76.9),
    (2048, 4096, 8192, 89.3, 226.3, 127.7),
    (8192, 8192, 8192, 761.0, 1177.1, 835.4),
]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]} tokens")
def test_estimates_lie_near_what_was_measured_and_on_the_safe_side(h200: Machine, row: tuple[float, ...]) -> None:
    tokens, inner, outer, half, plain, overlapped = row
    case = gathered(int(tokens), int(inner), int(outer))
    assert multiply_us(case, h200) == pytest.approx(half, rel=0.1)
    assert plain * 0.85 < plain_us(case, h200) < plain  # less than measured: the plain path is not made to look bad
    if tokens > 512:
        assert overlapped < pieces_us(case, h200, 4, "copies") < overlapped * 1.25
    else:
        assert choose(case, h200, None, BOTH).pieces == 0, "the overlap lost here"


def test_it_is_chosen_where_it_was_measured_to_win(h200: Machine) -> None:
    for tokens, inner, outer in ((2048, 4096, 8192), (8192, 8192, 8192)):
        found = choose(gathered(tokens, inner, outer), h200, None, BOTH)
        assert found.carrier == "copies"
        assert found.pieces in COUNTS
        assert "by estimate and not measured here" in found.reason


@given(cases, carriers)
def test_what_is_chosen_keeps_the_rules(case: Case, by: tuple[str, ...]) -> None:
    known = Machine(989.0, 450.0, 4800.0)
    found = choose(case, known, None, by)
    assert found.reason
    if found.pieces:
        multiply, plain, best = (
            multiply_us(case, known),
            plain_us(case, known),
            pieces_us(case, known, found.pieces, found.carrier),
        )
        assert found.carrier in by
        assert case.tp > 1
        assert multiply >= LEAST_MULTIPLY_US
        assert found.pieces * LEAST_PIECE <= case.tokens
        assert plain >= LEAST_GAIN * best
        assert plain - best >= LEAST_HIDDEN * (plain - multiply) * 0.999
        assert best >= multiply * 0.999, "no schedule is faster than the multiply alone"


@given(cases, some.integers(1, 16), some.sampled_from(BOTH))
def test_estimates_are_bounded_by_their_parts(case: Case, pieces: int, carrier: str) -> None:
    known = Machine(989.0, 450.0, 4800.0)
    if case.tp == 1:
        return
    multiply, plain = multiply_us(case, known), plain_us(case, known)
    assert plain > multiply
    assert pieces_us(case, known, pieces, carrier) >= multiply * 0.999
    slower = replace(known, link_gbps=100.0)
    assert plain_us(case, slower) >= plain
    assert pieces_us(case, slower, pieces, carrier) >= pieces_us(case, known, pieces, carrier)


@given(cases, carriers)
def test_nothing_is_cut_where_nothing_is_known(case: Case, by: tuple[str, ...]) -> None:
    assert choose(case, "nobody measured this", None, by).pieces == 0
    forced = choose(case, "nobody measured this", 4, by)
    assert forced.pieces == (min(4, case.tokens) if case.tp > 1 else 0)
    assert choose(case, "nobody measured this", 0, by).pieces == 0


def test_bytes_of_each_exchange() -> None:
    case = Case("", tokens=10, inner=3, outer=5, tp=4, itemsize=2)
    sent = {op: sent_bytes(replace(case, op=op)) for op in OPS}
    assert sent == {"gather_multiply": 45, "multiply_scatter": 75, "multiply_gather": 300, "multiply_reduce": 150}


def test_the_reasons_of_the_plain_path(h200: Machine) -> None:
    case = gathered(2048, 4096, 8192)
    assert str(choose(replace(case, tp=1), h200)) == "plain: a group of one does not communicate"
    assert str(choose(replace(case, tokens=0), h200, 4)) == "plain: no tokens"
    assert str(choose(case, h200, 0)) == "plain: CROSSCUT_SCHEDULE=plain"
    assert str(choose(case, h200, 4, BOTH)) == "4 pieces by copies: CROSSCUT_SCHEDULE"
    assert str(choose(replace(case, itemsize=8), h200)) == "plain: no overlap has been measured in float64"
    assert "the multiply is too short: 23 us by estimate" in str(choose(gathered(512, 4096, 8192), h200))
    assert "pieces would not clearly gain" in str(choose(replace(case, op="multiply_reduce"), h200, None, BOTH))
    assert machine("NVIDIA H200", Wire("pcie", 64.0, "SYS")) == "no overlap has been measured on NVIDIA H200 over pcie"
    assert "on Some GPU over nvlink" in str(machine("Some GPU", NVLINK))


def test_the_setting() -> None:
    for value, pieces in (("auto", None), ("plain", 0), ("pieces", 2), ("pieces:1", 1), ("PIECES:16", 16)):
        assert forced_pieces(settings({"CROSSCUT_SCHEDULE": value}).schedule) == pieces
    assert settings({}).schedule == "auto"
    for value in ("pieces:0", "pieces:17", "pieces:", "piece"):
        with pytest.raises(UsageError, match=r"CROSSCUT_SCHEDULE .* is not known") as seen:
            settings({"CROSSCUT_SCHEDULE": value})
        assert seen.value.code == "bad-env"
