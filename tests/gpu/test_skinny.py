"""The skinny matmul: values against float64 at every kind of shape, same bits every time, graphs, and what comes after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from crosscut.errors import UsageError
from crosscut.kernels import skinny
from crosscut.kernels.skinny import Skinny
from crosscut.layers import matmul
from crosscut.layers.matmul import explain, linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
from virtual_ranks import VirtualRanks, reduced, same_bits  # noqa: E402

BF16 = torch.bfloat16
TOKENS = (1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 64, 65, 96, 100, 128)
SHAPES = (
    (64, 8),
    (1, 8),
    (7, 24),
    (130, 1032),
    (512, 1024),
    (1000, 4104),
    (4096, 4096),
    (3072, 1000),
    (9001, 776),
    (17000, 264),
)
"""Output by input features: ends that fill no tile, one cluster size after the other, one and two warpgroups."""


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CROSSCUT_MATMUL", "skinny")
    matmul.forget()
    with torch.no_grad():
        yield
    matmul.forget()


def problem(
    tokens: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Parameter, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x, w, b = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in ((tokens, k), (n, k), (n,)))
    return x, Parameter(w, requires_grad=False), b


def error(y: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> float:
    reference = F.linear(x.double(), w.double(), None if b is None else b.double())
    return float((y.double() - reference).norm() / reference.norm())


def poisoned(x: Tensor, n: int) -> Tensor:
    return torch.full((*x.shape[:-1], n), float("nan"), device=x.device, dtype=x.dtype)


def run(x: Tensor, w: Parameter, b: Tensor | None = None) -> Tensor:
    """The kernel on a poisoned output."""
    y = poisoned(x, w.shape[0])
    Skinny(w.data_ptr(), w.shape, w.dtype, w.device, x.shape[0])(x, w, b, y)
    return y


def no_worse(x: Tensor, w: Parameter, b: Tensor | None) -> bool:
    """Not worse than cuBLAS; 1e-5: the least that float32 sums in another order may differ by where both are exact."""
    return error(run(x, w, b), x, w, b) <= 1.05 * error(F.linear(x, w, b), x, w, b) + 1e-5


@pytest.mark.parametrize("n_k", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_values_are_those_of_cublas_or_nearer_to_float64(tokens: int, n_k: tuple[int, int]) -> None:
    x, w, b = problem(tokens, *n_k)
    for bias in (None, b):
        assert no_worse(x, w, bias)


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64, 96, 128])
def test_fp16(tokens: int) -> None:
    x, w, b = problem(tokens, 1000, 1032, torch.float16)
    assert no_worse(x, w, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 8, 15, 24, 33, 128])
def test_the_kernel_for_older_gpus(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "HOPPER", 0)
    for n, k in SHAPES:
        x, w, b = problem(tokens, n, k, dtype)
        assert no_worse(x, w, b)


def test_the_check_sees_one_wrong_weight() -> None:
    x, w, _ = problem(8, 512, 1024)
    good = error(F.linear(x, w), x, w)
    planted = Parameter(w.clone(), requires_grad=False)
    planted[511, 1016:] = 0  # the last lane's last load of the last row
    assert error(run(x, planted), x, w) > 1.05 * good


@pytest.mark.parametrize("tokens", [1, 32, 100])
def test_same_bits_every_time(tokens: int) -> None:
    x, w, b = problem(tokens, 4096, 4096)
    first = run(x, w, b)
    others = [linear(x, w, b) for _ in range(200)]
    assert all(same_bits(first, other) for other in others)


def test_a_part_of_k_that_holds_infinity_stays_where_it_is() -> None:
    x, w, _ = problem(3, 100, 72)
    w[5, 71] = float("inf")
    y = run(x, w)
    assert y[:, 5].isinf().all()
    assert y[:, [i for i in range(100) if i != 5]].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 31, 128])
def test_a_graph_replays_with_changed_inputs_weights_and_bias(tokens: int) -> None:
    x, w, b = problem(tokens, 1000, 2048)
    linear(x, w, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(linear(x, w, b)[:, :1000].repeat(1, 3)[:, :2048].contiguous(), w, b)
    for seed in range(1, 4):
        for old, new in zip((x, w, b), problem(tokens, 1000, 2048, seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        assert error(y, F.linear(x, w, b).repeat(1, 3)[:, :2048], w, b) < 6e-3


def test_a_first_call_inside_a_capture_keeps_to_torch() -> None:
    x, w, b = problem(4, 512, 1024)
    F.linear(x, w, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, w, b)
    graph.replay()
    assert same_bits(y, F.linear(x, w, b))
    assert isinstance(matmul._ready(x, w, None), Skinny), "the answer was not kept"


def test_shapes_that_share_a_kernel_may_take_turns() -> None:
    """One kernel, launched with much and with little shared memory."""
    problems = [problem(1, n, k) for n, k in ((4096, 4096), (4096, 1024))]
    launches = [Skinny(w.data_ptr(), w.shape, w.dtype, w.device, 1) for _, w, _ in problems]
    for _ in range(3):
        for (x, w, b), launch in zip(problems, launches, strict=True):
            y = poisoned(x, w.shape[0])
            launch(x, w, b, y)
            assert error(y, x, w, b) < 4e-3


def test_weights_written_by_the_kernel_before_are_the_ones_that_count() -> None:
    x, w, _ = problem(4, 4096, 4096)
    fresh = [problem(4, 4096, 4096, seed=seed)[1] for seed in (1, 2)]
    expected = [F.linear(x, source) for source in fresh]
    linear(x, w)
    assert matmul._ready(x, w, None)._call.early == 0  # type: ignore[union-attr]
    linear(x, w)
    assert matmul._ready(x, w, None)._call.early == 1  # type: ignore[union-attr]
    for step in range(100):
        w.copy_(fresh[step % 2])
        assert torch.allclose(linear(x, w).float(), expected[step % 2].float(), rtol=0.02, atol=1.0)
        assert matmul._ready(x, w, None)._call.early == 0  # type: ignore[union-attr]
    once = linear(x, w * 2)
    assert torch.allclose(once.float(), 2 * expected[1].float(), rtol=0.02, atol=2.0)


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize(("world", "tokens"), [(2, 1), (2, 17), (4, 3)])
def test_exchanges_take_the_output_over(world: int, tokens: int, graphed: bool) -> None:
    """x -> row multiply -> all-reduce + norm -> column multiply -> gather, many times, each fed by the one before."""
    group, hidden, layers = VirtualRanks(world), 1024, 6
    weights = [[problem(1, hidden, hidden, seed=10 * rank + layer)[1] for layer in range(layers)] for rank in range(world)]
    gamma, x0 = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), problem(tokens, 8, hidden)[0]
    residual = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    for rank in range(world):
        for w in weights[rank]:
            Skinny(w.data_ptr(), w.shape, w.dtype, w.device, tokens)  # compiled before kernels wait for each other

    def chain(exchange, rank: int) -> list[Tensor]:  # type: ignore[no-untyped-def]
        x, found = x0, []
        for w in weights[rank]:
            y, out = linear(x, w), torch.empty_like(x)
            exchange.all_reduce_norm(y, residual, gamma, 1e-6, out, torch.empty_like(x))
            found += [y, out]
            x = out
        return found

    results = group.run(chain)
    if graphed:
        graphs = []
        for rank in range(world):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                results[rank] = chain(group.ranks[rank], rank)
            graphs.append(graph)
        for _ in range(20):
            group.run(lambda exchange, rank: graphs[rank].replay())
    for layer in range(layers):
        ys = [results[rank][2 * layer] for rank in range(world)]
        total = reduced(ys, "sum").float()
        expected = (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
        for rank in range(world):
            x = x0 if layer == 0 else results[rank][2 * layer - 1]
            assert error(ys[rank], x, weights[rank][layer]) < 4e-3
            assert torch.allclose(results[rank][2 * layer + 1].float(), expected.float(), rtol=0.02, atol=0.02)


def test_what_the_kernel_cannot_take_goes_the_plain_way() -> None:
    x, w, b = problem(4, 64, 128)
    wide = torch.randn(4, 256, device="cuda").to(torch.bfloat16)
    cases = {
        "not contiguous": (wide[:, ::2], w, b),
        "multiple of 16 bytes": (wide.flatten()[1 : 1 + 4 * 128].view(4, 128), w, b),
        "dtypes": (x, w, b.float()),
        "K a multiple of 8": (x[:, :100].contiguous(), Parameter(w[:, :100].contiguous(), requires_grad=False), b),
        "129 tokens": (x.repeat(40, 1)[:129], w, b),
        "0 tokens": (x[:0], w, b),
        "no float32": (x.float(), Parameter(w.float(), requires_grad=False), b.float()),
    }
    for reason, (a, weight, bias) in cases.items():
        choice = explain(a, weight, bias)
        assert choice.impl == "cublas", reason
        assert reason in choice.reason
        if bias.dtype == weight.dtype:
            assert torch.equal(linear(a, weight, bias), F.linear(a, weight, bias))
    with torch.enable_grad():
        tracked = x.clone().requires_grad_()
        assert explain(tracked, w).reason == "a gradient is recorded"
        linear(tracked, w).sum().backward()
        assert tracked.grad is not None
    with torch.autocast("cuda", torch.bfloat16):
        assert explain(x, w).reason == "autocast is on"
    assert explain(x, w, b).impl == "skinny"


def test_leading_dims_and_one_dim() -> None:
    x, w, b = problem(24, 64, 128)
    for shape in ((2, 3, 4, 128), (24, 128)):
        y = linear(x.view(shape), w, b)
        assert y.shape == (*shape[:-1], 64)
        assert error(y.view(24, 64), x, w, b) < 4e-3
    assert linear(x[0], w).shape == (64,)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = problem(1, 4096, 4096)
    assert explain(x, w).reason == "CROSSCUT_MATMUL=skinny"
    monkeypatch.setenv("CROSSCUT_MATMUL", "cublas")
    matmul.forget()
    assert explain(x, w).impl == "cublas"
    assert same_bits(linear(x, w), F.linear(x, w))
    monkeypatch.setenv("CROSSCUT_MATMUL", "fast")
    matmul.forget()
    with pytest.raises(UsageError, match="CROSSCUT_MATMUL"):
        linear(x, w)


def test_torch_compile_keeps_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = problem(4, 512, 512)
    compiled = torch.compile(lambda x: linear(x, w, b), fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), F.linear(x, w, b))
