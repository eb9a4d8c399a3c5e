"""Norms on all tokens and on own tokens equal torch's; dropout draws the masks that it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crosscut import collectives
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers import LayerNorm, ParallelDropout, RMSNorm
from crosscut.layers import norm as norm_module
from crosscut.sharding import shard_sizes
from parity import expected, step

OnRanks = Callable[..., list[Any]]
WORLDS = [1, 2, 3, 4, 8]
TOKENS, HIDDEN = 10, 12


def unsplit(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(4)
    module = nn.RMSNorm(HIDDEN, 1e-5) if kind == "rms" else nn.LayerNorm(HIDDEN, bias=kind == "layer")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.to(dtype)


def check_norm(on_ranks: OnRanks, world: int, kind: str, sequence: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, upstream = (torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    module = unsplit(kind, dtype)
    right = expected(module, x, upstream, world)
    rows = shard_sizes(TOKENS, world)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        common: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence, "dtype": dtype}
        layer = RMSNorm(HIDDEN, **common) if kind == "rms" else LayerNorm(HIDDEN, bias=kind == "layer", **common)
        layer.load_state_dict(module.state_dict())
        if not sequence:
            return step(layer, x, upstream, layer)
        out = step(layer, x.split(rows)[mesh.rank], upstream.split(rows)[mesh.rank], layer)
        return out | {key: collectives.all_gather(out[key], mesh.tp, 0, rows) for key in ("y", "dx")}

    for rank, got in enumerate(on_ranks(world, body)):
        right.check(got, f"rank {rank}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["all tokens", "own tokens"])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
@pytest.mark.parametrize("world", WORLDS)
def test_norm_equals_unsplit(on_ranks: OnRanks, world: int, kind: str, sequence: bool, dtype: torch.dtype) -> None:
    check_norm(on_ranks, world, kind, sequence, dtype)


def test_a_partial_gradient_left_alone_turns_the_check_red(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM issue 1446: with sequence parallelism the norms' gradients differ from rank to rank."""
    monkeypatch.setattr(norm_module, "copy_to_tp", lambda x, group: x)
    with pytest.raises(AssertionError, match=r"grad of weight: relative error"):
        check_norm(on_ranks, 2, "rms", True, torch.float32)


def masks(mesh: Mesh, sharded: bool, invariant: bool = False, size: int = 1024, calls: int = 2) -> list[Tensor]:
    """The masks of successive calls on ones, from generators that run alike on all ranks."""
    layer = ParallelDropout(0.25, mesh=mesh, sharded=sharded, invariant=invariant, generator=torch.Generator().manual_seed(9))
    local = shard_sizes(size, mesh.tp.size)[mesh.rank] if sharded else size
    return [layer(torch.ones(4, local), size) for _ in range(calls)]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_replicated_activations_get_one_mask_and_sharded_ones_their_own(on_ranks: OnRanks, world: int) -> None:
    replicated = on_ranks(world, masks, False)
    for calls in replicated:
        assert torch.equal(calls[0], replicated[0][0])
        assert not torch.equal(calls[0], calls[1])
        assert calls[0].unique().tolist() == pytest.approx([0, 4 / 3])
        assert float((calls[0] == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    sharded = [calls[0] for calls in on_ranks(world, masks, True, False, 1024 * world)]
    for i, mine in enumerate(sharded):
        for other in sharded[:i]:
            agree = float(((mine == 0) == (other == 0)).float().mean())
            assert agree == pytest.approx(0.25**2 + 0.75**2, abs=0.05), "two ranks' masks are not independent"


def test_torchs_dropout_with_equal_seeds_drops_the_same_units_on_every_shard(on_ranks: OnRanks) -> None:
    """The fault that ParallelDropout exists to avoid, so that the test above is known to be able to fail."""

    def body(mesh: Mesh) -> Tensor:
        mask = ParallelDropout(0.25, mesh=mesh, sharded=False, generator=torch.Generator().manual_seed(9))
        return mask(torch.ones(4, 512))

    first, second = on_ranks(2, body)
    assert torch.equal(first, second)


def test_the_invariant_mask_does_not_depend_on_tp(on_ranks: OnRanks) -> None:
    (alone,) = on_ranks(1, masks, True, True, 101)
    for world in (2, 3, 4, 8):
        parts = on_ranks(world, masks, True, True, 101)
        for call in range(2):
            assert torch.equal(torch.cat([calls[call] for calls in parts], -1), alone[call])


def test_gradients_follow_the_mask_and_checkpointing_recomputes_it() -> None:
    layer = ParallelDropout(0.5, mesh=alone(), sharded=True)
    x = torch.ones(64, 64, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    layer.eval()
    assert layer(x) is x


def alone() -> Mesh:
    from crosscut.distributed.mesh import make_mesh

    return make_mesh(device="cpu")


def test_what_cannot_work_is_refused(on_ranks: OnRanks) -> None:
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(UsageError, match="dropout p="):
            ParallelDropout(p, mesh=alone(), sharded=True)
    with pytest.raises(UsageError, match="hidden=0"):
        RMSNorm(0, mesh=alone())
    with pytest.raises(UsageError, match=r"rank \d holds 4 of 5 along dim -1, not [23]"):
        on_ranks(2, lambda mesh: ParallelDropout(0.5, mesh=mesh, sharded=True, invariant=True)(torch.ones(2, 4), 5))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_meta_norm_starts_as_others_do(kind: type[RMSNorm]) -> None:
    """torch's recipe, ``to_empty`` and ``reset_parameters`` of each module, would leave a norm's weights as memory was."""
    norm = kind(4, mesh=alone(), device="meta").to_empty(device="cpu")
    nn.init.constant_(norm.weight, 7.0)
    norm.reset_parameters()
    assert norm.state_dict().keys() == kind(4, mesh=alone()).state_dict().keys()
    for name, value in kind(4, mesh=alone()).state_dict().items():
        assert torch.equal(norm.state_dict()[name], value)
