"""How trainers and servers are laid out on one host (`strategy.trainers=auto`), from its cores alone. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from dtf.pserver.options import Mode

MOST_TRAINERS = 8
"""More trainers would each see older parameters, and need memory; they get more threads instead."""

CORES_OF_A_SERVER = 16
"""Cores for which one server does. Reasoned, not measured: docs/pserver.md."""


class HostLayout(NamedTuple):
    """Processes of one host, among whom launcher=local divides the cores."""

    trainers: int
    servers: int


def host_layout(mode: Mode, cores: int, hogwild_threads: int = 1, team: int = 1, threads: int = 1) -> HostLayout:
    """The layout for a host with so many cores. `threads`: that each trainer process has at least.

    Trainers of one thread have no thread that waits for another one, nor one that a server holds up. In `sync` all
    trainers wait for a step anyway, and each costs a request: one trainer has all cores. More servers than trainers
    would mostly wait.
    """
    units = 1 if mode is Mode.sync else min(cores, MOST_TRAINERS)
    processes = max(1, min(units // hogwild_threads, cores // threads))
    processes = -(-processes // team) * team
    return HostLayout(processes, min(processes, max(1, cores // CORES_OF_A_SERVER)))
