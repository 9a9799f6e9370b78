"""What a process inside a job knows of the job, from the variables that the scheduler or our own manifests set.

A mapping in, a value out. It asks nobody and starts nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtf.core.errors import ConfigError
from dtf.host.deadline import deadline

NODES, NODE, ADDRESS = "DTF_NODES", "DTF_NODE", "DTF_ADDRESS"
"""How many nodes the job has, which of them this is, from 0, and HOST:PORT where they meet, on node 0."""
RESTARTS, REASON_FILE = "DTF_RESTARTS", "DTF_REASON_FILE"
"""How often the scheduler has started the job again; the file whose text it shows as the reason of a failure."""

RESOURCES, ROLES = "DTF_SAGEMAKER_RESOURCES", "DTF_ROLES"
"""On SageMaker: the file that names the job's hosts; and its roles in order, where each process has a host."""


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
    until = deadline(environment)
    endpoints = [text.strip() for text in environment.get("DTF_ENDPOINTS", "").split(",")]
    return Allocation(
        nodes=nodes,
        node=node,
        address=address,
        role=role,
        number=number(environment, "DTF_ID", 0),
        endpoints=tuple(text for text in endpoints if text),
        restarts=number(environment, RESTARTS, 0),
        deadline=until if until < math.inf else None,
        reason_file=environment.get(REASON_FILE, ""),
    )


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A whole number from a variable; `default` where it is not set. ConfigError for what is none."""
    text = environment.get(name, "")
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text[:80]} is no number; the scheduler, or the job's own script, sets it")
    return int(text) if text else default


_PORT = 29_500
"""Where the hosts of a SageMaker job meet: each container has a network of its own."""


def from_sagemaker(environment: Mapping[str, str]) -> Allocation | None:
    """A container of a SageMaker job, by the file that SageMaker writes, or SM_HOSTS and SM_CURRENT_HOST."""
    if path := environment.get(RESOURCES):
        try:
            resources = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{RESOURCES}={path} cannot be read ({error}); SageMaker writes it") from error
    elif environment.get("SM_HOSTS") and environment.get("SM_CURRENT_HOST"):
        resources = {"hosts": json.loads(environment["SM_HOSTS"]), "current_host": environment["SM_CURRENT_HOST"]}
    else:
        return None
    return from_hosts(resources, [role for role in environment.get(ROLES, "").split(",") if role], environment)


def from_hosts(resources: Mapping[str, Any], roles: Sequence[str], environment: Mapping[str, str]) -> Allocation:
    """`resources`: as in SageMaker's resourceconfig.json. `roles`: names of its instance groups, in order; none where
    all hosts are alike.
    """
    rest = {"reason_file": environment.get(REASON_FILE, ""), "restarts": number(environment, RESTARTS, 0)}
    current = resources["current_host"]
    if roles:
        groups = {group["instance_group_name"]: _in_order(group["hosts"]) for group in resources["instance_groups"]}
        role = next(name for name in roles if current in groups[name])
        endpoints = tuple(f"{host}:{_PORT}" for host in groups[roles[0]])
        return Allocation(role=role, number=groups[role].index(current), endpoints=endpoints, **rest)
    hosts = _in_order(resources["hosts"])
    address = f"{hosts[0]}:{_PORT}" if len(hosts) > 1 else ""
    return Allocation(nodes=len(hosts), node=hosts.index(current), address=address, **rest)


def _in_order(hosts: Sequence[str]) -> list[str]:
    """algo-2 before algo-10, the same on all hosts."""
    return sorted(hosts, key=lambda host: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", host)])


_SCHEDULERS: tuple[Callable[[Mapping[str, str]], Allocation | None], ...] = (from_manifest, from_sagemaker)
"""Each returns None where it does not know this environment; the first that does counts."""
