"""The trial of the shared memory: it passes where all is well, and every planted fault is found, named and survived."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from crosscut import collectives as cc
from crosscut.collectives import fast
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.distributed.mesh import make_mesh
from crosscut.errors import UsageError
from crosscut.kernels.trial import LANES, Trial, prove

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
if torch.cuda.is_available():
    from virtual_ranks import VirtualRanks, random, reduced, same_bits


def trials(group: VirtualRanks, seconds: float) -> list[Trial]:
    for exchange in group.ranks:
        exchange.patience(seconds, seconds)
    return [Trial(exchange) for exchange in group.ranks]


def findings(group: VirtualRanks, made: list[Trial]) -> list[str]:
    group.run(lambda exchange, rank: made[rank].run())
    return [trial.findings() for trial in made]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_sound_memory_passes_and_serves_afterwards(world: int) -> None:
    group = VirtualRanks(world)
    for _ in range(3):
        assert findings(group, trials(group, 5)) == [""] * world
    for exchange in group.ranks:
        exchange.patience(20, 20)
    xs = random(world, (5000,), torch.bfloat16)
    for out in group.run(lambda exchange, rank: exchange.all_reduce(xs[rank], torch.empty_like(xs[rank]))):
        assert same_bits(out, reduced(xs, "sum"))


def test_writes_that_go_elsewhere_are_found_within_the_deadline() -> None:
    group = VirtualRanks(4)
    workspace = group.ranks[2].workspace
    nowhere = torch.zeros(workspace.layout.nbytes, dtype=torch.uint8, device="cuda")
    workspace._addresses = (workspace._addresses[0], nowhere.data_ptr(), *workspace._addresses[2:])
    made = trials(group, 0.5)
    start = time.monotonic()
    found = findings(group, made)
    assert time.monotonic() - start < 3
    assert found[1] == "P2P write from rank 2 to rank 1 did not arrive within 0.5 s"


@pytest.mark.parametrize(
    ("algorithm", "which", "words"),
    [("lanes", 2, f"lanes, word 7 of {LANES}"), ("blocks", 5, "blocks, word 7 of "), ("sum", 3, "a sum of P2P writes")],
)
def test_a_single_wrong_word_is_found(algorithm: str, which: int, words: str) -> None:
    group = VirtualRanks(2)
    made = trials(group, 5)
    if algorithm == "sum":
        made[1].addends[which][7] += 1
    else:
        made[1].inputs[which][7] ^= 1 << 40
    found = findings(group, made)
    assert words in found[0]
    if algorithm != "sum":
        assert "P2P write from rank 1 to rank 0 arrived wrong" in found[0]


def test_proving_puts_the_deadlines_back() -> None:
    """Seen from rank 0; rank 1 is played by hand when the ranks meet."""
    group = VirtualRanks(2, deadline=7, first=9)
    said: list[str] = []
    other = Trial(group.ranks[1])

    def tell(finding: str) -> list[str]:
        if not said:
            with torch.cuda.stream(group.streams[1]):
                other.run()
        said.append(finding)
        return ["", "late"] if len(said) == 2 else ["", ""]

    with torch.cuda.stream(group.streams[0]):
        assert prove(group.ranks[0], tell) == "late"
    assert said == ["", ""]
    assert (group.ranks[0].workspace.deadline, group.ranks[0].workspace.first) == (7, 9)


SHARED = LaunchConfig(2, "gloo", "cuda", timeout=60)


def misrouted(ctx: Any, wanted: str) -> tuple[str, bool]:
    """Rank 1's writes to rank 0 are lost. (the choice, whether a sum came out right all the same)."""
    real, kept = fast.shared_workspace, []

    def plant(*args: Any) -> Any:
        workspace = real(*args)
        if ctx.rank == 1:
            kept.append(torch.zeros(workspace.layout.nbytes, dtype=torch.uint8, device=ctx.device))
            workspace._addresses = (kept[0].data_ptr(), *workspace._addresses[1:])
        return workspace

    fast.shared_workspace = plant
    if wanted == "auto":
        fast._obstacle = lambda group, wanted: ""
    group = make_mesh(device=ctx.device).tp
    x = torch.full((4096,), float(ctx.rank + 1), device=ctx.device)
    total = cc.all_reduce(x, group)
    chosen = cc.choice("all_reduce", 4096, group)
    return f"{chosen}: {chosen.reason}", bool((total == 3).all())


def test_ranks_agree_to_leave_broken_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("CROSSCUT_KERNEL_TIMEOUT", "2")
    start = time.monotonic()
    reason = "P2P write from rank 1 to rank 0 did not arrive within 2 s"
    assert run(misrouted, ("auto",), SHARED) == (f"gloo: {reason}", True)
    assert time.monotonic() - start < 60
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "kernels")
    with pytest.raises(UsageError, match=reason) as caught:
        run(misrouted, ("kernels",), SHARED)
    assert caught.value.code == "no-backend"
