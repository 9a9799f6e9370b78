"""Which rank this process is, from the variables that torchrun, Kubernetes, Open MPI, MPICH and Slurm set.

Pure: a mapping in, a value out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dtf.core.errors import ConfigError

PORT = 29500
"""The port of rank 0 where none is set, the same as torchrun's."""
_SLURM_PORTS = range(20_000, 30_000)
"""Ports below those that kernels assign; two jobs on a host rarely get the same."""


@dataclass(frozen=True)
class RankEnvironment:
    """The rank of this process, and the address of rank 0."""

    starter: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


@dataclass(frozen=True)
class _Starter:
    name: str
    rank: str
    size: tuple[str, ...]  # the first that is set counts
    local_rank: str
    local_size: str


_STARTERS = (
    _Starter("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Starter("Kubernetes", "JOB_COMPLETION_INDEX", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Starter(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Starter("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Starter(
        "Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
)
"""What starts ranks, the nearest to the process first: mpirun may start its daemons with srun, and either torchrun."""

VARIABLES = sorted(
    {name for s in _STARTERS for name in (s.rank, *s.size, s.local_rank, s.local_size)}
    | {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST"}
    | {
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_NODEID",
        "SLURM_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_NTASKS_PER_NODE",
    }
)
"""All that `rank_environment` looks at."""


def rank_environment(environment: Mapping[str, str]) -> RankEnvironment:
    """The rank of this process.

    ConfigError that names the variables when some are missing, make no sense, or contradict each other.
    """
    present = {name: environment[name] for name in VARIABLES if environment.get(name)}
    candidates = [starter for starter in _STARTERS if starter.rank in present]
    if not candidates:
        known = ", ".join(f"{starter.rank} ({starter.name})" for starter in _STARTERS)
        raise ConfigError(
            f"launcher=env finds no rank in the environment, none of {known}; start with torchrun, srun or mpirun, or "
            "use launcher=local"
        )
    starter = candidates[0]
    size = next((name for name in starter.size if name in present), starter.size[0])
    one_in_pod = starter.name == "Kubernetes" or (starter.name == "torchrun" and "KUBERNETES_SERVICE_HOST" in present)
    if one_in_pod:
        present = {starter.local_rank: "0", starter.local_size: "1"} | present
    if starter.name == "Slurm":
        if "SLURM_STEP_ID" not in present:
            raise ConfigError(
                "SLURM_PROCID is set and SLURM_STEP_ID is not: sbatch started this process, once; put srun before the "
                "command"
            )
        present[starter.local_size] = _tasks_here(present)
    missing = [name for name in (size, starter.local_rank, starter.local_size) if name not in present]
    address, port = _meeting_point(starter, present, present.get(size) == present.get(starter.local_size), missing)
    if missing:
        raise ConfigError(
            f"launcher=env, started by {starter.name} ({starter.rank}={present[starter.rank]}), needs also "
            f"{', '.join(missing)}; {_HINT[starter.name]}"
        )
    names = (starter.rank, size, starter.local_rank, starter.local_size)
    for name in names:
        if not _is_number(present[name]):
            raise ConfigError(f"{name}={present[name][:80]} is no number; launcher=env takes it from the environment")
    rank, world, local_rank, local_size = (int(present[name]) for name in names)
    for small, bound, large, wrong in (
        (starter.rank, "less than", size, rank >= world),
        (starter.local_rank, "less than", starter.local_size, local_rank >= local_size),
        (starter.local_size, "at most", size, local_size > world),
    ):
        if wrong:
            raise ConfigError(f"{small}={present[small]} must be {bound} {large}={present[large]}")
    _refuse_contradiction(starter, size, present, candidates[1:])
    return RankEnvironment(starter.name, rank, world, local_rank, local_size, address, port)


_HINT = {
    "torchrun": "torchrun sets them all",
    "Kubernetes": "an indexed Job has to be told them in its manifest, see docs/hosts.md",
    "Open MPI": "give mpirun -x MASTER_ADDR=HOST, with the host of rank 0",
    "MPICH": "give mpiexec -genv MASTER_ADDR HOST, with the host of rank 0",
    "Slurm": "srun sets them all",
}


def _meeting_point(
    starter: _Starter, present: Mapping[str, str], one_host: bool, missing: list[str]
) -> tuple[str, int]:
    """Host and port of rank 0; adds to `missing` what is needed for it."""
    address, port = present.get("MASTER_ADDR", ""), present.get("MASTER_PORT", "")
    if not address and starter.name == "Slurm":
        address = _first_host(present.get("SLURM_STEP_NODELIST") or present.get("SLURM_JOB_NODELIST", ""))
    elif not address and one_host and starter.name != "torchrun":
        address = "127.0.0.1"
    if not address:
        missing.append("MASTER_ADDR")
    if not port and starter.name == "torchrun" and "TORCHELASTIC_RUN_ID" in present:
        missing.append("MASTER_PORT")
    if not port and starter.name == "Slurm":
        ids = [present.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        steps = [int(text) for text in ids if re.fullmatch("[0-9]{1,19}", text)]  # federations count in high bits
        return address, _SLURM_PORTS[sum(steps) % len(_SLURM_PORTS)]
    if port and not (_is_number(port) and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT={port[:80]} is no number of a port, 1 to 65535")
    return address, int(port or PORT)


def _refuse_contradiction(chosen: _Starter, size: str, present: Mapping[str, str], others: list[_Starter]) -> None:
    """Raise ConfigError when two starters disagree.

    RANK=0 set for all processes alike, under srun or mpirun, would make each of them rank 0.
    """
    if chosen.name != "torchrun" or "TORCHELASTIC_RUN_ID" in present:
        return
    for other in others:
        # a batch script that starts ranks in another way
        stepless = other.name == "Slurm" and "SLURM_STEP_ID" not in present
        theirs = next((name for name in other.size if name in present), "")
        if not stepless and theirs and (present[chosen.rank], present[size]) != (present[other.rank], present[theirs]):
            raise ConfigError(
                f"{chosen.rank}={present[chosen.rank]} of {size}={present[size]} contradicts "
                f"{other.rank}={present[other.rank]} of {theirs}={present[theirs]} ({other.name}); unset one of them"
            )


def _tasks_here(present: Mapping[str, str]) -> str:
    """Slurm's tasks on this host, from `4(x2),3`: four on the first two hosts, three on the third."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    name = next((name for name in names if present.get(name)), "")
    text = present.get(name, "")
    if not text:
        raise ConfigError("SLURM_STEP_TASKS_PER_NODE and SLURM_TASKS_PER_NODE are not set; srun sets them")
    if not re.fullmatch(r"[0-9]{1,9}(\(x[0-9]{1,9}\))?(,[0-9]{1,9}(\(x[0-9]{1,9}\))?)*", text):
        raise ConfigError(f"{name}={text[:80]} is no list of tasks like 4(x2),3; srun sets it")
    groups = [(tasks, int(times or 1)) for tasks, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text)]
    if len({tasks for tasks, _ in groups}) == 1:
        return groups[0][0]
    node = present.get("SLURM_NODEID", "0")
    if not _is_number(node):
        raise ConfigError(f"SLURM_NODEID={node[:80]} is no number; srun sets it")
    hosts_before = int(node)
    for tasks, times in groups:
        if hosts_before < times:
            return tasks
        hosts_before -= times
    raise ConfigError(f"SLURM_NODEID={node} is no entry of {name}={text[:80]}")


def _is_number(text: str) -> bool:
    """Whether it is written in up to nine of the digits 0 to 9."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


def _first_host(text: str) -> str:
    """The first host of a list as Slurm writes it: `node[01-03,7],other` is node01."""
    parts = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", text)
    return "".join(part or "" for part in parts.groups()) if parts else ""
