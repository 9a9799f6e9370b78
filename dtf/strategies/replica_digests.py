"""Compares what replicas of a model must have alike, before a save: parameters, buffers, and plain attributes, in which
a model may keep what it makes of the rows of one rank.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dtf.core.consistency import Peers
from dtf.core.errors import ConfigError, by_all
from dtf.model.attributes import GENERATOR, digests
from dtf.model.fingerprint import fingerprints
from dtf.optim.sharding import Sharding
from dtf.strategies.buffers import Part as Holder

KEPT = "nothing is saved at this step, and the last checkpoint is kept"

NAMED = 4
"""Attributes that an error names."""


class Part(NamedTuple):
    """A part of a model as one replica holds it. Replicas that have a part of the same name have it alike."""

    name: str
    tensors: Mapping[str, Tensor]
    model: nn.Module | None = None
    """Whose plain attributes are compared too."""

    recipe: object = None
    """As `model`."""


_Digests = dict[str, tuple[dict[str, int], dict[str, str]]]
"""Name of a part -> digests of its tensors and attributes, by name."""


class Summing(Peers, Protocol):
    """Peers that sum too. See `dtf.World`."""

    def reduce(self, sums: Tensor) -> Tensor: ...


def compare_replicas(
    replicas: Sequence[Sequence[Part]],
    shared: Sequence[str],
    peers: Summing,
    judge: Callable[[], str | None],
    instead: str,
    suspect: str = "",
) -> None:
    """Raise ConfigError on all ranks where replicas differ. `replicas`: the parts of those of this process. `shared`:
    the names of those to compare, see `shared_parts`. Collective: one small sum, where they are alike.

    Tensors are compared bit by bit. A plain attribute may differ, such as a clock or what a layer keeps to be looked
    at: then `judge` has all replicas compute the same rows, and says which module gives other numbers, or None; see
    `differing_module`. `instead`: what to use for a model that cannot be divided. `suspect`: what to look at first
    where a tensor differs; see `exchange_of`.
    """
    own = [_digests([part for part in parts if part.name in shared]) for parts in replicas]
    unequal = _unequal(own, shared, peers)
    if not unequal:
        return
    details = peers.gather([{name: one[name] for name in unequal if name in one} for one in own])
    found = None
    if details is not None:
        found = [_differences(details, unequal, kind) for kind in (0, 1)]
    tensors, attributes = peers.broadcast(found)
    if tensors:
        name, first, other = tensors[0]
        others = "otherwise the model" if suspect else "the model"
        text = (
            f"{name} of {other} is not that of {first}, and replicas start and are updated alike: {suspect}{others} "
            f"changes it by the rows of one rank, or memory was damaged; {KEPT}. Let the model change nothing but "
            f"buffers with a rule in the recipe's Layout.buffers, or use {instead}; if it does not, look at the machine"
        )
        raise by_all(ConfigError(text))
    module = judge() if attributes else None
    if module is not None:
        raise by_all(ConfigError(_refusal(attributes, module, instead)))


def part_of(holder: Holder, name: str, parameters: Mapping[str, Tensor], recipe: object) -> Part:
    """What a replica is to have alike with the others: these parameters, its buffers and its attributes."""
    buffers = {key: buffer for key, buffer in holder.model.named_buffers() if key not in holder.scratch}
    return Part(name, {**parameters, **buffers}, holder.model, recipe)


def exchange_of(strategy: str, sharding: Sharding) -> str:
    """To look first at what a strategy, which is not dtf's own, exchanges between ranks."""
    completes = "" if sharding.complete_gradients else " (it has none: right where the backward pass sums over ranks)"
    fetches = "" if sharding.fetch_others else " (it has none: right where each rank steps all parameters)"
    return (
        f"look first at {strategy}, whose Sharding has to give all ranks the same gradients by complete_gradients"
        f"{completes} and the same parameters by fetch_others{fetches}; "
    )


def _refusal(attributes: list[list[str]], module: str, instead: str) -> str:
    where = f"{module} is the first module whose output differs" if module else "look at what its loss uses"
    _, first, other = attributes[0]
    names = ", ".join(name.removesuffix(GENERATOR) for name, *_ in attributes[:NAMED])
    more = f" and {len(attributes) - NAMED} more" if attributes[NAMED:] else ""
    return (
        f"replicas of the model give different numbers for the same rows: {where}; {other} "
        f"does not have the attributes of {first}: {names}{more}. Each goes on from its own rows; "
        f"{KEPT}. Make what is kept from pass to pass a buffer with a rule in the recipe's Layout.buffers, draw random "
        f"numbers from torch's global generator, or use {instead}"
    )


def whole_and_slices(held: Mapping[str, Tensor]) -> list[Part]:
    """Parameters as of `Update.held`: whole ones, and slices, which the ranks with the same ones have alike. One that
    has a single row is whole on a rank, and on no other.
    """
    slices = {name: tensor for name, tensor in held.items() if " at [" in name}
    whole = {name: tensor for name, tensor in held.items() if name not in slices}
    return [Part(f"{kind} {_crc(sorted(part))}", part) for kind, part in (("whole", whole), ("slices", slices))]


def shared_parts(replicas: Sequence[Sequence[Part]], peers: Peers) -> list[str]:
    """Names of the parts that more than one replica holds. `replicas`: the parts of those of this process.
    Collective.
    """
    everyone = peers.gather([[part.name for part in parts] for parts in replicas])
    held = Counter(name for own in everyone or () for names in own for name in names)
    return peers.broadcast(sorted(name for name, holders in held.items() if holders > 1))


def _digests(parts: Sequence[Part]) -> _Digests:
    names = [(part.name, name) for part in parts for name in part.tensors]
    numbers = iter(fingerprints(tensor for part in parts for tensor in part.tensors.values()))
    tensors: dict[str, dict[str, int]] = {part.name: {} for part in parts}
    for part, name in names:
        tensors[part][name] = next(numbers)
    return {
        part.name: (tensors[part.name], digests(part.model, part.recipe) if part.model is not None else {})
        for part in parts
    }


def _crc(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def _labelled(everyone: Sequence[Sequence[Any]]) -> list[tuple[str, Any]]:
    """The replicas of all processes, with the name of each."""
    if len(everyone) == 1:
        return [(f"replica {number}", one) for number, one in enumerate(everyone[0])]
    return [(f"rank {rank}", one) for rank, own in enumerate(everyone) for one in own]


def _unequal(own: Sequence[_Digests], shared: Sequence[str], peers: Summing) -> list[str]:
    """Names of the parts that some replicas do not have alike. Collective.

    Numbers are all alike where the square of their sum is as large as the sum of their squares times their number.
    Halves of 16 bits keep these sums exact in fp64, for up to 2**21 replicas.
    """
    sums = torch.zeros(len(shared), 5, dtype=torch.float64)
    for one in own:
        for number, name in enumerate(shared):
            if name in one:
                high, low = divmod(_crc(one[name]), 1 << 16)
                sums[number] += torch.tensor([1, high, high**2, low, low**2], dtype=torch.float64)
    found = []
    for name, row in zip(shared, peers.reduce(sums).tolist(), strict=True):
        holders, high, high_squares, low, low_squares = map(int, row)
        if holders * high_squares != high**2 or holders * low_squares != low**2:
            found.append(name)
    return found


def _differences(everyone: Sequence[Sequence[Any]], parts: list[str], kind: int) -> list[list[str]]:
    """[name, first replica, another one] of each tensor (`kind` 0) or attribute (1) that two replicas do not have
    alike.
    """
    found: dict[str, list[str]] = {}
    for part in parts:
        holders = [(who, one[part][kind]) for who, one in _labelled(everyone) if part in one]
        first, expected = holders[0]
        for other, actual in holders[1:]:
            for name in {**expected, **actual}:
                if expected.get(name) != actual.get(name):
                    found.setdefault(name, [name, first, other])
    return list(found.values())
