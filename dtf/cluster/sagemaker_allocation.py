"""What SageMaker says of a container of a job: a file that it writes, or its variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtf.api.schema import show
from dtf.cluster.allocation import REASON_FILE, RESTARTS, ROLES, Allocation, number, until
from dtf.core.errors import ConfigError

RESOURCES = "DTF_SAGEMAKER_RESOURCES"
"""The file that names the job's hosts."""
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
        path, text = "", environment["SM_HOSTS"]
        try:
            resources = {"hosts": json.loads(text), "current_host": environment["SM_CURRENT_HOST"]}
        except ValueError as error:
            raise ConfigError(f"SM_HOSTS={show(text)} is no JSON ({error}); SageMaker sets it") from error
    else:
        return None
    try:
        return from_hosts(resources, [role for role in environment.get(ROLES, "").split(",") if role], environment)
    except (LookupError, ValueError, TypeError, AttributeError, StopIteration) as error:
        where = f"{RESOURCES}={path}" if path else "SM_HOSTS and SM_CURRENT_HOST"
        raise ConfigError(
            f"{where}: this host is not among those of the job, or they are no list of names: {show(str(resources))}; "
            "SageMaker says which hosts a job has"
        ) from error


def from_hosts(resources: Mapping[str, Any], roles: Sequence[str], environment: Mapping[str, str]) -> Allocation:
    """`resources`: as in SageMaker's resourceconfig.json. `roles`: names of its instance groups, in order; none where
    all hosts are alike.
    """
    rest = {
        "reason_file": environment.get(REASON_FILE, ""),
        "restarts": number(environment, RESTARTS, 0),
        "deadline": until(environment),
    }
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
