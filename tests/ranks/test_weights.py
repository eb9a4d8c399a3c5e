"""Saving and loading split models: exact at any tp, optimizer state too; interrupted and damaged files are handled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from crosscut.distributed.mesh import Mesh
from crosscut.errors import RankError, UsageError
from crosscut.layers.placed import Placed
from crosscut.models import dcp, weights
from crosscut.models.stream import damaged, write_stream
from crosscut.models.weights import load, save
from split_net import VOCAB, Net, advance, alone, trained, wholes

OnRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_is_saved_at_any_tp_is_the_unsplit_model(on_ranks: OnRanks, world: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = Net(mesh, 1)
        save(model, path, mesh, notes={"step": "12"})
        return wholes(model, mesh)

    expected = on_ranks(world, body)[0]
    stored = load_file(path)  # any reader of safetensors will do
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert damaged(path) == []


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 4), (4, 1), (3, 2)])
def test_training_goes_on_at_another_tp_as_if_nothing_had_happened(
    on_ranks: OnRanks, before: int, after: int, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.safetensors"

    def first(mesh: Mesh) -> None:
        model, optimizer = trained(mesh, 3)
        save(model, path, mesh, optimizer, {"step": "3"})

    def second(mesh: Mesh) -> dict[str, Tensor]:
        model = Net(mesh, 77)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert load(model, path, mesh, optimizer) == {"step": "3"}
        advance(model, optimizer, range(3, 6))
        return wholes(model, mesh)

    on_ranks(before, first)
    uninterrupted = wholes(trained(alone(), 6)[0], alone())
    for got in on_ranks(after, second):
        for name, whole in uninterrupted.items():
            torch.testing.assert_close(got[name], whole, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_fresh_optimizer_would_turn_that_check_red(on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    mesh = alone()
    model, optimizer = trained(mesh, 3)
    save(model, path, mesh, optimizer)
    other = Net(mesh, 77)
    load(other, path, mesh)
    advance(other, torch.optim.AdamW(other.parameters(), lr=1e-2), range(3, 6))
    whole = trained(mesh, 6)[0]
    assert not torch.allclose(other.head.weight, whole.head.weight, rtol=2e-4, atol=2e-6)


def test_an_interrupted_save_leaves_the_old_file(on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    on_ranks(2, lambda mesh: save(Net(mesh, 1), path, mesh))
    old = path.read_bytes()
    honest = Placed.whole

    def stops(placed: Placed, group: Any) -> Tensor:
        if placed.shape == (VOCAB,):
            raise KeyboardInterrupt
        return honest(placed, group)

    monkeypatch.setattr(Placed, "whole", stops)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(2, lambda mesh: save(Net(mesh, 2), path, mesh))
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_full_disk_ends_the_save_on_all_ranks(
    on_ranks: OnRanks, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers PR 48569: ranks waited in a gather for one that had given up, until a watchdog killed them."""
    path, ended = tmp_path / "m.safetensors", []
    on_ranks(1, lambda mesh: save(Net(mesh, 1), path, mesh))
    old = path.read_bytes()

    def full(path: Path, entries: Any, tensors: Iterator[Tensor], notes: Any) -> None:
        next(tensors)
        raise OSError(28, "No space left on device")

    def body(mesh: Mesh) -> None:
        words = "rank 0 failed: .*No space left" if mesh.rank else "No space left"
        with pytest.raises(RankError if mesh.rank else OSError, match=words):
            save(Net(mesh, 2), path, mesh)
        ended.append(mesh.rank)

    monkeypatch.setattr(weights, "write_stream", full)
    on_ranks(world, body)
    assert sorted(ended) == list(range(world))
    assert path.read_bytes() == old


@pytest.mark.parametrize("form", [weights, dcp])
def test_what_one_rank_cannot_see_all_ranks_raise(on_ranks: OnRanks, form: Any, tmp_path: Path) -> None:
    """As on a host where the folder is not: the others would wait for it. Nor for a rank with another's optimizer."""
    (tmp_path / "here").mkdir()
    ended = []

    def body(mesh: Mesh) -> None:
        model = Net(mesh, 1)
        form.save(model, tmp_path / "here" / "m", mesh)
        path = tmp_path / ("nowhere" if mesh.rank == 0 else "here") / "m"
        stranger = torch.optim.SGD(model.parameters() if mesh.rank else [nn.Parameter(torch.ones(1))])
        new = tmp_path / "here" / "new"
        for call, where, optimizer in ((form.load, path, None), (form.save, path, None), (form.save, new, stranger)):
            with pytest.raises(RankError if mesh.rank else UsageError) as error:
                call(model, where, mesh, optimizer)
            assert (error.value.code == "rank-failed") is bool(mesh.rank)
            assert ("rank 0 failed: " in str(error.value)) is bool(mesh.rank)
        ended.append(mesh.rank)

    on_ranks(2, body)
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("form", [weights, dcp])
def test_the_current_folder_is_no_place_for_a_checkpoint(
    on_ranks: OnRanks, form: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def body(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=r"is a folder|is the current folder") as error:
            form.save(Net(mesh, 1), ".", mesh)
        assert error.value.code == "bad-option"
        form.save(Net(mesh, 1), "m", mesh, notes={"step": "3"})
        assert form.load(Net(mesh, 2), "m", mesh) == {"step": "3"}

    on_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    if form is dcp:
        monkeypatch.chdir("m")
        assert on_ranks(1, lambda mesh: dcp.load(Net(mesh, 2), ".", mesh)) == [{"step": "3"}]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_flipped_bit_is_found_and_nothing_is_changed(on_ranks: OnRanks, world: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    on_ranks(1, lambda mesh: save(Net(mesh, 1), path, mesh))
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)
    assert len(damaged(path)) == 1

    def body(mesh: Mesh) -> None:
        model = Net(mesh, 2)
        before = wholes(model, mesh)
        try:
            load(model, path, mesh)
        finally:
            assert all(torch.equal(a, b) for a, b in zip(before.values(), wholes(model, mesh).values(), strict=True))

    with pytest.raises(UsageError, match="is damaged: the bytes of"):
        on_ranks(world, body)
    on_ranks(world, lambda mesh: load(Net(mesh, 2), path, mesh, check=False))


def test_what_does_not_fit_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    path, mesh = tmp_path / "m.safetensors", alone()
    save(Net(mesh, 1), path, mesh)
    short = tmp_path / "short.safetensors"
    short.write_bytes(path.read_bytes()[:-5])
    other = tmp_path / "other.safetensors"
    write_stream(other, [("block.mlp.up.wieght", torch.float32, (2,))], [torch.zeros(2)])
    fresh = Net(mesh, 1)
    for call, words in (
        (lambda: load(Net(mesh, 1), tmp_path / "nope", mesh), "there is no file"),
        (lambda: load(Net(mesh, 1), short, mesh), "is not a whole safetensors file"),
        (lambda: load(Net(mesh, 1), other, mesh), "has no 'embedding.weight'"),
        (lambda: load(Net(mesh, 1).head, path, mesh), "has no 'weight'"),
        (lambda: load(Net(mesh, 1, 16), path, mesh), r"is \[19, 12\] in .* and \[19, 16\] in the model"),
        (lambda: load(nn.ModuleDict({"embedding": Net(mesh, 1).embedding}), path, mesh), "more, the model has not"),
        (lambda: load(fresh, path, mesh, torch.optim.AdamW(fresh.parameters())), "has no 'optimizer."),
        (lambda: save(fresh, path, mesh, torch.optim.AdamW(Net(mesh, 1).parameters())), "are not parameters of the model"),
        (lambda: save(Net(mesh, 1), tmp_path / "no" / "m", mesh), "the folder .* does not exist"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
