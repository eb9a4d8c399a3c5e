"""When the kernels are left out: what each rank says, what all conclude, and that calls then go the general way."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from crosscut import collectives as cc
from crosscut.collectives import choice, fast, send
from crosscut.collectives.call import _through_host
from crosscut.collectives.select import Table, shipped
from crosscut.distributed.mesh import Group
from crosscut.errors import UsageError
from crosscut.kernels.trial import ROUNDS, addend, pattern, prove
from crosscut.kernels.workspace import host_identity, shared_workspace


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
    monkeypatch.setattr(fast, "_from_first", lambda group, mine: mine)
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


class Serving:
    """Stands for kernels that take every call they are asked to: writes down which."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.device = torch.device("cuda", 0)

    def most(self, op: str, algorithm: str) -> int:
        return 1 << 20

    def aside(self, body: Any, x: Any) -> Any:
        return body()

    def __getattr__(self, name: str) -> Any:
        def take(x: Any, out: Any, *rest: Any) -> Any:
            self.taken.append(name)
            return out

        return take


def on_gpu(serving: Serving) -> Group:
    ops = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    table = Table(dict.fromkeys(ops, ((1 << 20, "lanes"),)), "a test")
    return Group("tp", 0, 2, (0, 1), "nccl", serving.device, cache={"fast": fast.Fast(cast(Any, serving), table)})


def test_kernels_leave_sizes_that_do_not_fit_to_the_checks() -> None:
    serving = Serving()
    group = on_gpu(serving)
    with FakeTensorMode():
        x = torch.empty(8, device="cuda:0")
        assert fast.all_gather(x, group, 0, [8, 8]) is not None
        assert fast.reduce_scatter(x, group, 0, "sum", [4, 4]) is not None
        serving.taken.clear()
        for sizes in ([3, 3], [4, 4], [8], [8, 8, 8]):
            assert fast.all_gather(x, group, 0, sizes) is None
        for sizes in ([3, 3], [8, 8], [4], [4, 4, 4]):
            assert fast.reduce_scatter(x, group, 0, "sum", sizes) is None
    assert serving.taken == []


def test_kernels_leave_what_torch_conjugates_or_negates_lazily() -> None:
    """They would carry the memory, which holds other numbers."""
    serving = Serving()
    group = on_gpu(serving)
    with FakeTensorMode():
        z = torch.empty(2, dtype=torch.complex64, device="cuda:0")
        negative = torch._neg_view(torch.empty(2, device="cuda:0"))  # type: ignore[attr-defined]
        for x in (z.conj(), negative):
            assert x.is_contiguous()
            assert fast.all_gather(x, group) is None
            assert fast.broadcast(x, group) is None
            assert fast.broadcast(x.resolve_conj().resolve_neg(), group, out=x) is None
            assert fast.all_to_all(x, group) is None
        assert fast.reduce_scatter(negative, group) is None
        assert fast.all_reduce(negative, group) is None
        one = torch.empty(1, dtype=torch.complex64, device="cuda:0").conj().imag
        assert fast.all_reduce(one, group) is None, "no private name is needed for one"
    assert serving.taken == []


def test_a_tensor_on_another_gpu_is_refused() -> None:
    serving = Serving()
    group = on_gpu(serving)
    with FakeTensorMode():
        x = torch.empty(4, device="cuda:1")
        calls: tuple[Any, ...] = (cc.all_reduce, cc.all_gather, cc.broadcast, cc.all_to_all, cc.all_gather.start)
        for call in calls:
            with pytest.raises(UsageError, match="a tensor on cuda:1, and rank 0 of group tp works on cuda:0") as refused:
                call(x, group)
            assert refused.value.code == "bad-device"
    assert serving.taken == []


def test_a_sum_in_place_on_another_gpu_is_refused_too() -> None:
    """It goes past the checks of every other call, straight to NCCL."""
    group: Any = Group("tp", 0, 2, (0, 1), "nccl", torch.device("cuda", 0), process_group=object(), cache={"fast": None})  # type: ignore[arg-type]
    with FakeTensorMode():
        x = torch.empty(4, device="cuda:1")
        with pytest.raises(UsageError, match="a tensor on cuda:1"):
            cc.all_reduce(x, group, out=x)


def test_the_fused_tail_leaves_weights_that_it_cannot_read() -> None:
    """A kernel would take host memory for its own, and a lazily negated weight for what it was."""
    group = on_gpu(Serving())
    with FakeTensorMode():
        x, weight = torch.empty(2, 8, device="cuda:0"), torch.empty(8, device="cuda:0")
        assert fast.all_reduce_norm(x, x, weight, group, 1e-5, None, weight, True) is not None
        for bad in (torch.empty(8), torch._neg_view(weight)):  # type: ignore[attr-defined]
            assert fast.all_reduce_norm(x, x, bad, group, 1e-5, None, None, False) is None
            assert fast.all_reduce_norm(x, x, weight, group, 1e-5, bad, None, False) is None


def test_half_an_installation_of_cuda_bindings_leaves_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType("cuda.bindings")  # there, but without nvrtc
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    group = Group("tp", 0, 2, (0, 1), "nccl", torch.device("cuda", 0))
    assert fast._obstacle(group, "auto") == "cuda-bindings is not installed"


def test_a_weight_that_kernels_overwrite_has_another_version() -> None:
    """The multiply for few tokens reads a weight of the version it knows before the kernel before it has ended."""
    group = on_gpu(Serving())
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(4, 4, device="cuda:0"))
        before = weight._version
        fast.broadcast(weight.detach(), group, out=weight.detach())
        assert weight._version > before
        before = weight._version
        fast.all_reduce(torch.empty(4, 4, device="cuda:0"), group, out=weight.detach())
        assert weight._version > before
        with torch.inference_mode():
            kept = torch.empty(4, device="cuda:0")
        assert fast.broadcast(kept, group, out=kept) is kept


def test_complex_sums_in_place_take_the_way_that_makes_pairs_of_them() -> None:
    group: Any = Group("tp", 0, 2, (0, 1), "nccl", torch.device("cuda", 0), process_group=object(), cache={"fast": None})  # type: ignore[arg-type]
    z = torch.ones(2, dtype=torch.complex64)
    assert fast.all_reduce(z, group, out=z) is None


def test_a_rank_without_memory_leaves_nobody_in_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    def no_memory(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    def rendezvous(*args: Any) -> None:
        raise AssertionError("this rank waits for one that does not come")

    symmetric = "torch.distributed._symmetric_memory."
    monkeypatch.setattr(symmetric + "rendezvous", rendezvous)
    here: Any = Pair()
    with monkeypatch.context() as full:
        full.setattr(symmetric + "empty", no_memory)
        with pytest.raises(RuntimeError, match=r"^rank 1: CUDA out of memory.$"):
            shared_workspace("tp", here, torch.device("cuda", 0), 30, 60, lambda mine: ["", mine])
    monkeypatch.setattr(symmetric + "empty", lambda *args, **options: torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"^rank 0: out of memory$"):
        shared_workspace("tp", here, torch.device("cuda", 0), 30, 60, lambda mine: ["rank 0: out of memory", mine])


def test_what_was_sent_through_host_memory_is_not_written_over() -> None:
    """The ranks of gloo meet in host memory; only what a rank receives lands on its GPU again."""
    group = Group("tp", 0, 2, (0, 1), "gloo", torch.device("cpu"))
    x = torch.ones(3)
    plan = send._plan(x, group, 1)
    _, _, landed = _through_host(plan.source, plan.target, plan.finish)
    assert landed() is x
    assert x._version == 0, "autograd would take it for changed"
