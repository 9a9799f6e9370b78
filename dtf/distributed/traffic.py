"""What a rank sends to others in collectives and messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtf.distributed.sharding import byte_count

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of torch's operators."""
KINDS = {
    "allreduce": ("all-reduce", 2.0),
    "reducescatter": ("reduce-scatter", 1.0),
    "allgather": ("all-gather", 1.0),
    "alltoall": ("all-to-all", 1.0),
    "send": ("message", 0.0),
}
"""What an operator is called without underscores -> the kind, and how often a ring of n ranks has each rank send
(n - 1) / n of the tensor. 0: it sends the tensor itself.
"""


class Sent(NamedTuple):
    """Bytes, and in how many collectives or messages."""

    bytes: float = 0.0
    calls: float = 0.0

    def plus(self, other: Sent, times: float = 1.0) -> Sent:
        return Sent(self.bytes + times * other.bytes, self.calls + times * other.calls)


Key = tuple[str, tuple[int, ...]]
"""A kind, and the ranks of the group."""


class Traffic:
    """Adds up what this rank sends `sent`. `see` is to be called for each operator of COLLECTIVES."""

    def __init__(self) -> None:
        self.sent: dict[Key, Sent] = {}

    def see(self, operator: Any, args: tuple[Any, ...], results: Any) -> None:
        name = operator.name().partition("::")[2].replace("_", "")
        kind, times = next((KINDS[part] for part in KINDS if name.startswith(part)), ("", 0.0))
        if not kind:
            return
        group = _group(args)
        if kind == "message" and group is dist.group.WORLD:
            return  # what describes messages, once for each shape; messages themselves have groups of their own
        ranks = tuple(dist.get_process_group_ranks(group))
        whole = max(_bytes(value) for value in (*args, *(results if isinstance(results, tuple) else (results,))))
        size = whole * (times * (len(ranks) - 1) / len(ranks) if times else 1.0)
        self.sent[kind, ranks] = self.sent.get((kind, ranks), Sent()).plus(Sent(size, 1))


def all_reduce_bytes(size: int, ranks: int) -> float:
    """What each of so many ranks sends for the sum of a tensor of `size` bytes."""
    return KINDS["allreduce"][1] * (ranks - 1) / ranks * size


def _bytes(value: Any) -> int:
    return byte_count(tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor))


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The group of a collective: functional ones get its name, last, others the group itself."""
    named = args[-1]
    if isinstance(named, str):
        return dist.distributed_c10d._resolve_process_group(named)  # type: ignore[arg-type]
    boxed = next(value for value in args if isinstance(value, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)
