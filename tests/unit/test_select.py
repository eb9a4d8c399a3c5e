"""Which implementation carries which size: the tables, their ends, tuned files whole and damaged, and the reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from crosscut.collectives import choice, select
from crosscut.collectives.select import ALGORITHMS, OPS, Choice, Table, explain, forced, save_table, shipped, table_for
from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError

KIB = 1 << 10
MACHINE = ["NVIDIA H200", "2", "2.13.0", "2.28.9"]
TABLE = Table({"all_reduce": ((4096, "lanes"), (65536, "blocks")), "broadcast": ()}, "a test")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CROSSCUT_COLLECTIVES", raising=False)
    return tmp_path


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("make", [shipped, forced])
def test_tables_name_every_operation_in_ascending_classes(make: object, world: int) -> None:
    table = make(world)  # type: ignore[operator]
    assert set(table.classes) == set(OPS)
    for op, classes in table.classes.items():
        sizes = [size for size, _ in classes]
        assert sizes == sorted(set(sizes))
        assert {name for _, name in classes} <= set(ALGORITHMS[op])
        if world == 2:
            assert not any(name.endswith("two_shot") for _, name in classes), "two-shot never pays for two ranks"


def test_a_class_ends_at_its_size_and_not_before() -> None:
    chosen = [TABLE.algorithm("all_reduce", nbytes) for nbytes in (1, 4095, 4096, 4097, 65536, 65537)]
    assert chosen == ["lanes", "lanes", "lanes", "blocks", "blocks", None]
    assert TABLE.algorithm("broadcast", 1) is None
    assert TABLE.algorithm("all_gather", 1) is None
    assert shipped(2).algorithm("all_reduce", 1024 * KIB) == "lanes"
    assert shipped(2).algorithm("all_reduce", 1024 * KIB + 1) is None
    assert shipped(8).algorithm("all_reduce", 128 * KIB + 1) == "lanes_two_shot"


def test_forced_kernels_carry_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    save_table(MACHINE, 2, {"all_reduce": ()}, "2026-01-02")
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "kernels")
    table = table_for(MACHINE, 2)
    assert [table.algorithm(op, 1 << 40) for op in OPS] == ["blocks"] * 5
    assert forced(4).algorithm("all_reduce", 1 << 40) == "blocks_two_shot"
    reason = explain("all_reduce", 1 << 30, table, "nccl", "").reason
    assert reason == "all_reduce of any size (CROSSCUT_COLLECTIVES=kernels)"


def test_a_tuned_table_is_preferred_for_its_machine_and_world_only() -> None:
    assert table_for(MACHINE, 2) == shipped(2)
    path = save_table(MACHINE, 2, {"all_reduce": ((2048, "blocks"),), "all_gather": ()}, "2026-01-02")
    table = table_for(MACHINE, 2)
    assert table.classes == {"all_reduce": ((2048, "blocks"),), "all_gather": ()}
    assert table.origin == f"measured on this machine on 2026-01-02 ({path})"
    assert table_for(MACHINE, 4) == shipped(4)
    assert table_for(["NVIDIA H100", *MACHINE[1:]], 2) == shipped(2)
    save_table(MACHINE, 2, {"all_reduce": ((4096, "lanes"),)}, "2026-01-03")
    assert table_for(MACHINE, 2).algorithm("all_reduce", 4096) == "lanes"
    assert [p.suffix for p in path.parent.iterdir()] == [".json"], "nothing half-written stays"


def damaged(classes: object) -> str:
    return json.dumps({"measured": "2026-01-02", "classes": classes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"measured": "2026-01-02"}',
        json.dumps({"classes": {"all_reduce": [[4096, "lanes"]]}}),
        damaged([]),
        damaged({"all_reduce": 7}),
        damaged({"all_reduce": [[4096]]}),
        damaged({"all_reduce": [["much", "lanes"]]}),
        damaged({"all_reduce": [[float("inf"), "lanes"]]}),
        damaged({"all_reduce": [[4096, "wires"]]}),
        damaged({"all_gather": [[4096, "lanes_two_shot"]]}),
        damaged({"all_reduce": [[8192, "lanes"], [4096, "blocks"]]}),
        damaged({"all_reduce": [[4096, "lanes"], [4096, "blocks"]]}),
        damaged({"send": [[4096, "lanes"]]}),
        "\xff",
    ],
)
def test_a_damaged_tuned_table_is_named_with_what_to_do(text: str) -> None:
    path = save_table(MACHINE, 2, {}, "2026-01-02")
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError) as caught:
        table_for(MACHINE, 2)
    assert caught.value.code == "file-unreadable"
    assert str(path) in caught.value.message
    assert "delete that file" in str(caught.value.fix)
    assert "crosscut tune" in str(caught.value.fix)


def test_every_choice_has_its_reason() -> None:
    assert explain("all_reduce", 8, None, "none", "") == Choice("none", None, "a group of one does not communicate")
    assert explain("all_reduce", 8, None, "nccl", "because") == Choice("nccl", None, "because")
    kernels = explain("all_reduce", 4097, TABLE, "nccl", "")
    assert (str(kernels), kernels.reason) == ("crosscut:blocks", "all_reduce up to 64 KiB (a test)")
    large = explain("all_reduce", 65537, TABLE, "nccl", "")
    assert (str(large), large.reason) == ("nccl", "the kernels carry all_reduce up to 64 KiB here (a test)")
    assert explain("broadcast", 8, TABLE, "nccl", "").reason == "the kernels carry broadcast at no size here (a test)"


def group(size: int, backend: str, device: str = "cpu") -> Group:
    return Group("tp", 0, size, tuple(range(size)), backend, torch.device(device))


def test_a_group_says_why_the_kernels_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice("all_reduce", 8, group(1, "none")).reason == "a group of one does not communicate"
    assert choice("all_reduce", 8, group(2, "gloo")) == Choice("gloo", None, "gloo carries tensors in host memory")
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "nccl")
    assert choice("all_gather", 8, group(2, "nccl", "meta")).impl == "nccl"
    assert choice("all_reduce", 8, group(2, "nccl", "meta")).reason == "nccl carries tensors in host memory"


def test_a_cache_folder_that_may_not_be_looked_into_holds_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end rank 0 alone, and the others wait for its table."""

    def denied(*args: object, **options: object) -> None:
        raise PermissionError("not for you")

    monkeypatch.setattr("os.stat", denied)
    assert table_for(MACHINE, 2) == shipped(2)


def test_forced_nccl_is_the_reason_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU group without a process group: what is asked before any GPU is touched."""
    from crosscut.collectives import fast

    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "nccl")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = fast.choice("all_reduce", 8, group(2, "nccl", "cuda:0"))
    assert found == Choice("nccl", None, "CROSSCUT_COLLECTIVES=nccl")


def test_the_file_of_a_table_depends_on_all_that_it_holds_for() -> None:
    paths = {select.tuned_path([*MACHINE[:i], "other", *MACHINE[i + 1 :]], 2) for i in range(4)}
    paths |= {select.tuned_path(MACHINE, 2), select.tuned_path(MACHINE, 4)}
    assert len(paths) == 6
