"""When the kernels are left out: what each rank says, what all conclude, and that calls then go the general way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.collectives import choice, fast
from crosscut.collectives.select import shipped
from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError
from crosscut.kernels.trial import ROUNDS, addend, pattern, prove
from crosscut.kernels.workspace import host_identity


def proc(folder: Path, boot: str, namespace: str) -> Path:
    """A /proc with this boot id and this namespace of process ids."""
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").symlink_to(f"pid:[{namespace}]")
    return folder


def test_ranks_of_one_host_are_told_from_others(tmp_path: Path) -> None:
    here, other = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    other.mkdir()
    first = host_identity(str(here), proc(tmp_path / "1", "boot-1", "7"))
    assert host_identity(str(here), proc(tmp_path / "2", "boot-1", "7")) == first
    assert host_identity(str(here / "../a"), proc(tmp_path / "3", "boot-1", "7")) == first, "a folder by another name"
    container = "in another container than rank 0"
    for identity, words in (
        (host_identity(str(here), proc(tmp_path / "4", "boot-2", "7")), "rank 1 is on another host than rank 0"),
        (host_identity(str(here), proc(tmp_path / "5", "boot-1", "8")), container),
        (host_identity(str(other), tmp_path / "1"), container),
        (host_identity(str(tmp_path / "none"), tmp_path / "1"), container),
    ):
        assert words in fast._apart([first, identity])
        assert fast._apart([first, first, identity]).startswith("rank 2 ")
    assert fast._apart([first, first]) == ""


def test_without_proc_the_name_of_the_host_decides(tmp_path: Path) -> None:
    import os

    assert os.uname().nodename in host_identity(str(tmp_path), tmp_path / "no proc")


def test_the_reason_names_the_rank_that_has_it() -> None:
    assert fast._first_reason(["", "", ""]) == ""
    assert fast._first_reason(["", "no P2P", "no P2P"]) == "rank 1: no P2P"
    assert fast._first_reason(["CROSSCUT_COLLECTIVES=nccl"] * 2) == "CROSSCUT_COLLECTIVES=nccl"


def test_patterns_of_a_trial_repeat_nowhere() -> None:
    words = torch.cat([pattern(rank, step, 500) for rank in range(8) for step in range(ROUNDS)])
    assert len(words.unique()) == len(words)
    assert not torch.equal(addend(0, 0), addend(1, 0))
    assert not torch.equal(addend(0, 0), addend(0, 1))


class Kernels:
    """Stands for the exchange of a rank: only what building it touches."""

    def __init__(self) -> None:
        self.closed = 0
        self.workspace, self.device = self, torch.device("cuda", 0)

    def close(self) -> None:
        self.closed += 1


def build(monkeypatch: pytest.MonkeyPatch, wanted: str = "auto", finding: str = "", hosts: str = "") -> tuple[Group, Kernels]:
    """A group of two GPU ranks, seen from rank 0; ``finding`` is what rank 1 says after the trial."""
    kernels = Kernels()
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", wanted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fast, "_obstacle", lambda group, wanted: "")
    monkeypatch.setattr(fast, "_everyone", lambda group, mine: [mine, mine + hosts])
    monkeypatch.setattr(fast, "_opened", lambda group, chosen: (kernels, ""))
    monkeypatch.setattr(fast, "prove", lambda exchange, tell, seconds: finding)
    monkeypatch.setattr(fast, "machine", lambda device: ["a test"])
    group: Any = Group("tp", 0, 2, (0, 1), "nccl", torch.device("cuda", 0), process_group=object())  # type: ignore[arg-type]
    return group, kernels


def test_kernels_that_pass_their_trial_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    group, kernels = build(monkeypatch)
    found = fast.fast(group)
    assert found is not None
    assert found.exchange is kernels
    assert found.table == shipped(2)
    assert kernels.closed == 0


def test_kernels_that_fail_their_trial_are_left_off_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = "P2P write from rank 0 to rank 1 did not arrive within 5 s"
    group, kernels = build(monkeypatch, finding=finding)
    assert fast.fast(group) is None
    assert kernels.closed == 1
    chosen = choice("all_reduce", 4096, group)
    assert (chosen.impl, chosen.reason) == ("nccl", finding)
    with pytest.raises(UsageError, match="did not arrive") as caught:
        fast.fast(build(monkeypatch, "kernels", finding)[0])
    assert caught.value.code == "no-backend"


class Unloadable(Kernels):
    """An exchange whose kernels do not compile on this rank."""

    rank, size, deadline, first = 1, 2, 30.0, 60.0

    def __init__(self) -> None:
        super().__init__()
        self.layout = self
        self.chunk = 64

    def patience(self, deadline: float, first: float) -> None:
        self.deadline, self.first = deadline, first

    def mover(self, op: str, algorithm: str) -> None:
        raise RuntimeError("a kernel of crosscut does not compile for sm_90a:\nmore")


def test_a_rank_whose_kernels_do_not_load_says_so_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args: self)
    exchange: Any = Unloadable()
    said: list[str] = []

    def tell(finding: str) -> list[str]:
        said.append(finding)
        return ["", finding]

    why = prove(exchange, tell, 2)
    assert why == "the kernels cannot be loaded on rank 1: a kernel of crosscut does not compile for sm_90a:"
    assert said == [why], "no second round"
    assert (exchange.deadline, exchange.first) == (30, 60)


def test_ranks_on_two_hosts_leave_the_kernels_off_before_they_share_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    group, kernels = build(monkeypatch, hosts=" elsewhere")
    monkeypatch.setattr(fast, "_first_reason", lambda reasons: "")
    assert fast.fast(group) is None
    assert kernels.closed == 0
    assert "rank 1 is in another container" in choice("all_reduce", 8, group).reason
