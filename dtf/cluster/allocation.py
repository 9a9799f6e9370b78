"""What a process inside a job knows of the job, from the variables that the scheduler or our own manifests set.

Pure: a mapping in, a value out. It asks nobody and starts nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtf.cluster.node_lists import node_names, per_node
from dtf.core.errors import ConfigError
from dtf.host.deadline import deadline

NODES, NODE, ADDRESS = "DTF_NODES", "DTF_NODE", "DTF_ADDRESS"
"""How many nodes the job has, which of them this is, from 0, and HOST:PORT where they meet, on node 0."""
RESTARTS, REASON_FILE = "DTF_RESTARTS", "DTF_REASON_FILE"
"""How often the scheduler has started the job again; the file whose text it shows as the reason of a failure."""
ROLES = "DTF_ROLES"
"""Under Slurm: the role of each component of a heterogeneous job, with commas between."""
_SLURM_PORTS = range(20_000, 30_000)
"""Ports below those that kernels assign; two jobs on a node rarely get the same."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One node of a job; or one process of it, where the processes of its roles are separate."""

    nodes: int = 1
    node: int = 0
    address: str = ""
    """HOST:PORT on node 0, where there are several nodes and no roles."""
    role: str = ""
    number: int = 0
    """Among the processes of its role."""
    endpoints: tuple[str, ...] = ()
    """HOST:PORT of each process of the first role."""
    restarts: int = 0
    deadline: float | None = None
    """When the scheduler ends the job, in seconds since 1970."""
    reason_file: str = ""


def allocation_of(environment: Mapping[str, str]) -> Allocation:
    """Of this process. One node alone where no scheduler says anything.

    ConfigError that names the variable which is missing or makes no sense.
    """
    for known in _SCHEDULERS:
        allocation = known(environment)
        if allocation is not None:
            return allocation
    return Allocation()


def from_manifest(environment: Mapping[str, str]) -> Allocation | None:
    """What our own manifests say, on platforms that have no variables for it. None where they say nothing."""
    if not environment.get(NODES) and not environment.get("DTF_ROLE"):
        return None
    nodes = number(environment, NODES, 1)
    node = number(environment, NODE, 0)
    if not node < nodes:
        raise ConfigError(f"{NODE}={node} must be less than {NODES}={nodes}; nodes are counted from 0")
    role = environment.get("DTF_ROLE", "")
    address = environment.get(ADDRESS, "")
    if nodes > 1 and not role and not address:
        raise ConfigError(f"{NODES}={nodes} and {ADDRESS} is not set; it is HOST:PORT of node 0")
    endpoints = [text.strip() for text in environment.get("DTF_ENDPOINTS", "").split(",")]
    return Allocation(
        nodes=nodes,
        node=node,
        address=address,
        role=role,
        number=number(environment, "DTF_ID", 0),
        endpoints=tuple(text for text in endpoints if text),
        restarts=number(environment, RESTARTS, 0),
        deadline=_deadline(environment),
        reason_file=environment.get(REASON_FILE, ""),
    )


def from_slurm(environment: Mapping[str, str]) -> Allocation | None:
    """What Slurm says of a task of a step. None outside of one."""
    if not environment.get("SLURM_STEP_ID") or not environment.get("SLURM_PROCID"):
        return None
    task = number(environment, "SLURM_PROCID", 0)
    known = {
        "restarts": number(environment, "SLURM_RESTART_COUNT", 0),
        "deadline": _deadline(environment),
        "reason_file": environment.get(REASON_FILE, ""),
    }
    if roles := environment.get(ROLES, ""):
        counts = [number(environment, f"SLURM_NTASKS_HET_GROUP_{group}", 0) for group in range(len(roles.split(",")))]
        for role, count in zip(roles.split(","), counts, strict=True):
            if task < count:
                return Allocation(role=role, number=task, endpoints=_first_group(environment, counts[0]), **known)
            task -= count
        raise ConfigError(
            f"SLURM_PROCID={environment['SLURM_PROCID']} is no task of the components {roles}, which have "
            f"{' and '.join(map(str, counts))}; start one step over all of them, srun --het-group"
        )
    names = node_names(_given(environment, "SLURM_STEP_NODELIST"))
    tasks = number(environment, "SLURM_STEP_NUM_TASKS", 1)
    if tasks != len(names):
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={tasks} on {len(names)} node(s): one task on each node starts all of its ranks; "
            "use --ntasks-per-node=1"
        )
    return Allocation(nodes=tasks, node=task, address=f"{names[0]}:{_slurm_port(environment, 0)}", **known)


def _first_group(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """HOST:PORT of each task of the first component, where tasks fill one node after the other."""
    names = node_names(_given(environment, "SLURM_JOB_NODELIST_HET_GROUP_0"))
    tasks = per_node(_given(environment, "SLURM_TASKS_PER_NODE_HET_GROUP_0"))
    places = [name for name, here in zip(names, tasks, strict=False) for _ in range(here)]
    if len(places) != count:
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE_HET_GROUP_0={environment['SLURM_TASKS_PER_NODE_HET_GROUP_0']} on {len(names)} "
            f"node(s) are not the {count} tasks of the first component"
        )
    return tuple(f"{name}:{_slurm_port(environment, at)}" for at, name in enumerate(places))


def _slurm_port(environment: Mapping[str, str], offset: int) -> int:
    """The same in all tasks of a step; another one for each `offset`."""
    ids = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return _SLURM_PORTS[(sum(int(text) for text in ids if text.isdecimal()) + offset) % len(_SLURM_PORTS)]


def _given(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ConfigError(f"{name} is not set; srun sets it")
    return environment[name]


def _deadline(environment: Mapping[str, str]) -> float | None:
    until = deadline(environment)
    return until if until < math.inf else None


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A whole number from a variable; `default` where it is not set. ConfigError for what is none."""
    text = environment.get(name, "")
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text[:80]} is no number; the scheduler, or the job's own script, sets it")
    return int(text) if text else default


_SCHEDULERS: tuple[Callable[[Mapping[str, str]], Allocation | None], ...] = (from_manifest, from_slurm)
"""Each returns None where it does not know this environment; the first that does counts."""
