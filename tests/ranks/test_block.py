"""The block equals one written with torch's own layers: output, every gradient, one step. Each check can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

import crosscut as cc
from block_cases import FFN, HEADS, HIDDEN, KV, check
from crosscut.bench.block import Sizes, random_block
from crosscut.bench.calls import sharded
from crosscut.collectives.select import ALGORITHMS
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError
from crosscut.layers import ParallelBlock
from crosscut.layers.replicas import clip_grad_norm_, placed_parameters
from crosscut.layers.shards import gather

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel residual"])
@pytest.mark.parametrize(("bias", "norm"), [(False, "rms"), (True, "layer")])
@pytest.mark.parametrize("world", WORLDS)
def test_block_equals_unsplit(
    on_ranks: OnRanks, world: int, bias: bool, norm: str, parallel: bool, sequence: bool, dtype: torch.dtype
) -> None:
    check(on_ranks, world, bias, norm, parallel, sequence, dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("bias", "norm"), [(False, "rms"), (True, "layer")])
def test_without_gradients_sum_residual_and_norm_are_one_call(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, world: int, bias: bool, norm: str
) -> None:
    """Same result as part by part. A hook on a part, dropout, autograd and sequence parallelism keep the parts apart."""
    from crosscut.layers import block as module

    calls: list[int] = []
    whole, multiply = module.all_reduce_norm, module.linear

    def handed_over(x: Tensor, weight: Tensor, then: tuple[str, Group]) -> Tensor:
        assert then[0] in ALGORITHMS, "the rule of few tokens asks the table of sizes by this name"
        return multiply(x, weight, then=then)

    monkeypatch.setattr(module, "linear", handed_over)
    monkeypatch.setattr(module, "joins_norm", lambda x, group: True)
    monkeypatch.setattr(module, "all_reduce_norm", lambda *args: (calls.append(1), whole(*args))[1])
    options: dict[str, Any] = {"bias": bias, "norm": norm, "seed": 5, "attention": {"kv_heads": KV, "rope_theta": 1e4}}

    def body(mesh: Mesh) -> None:
        block = ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, **options)
        with torch.no_grad():
            for number, parameter in enumerate(block.parameters()):
                parameter.add_(torch.arange(parameter.numel()).view_as(parameter).sin() * 0.1 + number * 1e-3)
        x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(3))
        apart = block(x)
        with torch.no_grad():
            torch.testing.assert_close(block(x), apart, rtol=1e-5, atol=1e-5)
            block.mlp_norm.register_forward_hook(lambda *_: None)
            torch.testing.assert_close(block(x), apart, rtol=0, atol=0)
            ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, dropout=0.1, **options)(x)

    on_ranks(world, body)
    assert len(calls) == world


def test_a_bias_added_twice_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc.RowParallelLinear, "plus_bias", lambda self, y: y + 2 * self.bias)
    with pytest.raises(AssertionError, match="y: relative error"):
        check(on_ranks, 2, True, "layer", True, False)


def test_initial_weights_do_not_depend_on_tp_and_norms_count_once(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> tuple[list[Tensor], Tensor]:
        block = ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, attention={"kv_heads": KV}, seed=9)
        block(torch.ones(1, 3, HIDDEN)).square().sum().backward()
        weights = [gather(p.local, p.cut, p.shape, mesh.tp) for p in placed_parameters(block)]
        return weights, clip_grad_norm_(block, 1.0, mesh)

    ((alone, norm),) = on_ranks(1, body)
    for world in (2, 3, 4):
        for weights, other in on_ranks(world, body):
            assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))
            torch.testing.assert_close(other, norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("tracked", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel residual"])
@pytest.mark.parametrize("world", [1, 2])
def test_hooks_on_every_part_fire(on_ranks: OnRanks, world: int, parallel: bool, tracked: bool) -> None:
    """Whatever the block does past its parts' own calls; what a hook returns is used."""

    def body(mesh: Mesh) -> None:
        block = ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, parallel_residual=parallel, attention={"kv_heads": KV}, seed=1)
        x = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_(tracked)
        parts = {name: part for name, part in block.named_modules() if name and name != "attention.dropout"}
        with torch.set_grad_enabled(tracked):
            plain = block(x)
            for kind in ("forward_hook", "forward_pre_hook", *(("full_backward_hook",) if tracked else ())):
                for name, part in parts.items():
                    seen: list[nn.Module] = []
                    handle = getattr(part, f"register_{kind}")(lambda part, *_, seen=seen: seen.append(part))
                    y = block(x)
                    if tracked:
                        y.sum().backward()
                    handle.remove()
                    assert seen == [part] * (2 if name == "dropout" and not parallel else 1), (kind, name)
                    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)
            handle = block.mlp.register_forward_hook(lambda part, given, y: y + 1)
            torch.testing.assert_close(block(x), plain + (world if parallel else 1), rtol=1e-5, atol=1e-5)
            handle.remove()

    on_ranks(world, body)


def test_a_hook_on_all_modules_fires_for_every_part(on_ranks: OnRanks) -> None:
    (block,) = on_ranks(1, lambda mesh: ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, parallel_residual=True, seed=1))
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda part, *_: seen.append(part))
    try:
        block(torch.ones(1, 3, HIDDEN))
    finally:
        handle.remove()
    assert {id(part) for part in block.modules()} == {id(part) for part in [*seen, block.attention.dropout]}


@pytest.mark.parametrize("tracked", [False, True], ids=["no gradients", "gradients"])
def test_no_more_operators_than_by_hand(on_ranks: OnRanks, tracked: bool) -> None:
    """A block of few tokens takes as long as its host needs to launch it: each operator counts, forward and backward."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return op(*args, **(kwargs or {}))

    problem = random_block(Sizes(HIDDEN, HEADS, KV, FFN), 1, 3, torch.bfloat16, torch.device("cpu"))

    def body(mesh: Mesh) -> None:
        block = sharded(problem.build(mesh), problem.weights, mesh.tp, mesh.device).requires_grad_(tracked)
        work, x = problem.work(False), problem.x.clone().requires_grad_(tracked)
        weights = {name: weight.clone().requires_grad_(tracked) for name, weight in work.weights.items()}
        found = []
        for call in (lambda: block(x), lambda: work.compute(x, weights)):
            call()  # tables of positions are made
            with Count() as count:
                y = call()
                if tracked:
                    y.sum().backward()
            found.append(count.calls)
        ours, by_hand = found
        assert ours <= by_hand - 10

    on_ranks(1, body)


def test_dropout_trains_and_rests(on_ranks: OnRanks) -> None:
    (block,) = on_ranks(1, lambda mesh: ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, dropout=0.5, seed=1))
    x = torch.ones(1, 3, HIDDEN)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_what_cannot_work_is_refused(on_ranks: OnRanks) -> None:
    with pytest.raises(UsageError, match="norm 'rsm' is not known; did you mean 'rms'"):
        on_ranks(1, lambda mesh: ParallelBlock(HIDDEN, HEADS, FFN, mesh=mesh, norm="rsm"))
