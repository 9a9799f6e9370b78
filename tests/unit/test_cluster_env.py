"""Which rank a process is, from what torchrun, Kubernetes, mpirun and srun tell it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dtf.core.errors import ConfigError
from dtf.launch.cluster_env import RankEnvironment, rank_environment

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "x",
}
SRUN = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
}
SRUN |= {
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_TASKS_PER_NODE": "5,4",
    "SLURM_STEP_NODELIST": "gpu[07,09-11],other3",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "b",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INDEXED = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job"}
OPERATOR = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, RankEnvironment("torchrun", 1, 4, 1, 2, "a", 29400)),
        (SRUN, RankEnvironment("Slurm", 5, 7, 1, 3, "gpu07", 20125)),
        ({**SRUN, "MASTER_ADDR": "c", "MASTER_PORT": "1234"}, RankEnvironment("Slurm", 5, 7, 1, 3, "c", 1234)),
        (MPIRUN, RankEnvironment("Open MPI", 2, 3, 0, 1, "b", 29500)),
        (MPICH, RankEnvironment("MPICH", 1, 2, 1, 2, "127.0.0.1", 29500)),
        (INDEXED, RankEnvironment("Kubernetes", 3, 4, 0, 1, "job-0.job", 29500)),
        (OPERATOR, RankEnvironment("torchrun", 1, 2, 0, 1, "job-master-0", 23456)),
        (SRUN | TORCHRUN, RankEnvironment("torchrun", 1, 4, 1, 2, "a", 29400)),
        (SRUN | MPIRUN, RankEnvironment("Open MPI", 2, 3, 0, 1, "b", 29500)),
    ],
    ids=[
        "torchrun",
        "srun",
        "srun with an address",
        "mpirun",
        "mpiexec on one host",
        "indexed job",
        "training operator",
        "torchrun in srun",
        "mpirun by srun",
    ],
)
def test_each_starter_is_understood(environment: dict[str, str], expected: RankEnvironment) -> None:
    assert rank_environment(environment) == expected


@pytest.mark.parametrize(
    ("text", "node", "count"), [("4", 0, 4), ("4(x3)", 2, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("1,2,3(x2)", 3, 3)]
)
def test_tasks_of_a_slurm_host(text: str, node: int, count: int) -> None:
    found = rank_environment(
        {
            **SRUN,
            "SLURM_STEP_TASKS_PER_NODE": text,
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_TASKS": "16",
            "SLURM_LOCALID": "0",
        }
    )
    assert found.local_size == count


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[01-03,7]", "gpu01"),
        ("gpu[12]", "gpu12"),
        ("a-b[3,4]-ib,c", "a-b3-ib"),
        ("x.y.z", "x.y.z"),
    ],
)
def test_the_first_host_of_a_slurm_list(text: str, first: str) -> None:
    assert rank_environment({**SRUN, "SLURM_STEP_NODELIST": text}).address == first


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {},
            "none of RANK (torchrun), JOB_COMPLETION_INDEX (Kubernetes), OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK "
            "(MPICH), SLURM_PROCID (Slurm); start with",
        ),
        (
            {"RANK": "0"},
            "started by torchrun (RANK=0), needs also WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR",
        ),
        ({**TORCHRUN, "MASTER_PORT": ""}, "needs also MASTER_PORT"),
        (
            {**INDEXED, "WORLD_SIZE": ""},
            "started by Kubernetes (JOB_COMPLETION_INDEX=3), needs also WORLD_SIZE; an indexed Job",
        ),
        ({**MPIRUN, "MASTER_ADDR": ""}, "needs also MASTER_ADDR; give mpirun -x MASTER_ADDR=HOST"),
        (
            {**SRUN, "SLURM_STEP_ID": ""},
            "SLURM_PROCID is set and SLURM_STEP_ID is not: sbatch started this process, once; put srun before",
        ),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE=two is no number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is no number"),
        ({**TORCHRUN, "RANK": "²"}, "RANK=² is no number"),
        ({**TORCHRUN, "RANK": "9" * 5000}, "is no number"),
        ({**SRUN, "SLURM_NODEID": "9" * 5000}, f"SLURM_NODEID={'9' * 80} is no number"),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "1(x99999999999)"},
            "SLURM_TASKS_PER_NODE=1(x99999999999) is no list of tasks",
        ),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "abc"},
            "SLURM_STEP_TASKS_PER_NODE=abc is no list of tasks like 4(x2),3",
        ),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 must be at most WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no number of a port"),
        (
            {**SRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": ""},
            "RANK=1 of WORLD_SIZE=4 contradicts SLURM_PROCID=5 of SLURM_STEP_NUM_TASKS=7 (Slurm); unset one",
        ),
        (
            {**MPIRUN, **OPERATOR},
            "RANK=1 of WORLD_SIZE=2 contradicts OMPI_COMM_WORLD_RANK=2 of OMPI_COMM_WORLD_SIZE=3 (Open MPI)",
        ),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID=4 is no entry of SLURM_STEP_TASKS_PER_NODE=4,3"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rank_environment(environment)
    assert words in str(caught.value)


def test_jobs_of_a_federation_have_ports_of_their_own() -> None:
    """Their ids have ten digits: the number of the cluster stands in the high bits."""
    ports = {rank_environment({**SRUN, "SLURM_JOB_ID": str(job)}).port for job in (1006632961, 1006632962)}
    assert len(ports) == 2


def test_many_hosts_with_as_many_tasks_are_counted_by_groups() -> None:
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "4(x100000000),3", "SLURM_NODEID": "100000000", "SLURM_LOCALID": "2"}
    assert rank_environment({**SRUN, **tasks}).local_size == 3


@given(
    some.dictionaries(
        some.sampled_from(sorted({**SRUN, **TORCHRUN, **MPIRUN, **MPICH, **INDEXED, **OPERATOR})), some.text(max_size=6)
    )
)
def test_any_environment_gives_a_rank_of_the_world_or_a_refusal(environment: dict[str, str]) -> None:
    for base in ({}, SRUN, TORCHRUN):
        try:
            found = rank_environment({**base, **environment})
        except ConfigError:
            continue
        assert (
            0 <= found.rank < found.size
            and 0 <= found.local_rank < found.local_size <= found.size
            and found.address
            and 0 < found.port < 65536
        )
