"""What a process inside a job knows of the job. A scheduler's own variables are read by the modules of that scheduler.

A mapping in, a value out. It asks nobody and starts nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dtf.core.errors import ConfigError
from dtf.host.deadline import deadline

NODES, NODE, ADDRESS = "DTF_NODES", "DTF_NODE", "DTF_ADDRESS"
"""How many nodes the job has, which of them this is, from 0, and HOST:PORT where they meet, on node 0."""
RESTARTS, REASON_FILE = "DTF_RESTARTS", "DTF_REASON_FILE"
"""How often the scheduler has started the job again; the file whose text it shows as the reason of a failure."""
ROLES = "DTF_ROLES"
"""Where the scheduler has a group of hosts or tasks for each role: the roles in order, with commas between."""
MEET_TIMEOUT, COUNTS_ENDS = "DTF_MEET_TIMEOUT_S", "DTF_COUNTS_ENDS"
"""How long the job's other processes may take to come, where they do not start together; and whether nothing outside
counts how often it ended without progress, see `ends.py`.
"""


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
    meet_timeout_s: int = 600
    counts_ends: bool = False
    scheduled: bool = True
    """Whether a scheduler started this process."""


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
        deadline=until(environment),
        reason_file=environment.get(REASON_FILE, ""),
        meet_timeout_s=number(environment, MEET_TIMEOUT, Allocation.meet_timeout_s),
        counts_ends=bool(number(environment, COUNTS_ENDS, 0)),
    )


def until(environment: Mapping[str, str]) -> float | None:
    """When the scheduler ends the job; None where nothing says it."""
    seconds = deadline(environment)
    return seconds if seconds < math.inf else None


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A whole number from a variable; `default` where it is not set. ConfigError for what is none."""
    text = environment.get(name, "")
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text[:80]} is no number; the scheduler, or the job's own script, sets it")
    return int(text) if text else default
