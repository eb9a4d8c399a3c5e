"""Fits recover what made the numbers, crossings lie where the curves meet, verdicts say what the references say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.bench.fit import crossings, curves, fit, fit_line, summarise
from crosscut.hardware import REFERENCES, Wire, references, wire
from crosscut.records import Row, Times

SIZES = [1 << power for power in range(10, 31, 2)]
H200 = "NVIDIA H200"


def square(word: str, world: int) -> list[list[str]]:
    return [["-" if i == j else word for j in range(world)] for i in range(world)]


def pairs(inside: str, across: str) -> list[list[str]]:
    """Four GPUs in two pairs."""
    return [["-" if i == j else inside if i // 2 == j // 2 else across for j in range(4)] for i in range(4)]


NVLINK = square("NV18 450 GB/s", 2)


def row(nbytes: int, us: float, impl: str = "nccl", op: str = "all_reduce", spread: float = 0.02, **extra: object) -> Row:
    times = Times(us * (1 - spread), us, us * (1 + spread), us * (1 + 2 * spread))
    rate = nbytes / us / 1e3
    return Row(op, impl, "graph", 2, "bfloat16", bytes=nbytes, us=times, algbw_gbps=rate, busbw_gbps=rate, extra=extra)


def sweep(alpha: float, gbps: float, impl: str = "nccl", **extra: object) -> list[Row]:
    return [row(size, alpha + size / gbps / 1e3, impl, **extra) for size in SIZES]


def of(subject: str, rows: list[Row], device: str = H200, links: list[list[str]] = NVLINK) -> list[Row]:
    return [found for found in summarise(rows, device, links) if found.subject == subject]


@given(st.floats(0.1, 1e3), st.floats(0.01, 1e3))
def test_a_line_is_recovered(alpha: float, gbps: float) -> None:
    line = fit_line([(size, alpha + size / gbps / 1e3) for size in SIZES])
    assert line is not None
    assert line.alpha == pytest.approx(alpha, rel=1e-5)
    assert 1 / line.beta / 1e3 == pytest.approx(gbps, rel=1e-5)
    assert line.r2 == pytest.approx(1.0)
    assert line.alpha_err < 1e-4 * alpha


def test_the_standard_errors_cover_the_truth() -> None:
    """Alternating errors of 2 %: each parameter lies within three standard errors, and the errors are about 1 %."""
    points = [(size, (10 + size / 3e5) * (1.02 if i % 2 else 0.98)) for i, size in enumerate(SIZES)]
    line = fit_line(points)
    assert line is not None
    assert abs(line.alpha - 10) < 3 * line.alpha_err
    assert abs(line.beta - 1 / 3e5) < 3 * line.beta_err
    assert 0.003 < line.alpha_err / 10 < 0.03
    assert 0.9 < line.r2 < 1


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """An error of 3 % at 1 GiB is 100 us; a fit on absolute errors would put the latency tens of microseconds off."""
    points = [(size, (10 + size / 3e5) * (1.03 if size == SIZES[-1] else 1)) for size in SIZES]
    line = fit_line(points)
    assert line is not None
    assert line.alpha == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 1.0), (2, 2.0)],
        [(1024, 9.0), (2048, 8.0), (4096, 7.0), (8192, 6.0)],
        [(1024, 9.0), (1024, 8.0), (1024, 7.0)],
    ],
)
def test_no_line_where_none_can_be_told(points: list[tuple[int, float]]) -> None:
    assert fit_line(points) is None
    assert fit(points) == []


def test_a_latency_is_never_negative() -> None:
    line = fit_line([(size, size**1.3 / 1e4) for size in SIZES])
    assert line is not None
    assert line.alpha == 0
    assert line.beta > 0


def test_a_change_of_algorithm_makes_two_lines() -> None:
    """One-shot up to 1 MiB, then a ring: each part gives back its own parameters."""
    points = [(size, 3 + size / 5e4 if size <= 1 << 20 else 40 + size / 3.5e5) for size in SIZES]
    low, high = fit(points)
    assert (low.to_bytes, high.from_bytes) == (1 << 20, 1 << 22)
    assert (low.alpha, 1 / low.beta / 1e3) == (pytest.approx(3), pytest.approx(50))
    assert (high.alpha, 1 / high.beta / 1e3) == (pytest.approx(40), pytest.approx(350))
    assert low.points + high.points == len(SIZES)


def test_noise_alone_makes_no_second_line() -> None:
    points = [(size, (10 + size / 3e5) * (1 + 0.15 * math.sin(7 * i * i))) for i, size in enumerate(SIZES)]
    assert len(fit(points)) == 1


def test_a_fit_row_says_what_it_belongs_to() -> None:
    (found,) = of("fit", sweep(10, 250, redop="sum"))
    assert (found.impl, found.mode, found.world, found.dtype) == ("nccl", "graph", 2, "bfloat16")
    extra = found.extra
    assert (extra["op"], extra["redop"], extra["points"]) == ("all_reduce", "sum", len(SIZES))
    assert (extra["from_bytes"], extra["to_bytes"]) == (SIZES[0], SIZES[-1])
    assert extra["alpha_us"] == pytest.approx(10)
    assert extra["gbps"] == pytest.approx(250)
    assert extra["half_bytes"] == pytest.approx(10 * 250e3), "where latency and transfer take equally long"


def test_out_of_place_goes_before_in_place_and_wrong_results_count_nowhere() -> None:
    both = sweep(10, 250, in_place=False) + sweep(20, 100, in_place=True)
    assert of("fit", both)[0].extra["gbps"] == pytest.approx(250)
    assert of("fit", sweep(20, 100, in_place=True))[0].extra["gbps"] == pytest.approx(100)
    assert summarise(sweep(10, 250, wrong=3), H200, NVLINK) == []


def test_each_redop_and_implementation_has_its_own_curve() -> None:
    rows = [
        *sweep(1, 9, redop="sum"),
        *sweep(1, 8, redop="max"),
        *sweep(1, 7, "nccl ring", redop="sum"),
        *(Row("pair", "nccl", "graph", 2, "bfloat16", bytes=size, us=Times(1, 1, 1, 1)) for size in SIZES),
        Row("barrier", "nccl", "graph", 2, "-", us=Times(1, 1, 1, 1)),
    ]
    assert [(series.redop, series.impl) for series in curves(rows)] == [("sum", "nccl"), ("max", "nccl"), ("sum", "nccl ring")]


def test_the_crossing_of_two_known_lines() -> None:
    """3 us + S/100 meets 10 us + S/300 at S = 7 us / (1/100 - 1/300) GB/s = 1.05 MB."""
    (found,) = of("crossover", sweep(3, 100, "crosscut") + sweep(10, 300, "nccl"))
    assert (found.extra["below"], found.extra["above"]) == ("crosscut", "nccl")
    assert found.extra["bytes"] == pytest.approx(1.05e6, rel=0.1), "between the sizes 1 and 4 MiB, on a log scale"
    (mirrored,) = of("crossover", sweep(10, 300, "nccl") + sweep(3, 100, "crosscut"))
    assert mirrored.extra == found.extra


def test_what_was_forced_upon_nccl_is_not_judged() -> None:
    fast, forced = row(1 << 28, 900.0), row(1 << 28, 2000.0, "nccl tree", forced={"algorithm": "tree"})
    (found,) = of("verdict", [fast, forced])
    assert (found.impl, found.extra["level"]) == ("nccl", "good")
    assert of("verdict", [forced]) == []
    assert of("crossover", sweep(3, 100, "nccl tree") + sweep(10, 300))[0].extra["below"] == "nccl tree"


def test_noise_makes_no_crossing_and_other_modes_do_not_meet() -> None:
    first = curves([row(size, 10 * (1.01 if i % 2 else 0.99)) for i, size in enumerate(SIZES)])
    second = curves([row(size, 10.0, "crosscut") for size in SIZES])
    assert crossings(*first.values(), *second.values()) == []
    sharp = curves([row(size, 10 * (1.3 if i % 2 else 0.7)) for i, size in enumerate(SIZES)])
    assert len(crossings(*sharp.values(), *second.values())) == len(SIZES) - 1, "the same without overlap"
    other = [Row("all_reduce", "nccl", "eager", 2, "bfloat16", bytes=r.bytes, us=r.us) for r in sweep(10, 300)]
    assert of("crossover", sweep(3, 100, "crosscut") + other) == []


@pytest.mark.parametrize(("rate", "level", "percent"), [(302, "good", 101), (275, "good", 92), (200, "low", 67)])
def test_a_verdict_against_two_h200(rate: float, level: str, percent: float) -> None:
    (found,) = of("verdict", [row(1 << 28, (1 << 28) / rate / 1e3), row(1 << 10, 10.0)])
    assert found.extra["level"] == level
    assert found.extra["percent"] == pytest.approx(rate / 299.8 * 100, abs=0.1)
    assert f"{percent} % of what two H200 on NVLink reach (300 GB/s)." in found.extra["text"]
    assert "NCCL 2.28.9" in found.extra["source"]
    assert found.extra["text"].startswith(f"all_reduce: {rate} GB/s of bus bandwidth at 256 MiB (nccl, graph)")


def test_nccl_is_judged_where_it_ran_and_else_the_fastest() -> None:
    slow, fast = row(1 << 28, 2000.0), row(1 << 28, 800.0, "crosscut")
    assert of("verdict", [slow, fast])[0].extra["level"] == "low", "a fast kernel does not hide a slow NCCL"
    (found,) = of("verdict", [fast])
    assert (found.impl, found.extra["level"]) == ("crosscut", "good")


@pytest.mark.parametrize(
    ("device", "links", "size", "level", "words"),
    [
        (H200, square("SYS no P2P", 2), 1 << 28, "low", "PCIe through the CPU: P2P is off (nvidia-smi topo -p2p r tells why)"),
        (H200, square("PIX", 2), 1 << 28, "unknown", "% of PCIe's 64 GB/s one way (PIX)"),
        (H200, NVLINK, 1 << 20, "unknown", "the smallest reference is for 16 MiB"),
        ("CPU, 2 threads, Xeon", [], 1 << 28, "unknown", "no reference for this hardware"),
        ("NVIDIA H100 NVL", square("NV12 300 GB/s", 2), 1 << 28, "unknown", "no reference for this hardware"),
        (H200, pairs("NV18 450 GB/s", "SYS"), 1 << 28, "unknown", "several ways"),
    ],
)  # fmt: skip
def test_verdicts_without_a_reference(device: str, links: list[list[str]], size: int, level: str, words: str) -> None:
    (found,) = of("verdict", [row(size, size / 25e3)], device, links)
    assert (found.extra["level"], found.extra["percent"]) == (level, None)
    assert words in found.extra["text"]


def test_a_noisy_row_gets_no_verdict() -> None:
    (found,) = of("verdict", [row(1 << 28, 900.0, spread=0.4)])
    assert (found.extra["level"], found.extra["percent"]) == ("noisy", None)


def test_busbw_above_the_link_is_explained_by_the_wire() -> None:
    """All-reduce in the switch on 8 GPUs: busbw 480 on links of 450 GB/s, of which one port carries 274 * 9/8 = 309."""
    links = square("NV18 450 GB/s", 8)
    times = Times(3900, 3910, 3920, 3930)
    fast = Row(
        "all_reduce", "nccl", "graph", 8, "bfloat16", bytes=1 << 30, us=times, busbw_gbps=480, extra={"wire_gbps": 309.0}
    )
    (found,) = of("verdict", [fast], H200, links)
    assert found.extra["level"] == "good"
    assert "above the link's 450 GB/s and right: the switch adds (NVLS), one port carried 309 GB/s" in found.extra["text"]


def test_wire_reads_the_weakest_link_of_the_ranks() -> None:
    assert wire(H200, NVLINK, 2) == Wire("nvlink", 450.0, "NV18")
    assert wire(H200, [["self", "NV18"], ["NV18", "self"]], 2) == Wire("nvlink", 450.0, "NV18"), "a record without the rate"
    assert wire("unknown", square("PIX no P2P", 2), 2) == Wire("host", None, "PIX")
    four = pairs("NV4 100 GB/s", "SYS")
    assert wire("NVIDIA A100-SXM4-80GB", four, 4).kind == "pcie"
    assert wire("NVIDIA A100-SXM4-80GB", four, 2).kind == "mixed"
    assert wire(H200, [], 2).kind == wire(H200, square("carrier pigeon", 2), 2).kind == "unknown"


def test_references_rise_with_the_size_and_stay_below_what_the_link_allows() -> None:
    link = wire(H200, NVLINK, 2)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        found = references(H200, link, op, 2)
        assert [ref.low for ref in found] == sorted(ref.low for ref in found)
        assert [ref.nbytes for ref in found] == [1 << 24, 1 << 26, 1 << 28, 1 << 30]
    for ref in REFERENCES:
        ports = 1 if ref.world < 6 else 2 * (ref.world - 1) / (ref.world + 1)  # multicast: busbw = wire * 2(n-1)/(n+1)
        assert 0 < ref.low <= ref.high < 450 * ports
        assert ref.source
        assert ref.machine
