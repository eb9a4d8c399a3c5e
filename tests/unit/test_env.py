"""Who started this rank: every launcher's variables, and the shells that look like ranks and are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.env import RankEnv, first_host, omp_threads_given, rank_env, settings, socket_folder
from crosscut.errors import UsageError

THERE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
PLAIN = {"RANK": "3", "WORLD_SIZE": "4", **THERE}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", **THERE}


def _without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def _code(environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        rank_env(environ)
    assert caught.value.code == "bad-env"
    assert caught.value.fix
    return caught.value.message


def test_torchrun() -> None:
    environ = PLAIN | {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert rank_env(environ) == RankEnv(3, 4, 1, 2, "node1", 29500, "torchrun", store_hosted=True)
    again = rank_env(environ | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert again is not None
    assert again.attempt == 2
    assert rank_env(environ | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) == RankEnv(3, 4, 1, 2, "node1", 29500, "torchrun")


def test_kubernetes_has_one_rank_a_host() -> None:
    assert rank_env(PLAIN) == RankEnv(3, 4, 0, 1, "node1", 29500, "env")


@pytest.mark.parametrize("addr", ["localhost", "127.0.0.1", "::1"])
def test_plain_ranks_on_this_host(addr: str) -> None:
    assert rank_env(PLAIN | {"MASTER_ADDR": addr}) == RankEnv(3, 4, 3, 4, addr, 29500, "env")


def test_open_mpi_on_one_host_needs_no_address() -> None:
    found = rank_env(OPEN_MPI)
    assert found is not None
    assert (found.rank, found.local_rank, found.master_addr, found.launcher) == (1, 1, "127.0.0.1", "mpirun")
    assert 20000 <= found.master_port < 60000
    other = rank_env(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-78@1"})
    assert other is not None
    assert other.master_port != found.master_port, "two jobs on one host must not meet"


def test_open_mpi_on_two_hosts_needs_an_address() -> None:
    spread = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert "MASTER_ADDR" in _code(spread)
    assert rank_env(spread | THERE) == RankEnv(1, 2, 0, 1, "node1", 29500, "mpirun")


def test_srun() -> None:
    found = rank_env(SRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 6, 1, 2)
    assert (found.master_addr, found.launcher, found.own_gpu) == ("gpu07", "srun", False)
    assert rank_env(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}).master_port == found.master_port  # type: ignore[union-attr]
    assert rank_env(SRUN | {"SLURM_STEP_ID": "1"}).master_port != found.master_port  # type: ignore[union-attr]
    assert rank_env(SRUN | {"SLURM_GPUS_PER_TASK": "1"}).own_gpu  # type: ignore[union-attr]
    assert rank_env(SRUN | THERE).master_addr == "node1"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        _without(SRUN, "SLURM_STEP_ID"),  # a batch script
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # a batch script of a newer SLURM
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc's interactive step
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in a larger allocation
        {"RANK": "0", "WORLD_SIZE": "1"},  # a Kubernetes job of one pod
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_nobody_started_us(environ: dict[str, str]) -> None:
    assert rank_env(environ) is None


def test_mpich_alone_and_inside_a_slurm_step() -> None:
    assert rank_env(HYDRA) == RankEnv(1, 2, 0, 1, "node1", 29500, "pmi")
    assert rank_env(SRUN | HYDRA) == RankEnv(1, 2, 0, 1, "node1", 29500, "pmi")
    pmi2 = rank_env(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "6"})
    assert pmi2 is not None
    assert pmi2.launcher == "srun"


def test_inner_launcher_wins() -> None:
    assert rank_env(SRUN | OPEN_MPI).launcher == "mpirun"  # type: ignore[union-attr]
    assert rank_env(SRUN | PLAIN).launcher == "env"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (PLAIN | {"RANK": "3", "WORLD_SIZE": "2"}, "rank 3 does not exist in a world of 2"),
        (PLAIN | {"RANK": "three"}, "RANK is not a whole number"),
        (PLAIN | {"RANK": "-1"}, "RANK is not a whole number"),
        (PLAIN | {"WORLD_SIZE": ""}, "WORLD_SIZE is not a whole number"),
        (_without(PLAIN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (_without(PLAIN, "RANK"), "RANK is not set"),
        (_without(PLAIN, "MASTER_ADDR"), "MASTER_ADDR"),
        (_without(PLAIN, "MASTER_PORT"), "MASTER_PORT"),
        (PLAIN | {"MASTER_PORT": "70000"}, "MASTER_PORT"),
        (PLAIN | {"LOCAL_RANK": "1"}, "only one of local rank and local size"),
        (PLAIN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local rank 2 of 2 does not fit"),
        (PLAIN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"}, "local rank 2 of 8 does not fit a world of 4"),
        (_without(OPEN_MPI, "PMIX_NAMESPACE"), "MASTER_PORT"),
        (SRUN | {"SLURM_NODEID": "3"}, "number of tasks on this node"),
        (_without(SRUN, "SLURM_STEP_NODELIST"), "MASTER_ADDR"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], words: str) -> None:
    assert words in _code(environ)


def test_message_shows_what_was_found() -> None:
    assert "(found in the environment: RANK=3, WORLD_SIZE=2)" in _code({"RANK": "3", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-005,9],gpu1", "node003"),
        ("node[9,3-5]", "node9"),
        ("rack[1-2]n[03-05],x", "rack1n03"),
        ("a-b.example.org,c", "a-b.example.org"),
        ("gpu[1-2]-ib", "gpu1-ib"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@given(st.integers(1, 4), st.integers(2, 5), st.data())
def test_srun_local_sizes_cover_the_world(nodes: int, tasks: int, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    local = data.draw(st.integers(0, tasks - 1))
    environ = SRUN | {
        "SLURM_PROCID": str(node * tasks + local),
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
    }
    found = rank_env(environ)
    assert found is not None
    assert (found.rank, found.local_rank, found.local_world_size) == (node * tasks + local, local, tasks)
    assert found.master_addr == ("127.0.0.1" if nodes == 1 else "gpu07")


def test_settings() -> None:
    assert settings({"CROSSCUT_TIMEOUT": "2.5", "CROSSCUT_LOG": "DEBUG"}).timeout == 2.5
    for environ, words in (
        ({"CROSSCUT_TIMOUT": "5"}, "did you mean 'CROSSCUT_TIMEOUT'"),
        ({"CROSSCUT_TIMEOUT": "soon"}, "not a number of seconds"),
        ({"CROSSCUT_TIMEOUT": "0"}, "not a number of seconds"),
        ({"CROSSCUT_KERNEL_TIMEOUT": "-1"}, "CROSSCUT_KERNEL_TIMEOUT='-1' is not a number of seconds"),
        ({"CROSSCUT_LOG": "loud"}, "'loud' is not known"),
        ({"CROSSCUT_SCHEDULE": "pieces:0"}, "use one of: auto, plain, pieces, pieces:1, .*, pieces:16$"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            settings(environ)
        assert caught.value.code == "bad-env"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 30),
        ({"CROSSCUT_TIMEOUT": "300"}, 30),
        ({"CROSSCUT_TIMEOUT": "3"}, 3),  # nothing waits longer than the user allows
        ({"CROSSCUT_TIMEOUT": "3", "CROSSCUT_KERNEL_TIMEOUT": "9"}, 9),  # but for what the user says of kernels alone
        ({"CROSSCUT_KERNEL_TIMEOUT": "120"}, 120),
    ],
)
def test_the_deadline_of_kernels(environ: dict[str, str], seconds: float) -> None:
    assert settings(environ).kernel_timeout == seconds


def test_the_folder_of_torchs_sockets() -> None:
    assert socket_folder({}) == "/tmp"
    assert socket_folder({"TEMP": "/b", "TMP": "/a"}) == "/a"
    assert socket_folder({"TEMP": "/b", "TMPDIR": "/c"}) == "/c"


def test_omp_threads() -> None:
    assert omp_threads_given({"OMP_NUM_THREADS": "4"})
    assert not omp_threads_given({"OMP_NUM_THREADS": ""})
    assert not omp_threads_given({})
