"""Split models in torch's distributed checkpoint: any tp, torch's own tools, damage, and saves that fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers.placed import Placed, placed_parameters
from crosscut.models import dcp
from crosscut.models.dcp import load, save
from split_net import Net, advance, alone, trained, wholes

OnRanks = Callable[..., list[Any]]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning:torch.*")


def first_steps(mesh: Mesh, folder: Path) -> dict[str, Tensor]:
    model, optimizer = trained(mesh, 3)
    save(model, folder, mesh, optimizer, {"step": "3"})
    return wholes(model, mesh)


def read_whole(folder: Path) -> dict[str, Any]:
    """The checkpoint as torch's own converter reads it."""
    out = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, out)
    read: dict[str, Any] = torch.load(out)
    return read


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 4), (4, 1), (3, 2)])
def test_training_goes_on_at_another_tp(on_ranks: OnRanks, before: int, after: int, tmp_path: Path) -> None:
    """4 ranks share 2 KV heads, on 3 the blocks of two ranks overlap without being equal."""
    folder = tmp_path / "ck"
    saved = on_ranks(before, first_steps, folder)[0]

    def second(mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = Net(mesh, 77)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert load(model, folder, mesh, optimizer) == {"step": "3"}
        loaded = {name: whole.clone() for name, whole in wholes(model, mesh).items()}
        advance(model, optimizer, range(3, 6))
        return loaded, wholes(model, mesh)

    uninterrupted = wholes(trained(alone(), 6)[0], alone())
    for loaded, got in on_ranks(after, second):
        for name, whole in uninterrupted.items():
            assert torch.equal(loaded[name], saved[name])
            torch.testing.assert_close(got[name], whole, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (3, 3), (4, 4), (4, 2)])
def test_torchs_own_tools_read_whole_tensors(on_ranks: OnRanks, world: int, tp: int, tmp_path: Path) -> None:
    """pytorch 156002 (one shard kept); Automodel PR 1324 and others (packed rows cut contiguously)."""
    folder = tmp_path / "ck"
    saved = on_ranks(world, first_steps, folder, tp=tp)[0]
    read = read_whole(folder)["model"]
    assert read.keys() == saved.keys()
    assert all(torch.equal(read[name], saved[name]) for name in saved)
    single = Net(alone(), 5)  # a plain module on one rank, whose loading and saving is torch's alone
    optimizer = torch.optim.AdamW(single.parameters(), lr=0.5)
    parts = dict(zip(("model", "optimizer"), get_state_dict(single, optimizer), strict=True))
    torch_dcp.load(parts, checkpoint_id=folder)
    set_state_dict(single, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    advance(single, optimizer, range(3, 6))
    for name, whole in wholes(trained(alone(), 6)[0], alone()).items():
        torch.testing.assert_close(wholes(single, alone())[name], whole, rtol=2e-4, atol=2e-6)


def test_what_torch_saved_unsplit_loads_split(on_ranks: OnRanks, tmp_path: Path) -> None:
    model, optimizer = trained(alone(), 3)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    torch_dcp.save(parts, checkpoint_id=tmp_path / "ck")

    def body(mesh: Mesh) -> dict[str, Tensor]:
        split = Net(mesh, 2)
        other = torch.optim.AdamW(split.parameters())
        assert load(split, tmp_path / "ck", mesh, other) == {}
        assert float(other.state[split.head.weight]["step"]) == 3
        return wholes(split, mesh)

    for got in on_ranks(4, body):
        assert all(torch.equal(got[name], whole) for name, whole in wholes(model, alone()).items())


def test_shards_given_to_dcp_as_they_are_would_turn_it_red(on_ranks: OnRanks, tmp_path: Path) -> None:
    """The fault of pytorch 156002: plain tensors of one name on two ranks, of which DCP keeps one rank's."""
    folder = tmp_path / "ck"

    def careless(mesh: Mesh) -> dict[str, Tensor]:
        model = Net(mesh, 1)
        torch_dcp.save({"model": {p.name: p.own for p in placed_parameters(model)}}, checkpoint_id=folder)
        return wholes(model, mesh)

    saved = on_ranks(2, careless)[0]
    read = read_whole(folder)["model"]
    assert read["head.weight"].shape != saved["head.weight"].shape


def test_the_first_blocks_of_all_ranks_are_the_whole_once(on_ranks: OnRanks) -> None:
    def body(mesh: Mesh) -> dict[str, tuple[Tensor, bool]]:
        found = {}
        for placed in placed_parameters(Net(mesh, 1)):
            count = torch.zeros(placed.shape, dtype=torch.int64)
            for box in placed.boxes(mesh.tp):
                count[box.whole] += box.first
            found[placed.name] = count, placed.replicated
        return found

    for world in (1, 2, 3, 4):
        ranks = on_ranks(world, body)
        for name, (_, replicated) in ranks[0].items():
            total = torch.stack([found[name][0] for found in ranks]).sum(0)
            assert bool((total == (world if replicated else 1)).all()), name


def test_a_newer_checkpoint_takes_the_place_and_nothing_is_left(on_ranks: OnRanks, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    for world, seed in ((4, 1), (2, 2)):  # fewer ranks leave no files of the earlier, larger world
        on_ranks(world, lambda mesh, seed=seed: save(Net(mesh, seed), folder, mesh))
        assert [entry.name for entry in tmp_path.iterdir()] == ["ck"]
        assert len(list(folder.iterdir())) == world + 2
    on_ranks(2, lambda mesh: load(Net(mesh, 3), folder, mesh))


def test_a_save_that_fails_on_one_rank_ends_on_all_and_leaves_the_old_one(
    on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers PR 48569: ranks waited for one that had given up. The second rank's disk is full here."""
    folder, honest = tmp_path / "ck", Placed.own.fget
    bad: list[Tensor] = []
    ended: list[int] = []
    on_ranks(2, lambda mesh: save(Net(mesh, 1), folder, mesh))
    old = {entry.name: entry.read_bytes() for entry in folder.iterdir()}

    def full(placed: Placed) -> Tensor:
        if any(placed.local is tensor for tensor in bad) and (tmp_path / ".ck.part").exists():
            raise OSError(28, "No space left on device")
        return honest(placed)

    def body(mesh: Mesh) -> None:
        model = Net(mesh, 2)
        if mesh.rank == 1:
            bad.append(model.head.weight)
        with pytest.raises((OSError, torch_dcp.CheckpointException)):
            save(model, folder, mesh)
        ended.append(mesh.rank)

    monkeypatch.setattr(Placed, "own", property(full))
    on_ranks(2, body)
    assert sorted(ended) == [0, 1]
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == old


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_damage_is_found_and_nothing_is_changed(on_ranks: OnRanks, world: int, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    on_ranks(2, lambda mesh: save(Net(mesh, 1), folder, mesh))
    victim = folder / "__1_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0x10
    victim.write_bytes(data if how == "flipped" else data[:-1])
    if how == "gone":
        victim.unlink()

    def body(mesh: Mesh) -> None:
        model = Net(mesh, 2)
        before = wholes(model, mesh)
        try:
            load(model, folder, mesh)
        finally:
            assert all(torch.equal(a, b) for a, b in zip(before.values(), wholes(model, mesh).values(), strict=True))

    with pytest.raises(UsageError, match="is damaged: the bytes of"):
        on_ranks(world, body)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    mesh, folder = alone(), tmp_path / "ck"
    save(Net(mesh, 1), folder, mesh)
    torn, mine, fresh = tmp_path / "torn", tmp_path / "mine", Net(mesh, 1)
    shutil.copytree(folder, torn)
    (torn / dcp.SUMS).write_text("{")
    spoiled = shutil.copytree(folder, tmp_path / "spoiled")
    (spoiled / ".metadata").write_bytes(b"none")
    (spoiled / dcp.SUMS).write_text(json.dumps({"notes": {}, "files": {}}))
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for call, words in (
        (lambda: load(Net(mesh, 1), tmp_path / "nope", mesh), "there is no checkpoint"),
        (lambda: load(Net(mesh, 1), torn, mesh), "crosscut.json' cannot be read"),
        (lambda: load(Net(mesh, 1), spoiled, mesh), ".metadata' cannot be read"),
        (lambda: load(Net(mesh, 1, 16), folder, mesh), r"is \[19, 12\] in .* and \[19, 16\] in the model"),
        (lambda: load(nn.ModuleDict({"embedding": fresh.embedding}), folder, mesh), "more, the model has not"),
        (lambda: load(fresh, folder, mesh, torch.optim.AdamW(fresh.parameters())), "has no 'optimizer."),
        (lambda: save(fresh, folder, mesh, torch.optim.AdamW(Net(mesh, 1).parameters())), "are not parameters of the model"),
        (lambda: save(fresh, mine, mesh), "is not a checkpoint alone"),
        (lambda: save(fresh, tmp_path / "no" / "ck", mesh), "the folder .* does not exist"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    assert (mine / "thesis.txt").exists()
    state = dcp.state_dict(fresh, mesh)["model"]["head.weight"]
    with pytest.raises(TypeError, match="not computed with"):
        state.sum()
