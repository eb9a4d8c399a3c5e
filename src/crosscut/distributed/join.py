"""Making this process a rank: its device and backend, the meeting of all ranks, the process group, and the end of it.

The same code serves ranks that :mod:`crosscut.distributed.launch` started and ranks that torchrun, srun, mpirun or
Kubernetes started. All ranks first meet in a store, so that a rank that never comes is named, and only then make the
process group. The device is bound before the first collective.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from crosscut.distributed.mesh import Mesh, make_mesh
from crosscut.distributed.progress import OnProgress, Progress
from crosscut.env import RankEnv, omp_threads_given, rank_env, settings
from crosscut.errors import RankError, UsageError, choose

_BACKENDS, _DEVICES = ("auto", "nccl", "gloo"), ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class LaunchConfig:
    """How many ranks, on what."""

    nproc: int
    backend: str = "auto"
    """auto (nccl when each rank of a host has a GPU of its own, else gloo on the CPU), nccl or gloo."""
    device: str = "auto"
    """auto, cuda or cpu."""
    timeout: float = 60.0
    """Seconds that any single wait may take: for all ranks to arrive, for a collective to end."""
    threads: int | None = None
    """CPU threads of each rank; None: OMP_NUM_THREADS if set, else the cores divided among the ranks of the host."""


@dataclass(frozen=True)
class RankContext:
    """Handed to the function that runs in each rank. A world of one has no process group."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    progress: Progress


def place(config: LaunchConfig, local_rank: int, local_world_size: int, own_gpu: bool = False) -> tuple[torch.device, str]:
    """(device, backend) of one rank; counts GPUs without making a CUDA context.

    ``own_gpu``: this rank sees only its own GPUs. gloo on ``cuda`` lets ranks share GPUs, for trials on a small host.
    Raises UsageError: ``bad-option``, ``no-backend`` (nccl without CUDA,
    or on the CPU), ``tp-exceeds-gpus`` (GPUs asked for, and fewer than the ranks of this host).
    """
    choose("backend", config.backend, _BACKENDS)
    choose("device", config.device, _DEVICES)
    present = torch.cuda.device_count()
    enough = present >= (1 if own_gpu else local_world_size)
    wants_gpu = config.device == "cuda" or config.backend == "nccl"
    if config.backend == "nccl" and (config.device == "cpu" or not dist.is_nccl_available() or present == 0):
        raise UsageError(
            "nccl needs a GPU for each rank, and "
            + ("the device asked for is the CPU" if config.device == "cpu" else "there is no CUDA GPU here"),
            code="no-backend",
            fix="use --backend gloo, which runs on the CPU",
        )
    sharing = config.backend == "gloo" and config.device == "cuda" and present > 0
    if wants_gpu and not enough and not sharing:
        raise UsageError(
            f"{local_world_size} ranks were asked for on this host, which has {present} GPU{'' if present == 1 else 's'}",
            code="tp-exceeds-gpus",
            fix=(
                f"lower --tp to {present}, use --device cpu, or for a trial --device cuda --backend gloo, which shares GPUs"
                if present
                else "use --device cpu"
            ),
        )
    on_gpu = wants_gpu or (config.device == "auto" and config.backend == "auto" and enough and dist.is_nccl_available())
    if not on_gpu:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", 0 if own_gpu else local_rank % present)
    return device, "gloo" if config.backend == "gloo" or not dist.is_nccl_available() else "nccl"


@contextmanager
def world(env: RankEnv, config: LaunchConfig, progress: Progress) -> Iterator[RankContext]:
    """Be a rank of the world that ``env`` tells of; the process group lives as long as the ``with`` block.

    Raises UsageError (as :func:`place`; ``port-in-use``) and RankError (``rank-timeout``, with the ranks that did not
    arrive within ``config.timeout``). When the block raises, the group is left as it is: its peers may be stuck in it.
    """
    context, store = enter(env, config, progress)
    yield context
    with suppress(RuntimeError):  # a rank that fails or is late now is reported by whoever supervises it
        _meet(store, "left", env, config.timeout)
    dist.destroy_process_group()


def enter(env: RankEnv, config: LaunchConfig, progress: Progress) -> tuple[RankContext, dist.Store]:
    """Meet the other ranks and make the default process group; see :func:`world`. Returns the store they met in."""
    device, backend = place(config, env.local_rank, env.local_world_size, env.own_gpu)
    set_threads(config.threads, env.local_world_size)
    if backend == "gloo":
        _choose_interface(env)
    store = _rendezvous(env, config.timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=config.timeout),
        device_id=device if backend == "nccl" else None,
    )
    return RankContext(env.rank, env.world_size, env.local_rank, device, backend, progress), store


def init_mesh(tp: int | None = None, dp: int | None = None, *, backend: str = "auto", device: str = "auto") -> Mesh:
    """The mesh of this process: the world that torchrun, srun, mpirun or Kubernetes started, or a world of one.

    For scripts that are ranks themselves; the process group that it makes (unless there is one already) is the
    script's to destroy. ``tp`` and ``dp``: group sizes, the one left out takes what remains (both: tp takes all).
    Raises UsageError (``tp-mismatch``, ``bad-option``, and as :func:`world`) and RankError (``rank-timeout``).
    """
    choose("backend", backend, _BACKENDS)
    choose("device", device, _DEVICES)
    env = rank_env()
    if env is not None and not dist.is_initialized():
        config = LaunchConfig(env.world_size, backend, device, timeout=settings().timeout)
        enter(env, config, Progress())
        atexit.register(_leave)
    return make_mesh(tp, dp, None if dist.is_initialized() or device == "auto" else device)


def _leave() -> None:
    """At the script's end: give gloo's threads the moment they need to let go of the last collective's tensors.

    A tensor that they free while Python shuts down aborts the process ("terminate called without an active exception"),
    in about one script of three that keeps its mesh to the end.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        time.sleep(0.1)


def alone(config: LaunchConfig, on_progress: OnProgress | None) -> RankContext:
    """The context of a world of one: no process group, no rendezvous. Raises UsageError as :func:`place`."""
    device, backend = place(config, 0, 1)
    set_threads(config.threads, 1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return RankContext(0, 1, 0, device, backend, Progress(on_progress))


def set_threads(threads: int | None, local_world_size: int) -> None:
    """Share the cores of this host among its ranks; ``threads`` or OMP_NUM_THREADS, when given, win."""
    if threads is None and not omp_threads_given() and local_world_size > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)


def _rendezvous(env: RankEnv, timeout: float) -> dist.Store:
    """A part of the store that this run has for itself, returned when all ranks are in it."""
    # A launcher that starts its ranks anew may keep the store, in which each rank got as far as it got.
    store = dist.PrefixStore(f"crosscut/{env.attempt}", _connect(env, timeout))
    # Each rank counts its own runs, in step with the others: a second run of one world must not read the first one's keys.
    run = store.add(f"runs/{env.rank}", 1)
    own = dist.PrefixStore(str(run), store)
    chosen = settings()
    mine = f"CROSSCUT_COLLECTIVES={chosen.collectives} CROSSCUT_SCHEDULE={chosen.schedule}"
    try:
        words = _meet(own, "arrived", env, timeout, mine)
    except RuntimeError:
        raise _missing_ranks(own, env, timeout) from None
    _check_alike(words)
    return own


def _meet(store: dist.Store, what: str, env: RankEnv, timeout: float, word: str = "") -> list[str]:
    """Wait for all ranks; what each of them says."""
    store.set(f"{what}/{env.rank}", word)
    names = [f"{what}/{rank}" for rank in range(env.world_size)]
    store.wait(names, timedelta(seconds=timeout))
    return [said.decode() for said in store.multi_get(names)]


def _check_alike(words: list[str]) -> None:
    """Refuse ranks whose settings would have them exchange different things: they would wait for each other, or worse."""
    for rank, said in enumerate(words):
        if said != words[0]:
            raise UsageError(
                f"rank 0 runs with {words[0]}, and rank {rank} with {said}",
                code="bad-env",
                fix="set these variables alike for every rank, or for none",
            )


def _missing_ranks(store: dist.Store, env: RankEnv, timeout: float) -> RankError:
    with suppress(RuntimeError):
        missing = [rank for rank in range(env.world_size) if not store.check([f"arrived/{rank}"])]
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {env.world_size}"
        return _not_arrived(names, env, timeout)
    return _not_arrived(f"rank 0 of {env.world_size} left, and the other ranks", env, timeout)


def _not_arrived(who: str, env: RankEnv, timeout: float) -> RankError:
    return RankError(
        f"{who} did not arrive at {env.master_addr}:{env.master_port} within {timeout:g} s (world started by {env.launcher})",
        code="rank-timeout",
        fix="look at the missing ranks' own output; check that all have the same MASTER_ADDR and MASTER_PORT and reach it",
    )


def _connect(env: RankEnv, timeout: float) -> dist.Store:
    serves = env.rank == 0 and not env.store_hosted
    try:
        return _tcp_store(env, serves, timeout)
    except RuntimeError as error:  # torch's DistNetworkError among them
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"port {env.master_port} on this host, where the ranks are to meet, is taken by another program",
                code="port-in-use",
                fix=f"set MASTER_PORT to a free port for every rank (`ss -ltnp` shows who has {env.master_port})",
            ) from None
        raise _not_arrived("rank 0, which serves the rendezvous," if env.rank else "this rank", env, timeout) from None


_STORES: dict[tuple[str, int, int, bool], dist.Store] = {}


def _tcp_store(env: RankEnv, serves: bool, timeout: float) -> dist.Store:
    """One connection per process and world, kept to the end: the server must outlive the last rank that asks it."""
    limit = timedelta(seconds=timeout)
    world = (env.master_addr, env.master_port, env.world_size, serves)
    if world not in _STORES:
        _STORES[world] = dist.TCPStore(*world, timeout=limit, wait_for_workers=False)
    _STORES[world].set_timeout(limit)  # a later run of the same world may have another one
    return _STORES[world]


def _choose_interface(env: RankEnv) -> None:
    """Tell gloo which network interface to use, unless GLOO_SOCKET_IFNAME does: else it takes the one that the host's
    own name resolves to, which fails on hosts whose name resolves to nothing or to 127.0.1.1."""
    name = "lo" if env.local_world_size == env.world_size else _interface_towards(env.master_addr)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface_towards(host: str) -> str | None:
    """The network interface whose IPv4 address this host uses to reach ``host``; None when it cannot be told."""
    request = 0x8915  # SIOCGIFADDR of <linux/sockios.h>: the address of an interface
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect((host, 9))  # sends nothing: picks the route
        own = udp.getsockname()[0]
        for _, name in socket.if_nameindex() if not own.startswith("127.") else ():
            with suppress(OSError):
                answer = fcntl.ioctl(udp, request, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None
