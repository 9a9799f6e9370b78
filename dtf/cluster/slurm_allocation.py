"""What Slurm's variables say of a task. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dtf.cluster.allocation import REASON_FILE, ROLES, Allocation, number, until
from dtf.cluster.node_lists import node_names, per_node
from dtf.core.errors import ConfigError

_SLURM_PORTS = range(20_000, 30_000)
"""Ports below those that kernels assign; two jobs on a node rarely get the same."""


def from_slurm(environment: Mapping[str, str]) -> Allocation | None:
    """What Slurm says of a task of a step. None outside of one."""
    if not environment.get("SLURM_STEP_ID") or not environment.get("SLURM_PROCID"):
        return None
    task = number(environment, "SLURM_PROCID", 0)
    known = {
        "restarts": number(environment, "SLURM_RESTART_COUNT", 0),
        "deadline": until(environment),
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
