"""Two hosts on one machine: two network namespaces joined by a virtual cable, a rank in each, gloo between them.

Both hosts have the same name, which resolves to the loopback address: the case in which gloo, left to itself, offers an
address that the other host cannot reach.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions

HOSTS = ("10.211.7.1", "10.211.7.2")
SECONDS = 60.0
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PMI", "OMPI_", "TORCHELASTIC_", "CROSSCUT_", "GLOO_")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with the addresses HOSTS; removed afterwards, whatever happened."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = (f"crosscut{os.getpid()}a", f"crosscut{os.getpid()}b")
    cable = (f"cc{os.getpid()}a"[:15], f"cc{os.getpid()}b"[:15])
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, end, address in zip(names, cable, HOSTS, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run_on(hosts: tuple[str, str], commands: list[list[str]], environs: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """One command on each host at the same time; (exit code, standard output, standard error) of each."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    clean["PYTHONPATH"] = os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *command],
            env=clean | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, command, environ in zip(hosts, commands, environs, strict=True)
    ]
    try:
        finished = [(process, process.communicate(timeout=SECONDS)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [(process.returncode, out, err) for process, (out, err) in finished]


def _script(name: str, *args: str) -> list[str]:
    return [str(Path(rank_functions.__file__)), name, *args]


@pytest.mark.netns
def test_torchrun_on_two_hosts(hosts: tuple[str, str]) -> None:
    world = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", HOSTS[0], "--master-port", "29517"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *world]
    commands = [[*torchrun, "--node-rank", str(node), *_script("add_twice", "2", "30")] for node in (0, 1)]
    zero, one = _run_on(hosts, commands, [{}, {}])
    assert zero[:2] == (0, "[3.0, 3.0]\n"), zero[2]
    assert one[:2] == (0, "null\n"), one[2]


@pytest.mark.netns
def test_one_rank_a_host_as_kubernetes_starts_them(hosts: tuple[str, str]) -> None:
    there = {"WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29518"}
    command = [sys.executable, *_script("add_twice", "2", "30")]
    zero, one = _run_on(hosts, [command, command], [there | {"RANK": "0"}, there | {"RANK": "1"}])
    assert zero[:2] == (0, "[3.0, 3.0]\n"), zero[2]
    assert one[:2] == (0, "null\n"), one[2]


@pytest.mark.netns
def test_host_that_never_comes_is_named(hosts: tuple[str, str]) -> None:
    there = {"WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29519"}
    late = [sys.executable, "-c", "pass"]
    zero, _ = _run_on(hosts, [[sys.executable, *_script("add_twice", "2", "2")], late], [there | {"RANK": "0"}, {}])
    assert zero[0] == 1
    assert f"rank-timeout: rank 1 of 2 did not arrive at {HOSTS[0]}:29519 within 2 s" in zero[2]
