"""Whether what `Strategy.setup` returned reads each row once: found on all ranks before the first step."""

from __future__ import annotations

from typing import Any

from dtf.api.leased_work import LeasedWork
from dtf.api.strategy import Program
from dtf.core.errors import ConfigError
from dtf.core.types import Shard
from dtf.distributed.world import World


def check_program(program: object, strategy: str, world: World) -> Program:
    """The program, with its type. ConfigError on all ranks when one is none, or when they do not read each share of a
    global batch once: rows would be lost, or count twice. `strategy`: its name. Collective.
    """
    gathered = world.gather(_said(program))
    fault = world.broadcast("" if gathered is None else _fault(gathered))
    if fault or not isinstance(program, Program):
        raise ConfigError(f"strategy={strategy}: {fault}")
    return program


def _said(program: Any) -> list[Any]:
    """[what is wrong here or "", the shard or None, the counts that are the same on all ranks]; JSON."""
    if not isinstance(program, Program):
        return [f"setup() returned a {type(program).__name__}; it must return a dtf.Program", None, {}]
    shard, missing = getattr(program, "shard", ""), "the program has no {}; set it before setup() returns"
    if shard == "":
        return [missing.format("shard"), None, {}]
    if not isinstance(program.leased, LeasedWork):
        return [f"the program's leased is {program.leased!r}; it must be a dtf.LeasedWork, or be left out", None, {}]
    counts = {name: getattr(program, name, None) for name in ("shares", "micro_batch_rows")}
    for name, count in counts.items():
        if count is None:
            return [missing.format(name), None, {}]
        if type(count) is not int or count < 1:
            return [f"the program's {name} is {count!r}; it must be an int of at least 1", None, {}]
    if shard is None:
        return ["", None, counts | {"leased": type(program.leased) is not LeasedWork}]
    if not isinstance(shard, Shard) or any(type(number) is not int for number in shard):
        return [f"the program's shard is {shard!r}; it must be a dtf.Shard(index, count), or None", None, {}]
    if not 0 <= shard.index < shard.count:
        return [f"the program's shard is {shard.index} of {shard.count}; the index is counted from 0", None, {}]
    return ["", list(shard), counts]


def _fault(gathered: list[list[Any]]) -> str:
    """What is wrong on one of the ranks, or between them, or ""."""
    for rank, (fault, _, _) in enumerate(gathered):
        if fault:
            return f"on rank {rank}, {fault}" if len(gathered) > 1 else fault
    for rank, (_, _, said) in enumerate(gathered):
        for name in ("shares", "micro_batch_rows"):
            if said[name] != gathered[0][2][name]:
                return f"the program's {name} is {gathered[0][2][name]} on rank 0 and {said[name]} on rank {rank}"
    if all(shard is None and not said["leased"] for _, shard, said in gathered):
        return "no rank reads rows: the shard of each program is None; give each rank dtf.Shard(rank, ranks)"
    readers: dict[int, int] = {}
    counts = {rank: shard[1] for rank, (_, shard, _) in enumerate(gathered) if shard is not None}
    for rank, count in counts.items():
        first = next(iter(counts))
        if count != counts[first]:
            return f"rank {first} reads one of {counts[first]} shares of the rows, and rank {rank} one of {count}"
        index = gathered[rank][1][0]
        if index in readers:
            return (
                f"ranks {readers[index]} and {rank} both read share {index} of {count} of the rows, which would count "
                "twice; give each its own shard, or let one have it and the other shard=None"
            )
        readers[index] = rank
    lost = [index for index in range(max(counts.values(), default=0)) if index not in readers]
    if lost:
        return f"no rank reads share {lost[0]} of {max(counts.values())} of the rows; give one of them that shard"
    return ""
