"""Compares the replicas of a program: what they hold, and what all of them compute of one micro-batch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dtf.api.guard import Guard
from dtf.api.precision import Format
from dtf.core.consistency import Peers
from dtf.core.errors import CorruptionError
from dtf.core.seeding import seed_of
from dtf.core.types import Batch, Shard, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.host.devices import processor
from dtf.model.fingerprint import fingerprints
from dtf.strategies.guard.votes import Seen, judge, near
from dtf.strategies.guard.witness import Witness
from dtf.strategies.start_check import TOLERANCES


@dataclass(frozen=True)
class Copy:
    """A replica, or the part of one that this process has."""

    held: Callable[[], Mapping[str, Mapping[str, Tensor]]]
    """Tensors by name, in parts by name: whoever has a part of this name has it alike."""

    again: Callable[[Batch, Train, int], Tensor]
    """The metric sums of a micro-batch of a step, computed without a trace. Collective where passes are."""

    witness: Witness


@dataclass
class ReplicaGuard(Guard):
    """Compares the replicas of a program.

    `copies`: those of this process. `shares`: the ranks of each share of the rows; of a process that has several
    copies, one for each. `rows(ticket, batch, micro_batch, share)`: the rows of a micro-batch for each of the copies,
    from the share that computes it; collective. `program_step`: of the program. `each(work)`: `work(i)` for each copy.
    """

    copies: Sequence[Copy]
    shares: Sequence[Sequence[int]]
    micro_batch_rows: int
    compute: Format
    device: torch.device
    peers: Peers
    rows: Callable[[Train, Batch, int, int], Sequence[Batch]]
    program_step: Callable[[Train, Batch | None], StepOutput]
    each: Callable[[Callable[[int], Any]], list[Any]] = lambda work: [work(0)]
    _by_bits: bool | None = field(default=None, init=False)
    """Whether passes have the same bits; None: not yet known."""
    _places: list[str] = field(default_factory=list, init=False)

    def compare_state(self) -> None:
        held = [copy.held() for copy in self.copies]
        digests = [_digests(one) for one in held]
        everyone = self._gathered([{name: seed_of(*part.values()) for name, part in one.items()} for one in digests])
        found = None if everyone is None else _unequal_part(everyone)
        found = self.peers.broadcast(found)
        if found is None:
            return
        part, wrong, differ = found
        everyone = self._gathered([one.get(part, {}) for one in digests])
        tensor = self.peers.broadcast(None if everyone is None else _unequal_tensor(everyone))
        holders = self._holders()
        self._refuse(f"{tensor}, which replicas hold alike, differs", [[holders[i]] for i in wrong or differ], wrong)

    def step(self, turn: int, ticket: Train, batch: Batch | None, see: Callable[[str], None]) -> StepOutput:
        assert batch is not None
        bounds = micro_batch_bounds(ticket.rows, self.micro_batch_rows)
        count = len(bounds) - 1
        number = turn % count
        parts = [micro_batches_of(count, Shard(i, len(self.shares))) for i in range(len(self.shares))]
        owner = next(i for i, (first, last) in enumerate(parts) if first <= number < last)
        begins = self._by_bits is None
        rows = self.rows(ticket, batch, number, owner)
        try:
            own = [self._passes(rows, ticket, number)]
            if begins:
                own.append(self._passes(rows, ticket, number))
                self._begin(own, see)
            self._compare_passes(own, lambda: self._passes(rows, ticket, number))
            for copy in self.copies:
                copy.witness.watch(ticket.step, number, bool(self._by_bits))
            output = self.program_step(ticket, batch)
            self._compare_step(owner, own[0], see)
        finally:
            for copy in self.copies:
                copy.witness.close()
        return output

    def _passes(self, rows: Sequence[Batch], ticket: Train, number: int) -> list[tuple[Seen, int]]:
        """What the copies of this process see of a pass over these rows, and a digest of its metric sums."""

        def work(i: int) -> tuple[Seen, int]:
            copy = self.copies[i]
            copy.witness.watch(ticket.step, number, bool(self._by_bits))
            sums = copy.again(rows[i], ticket, number)
            return copy.witness.seen(), fingerprints([sums.detach().double()])[0]

        return self.each(work)

    def _begin(self, own: Sequence[Sequence[tuple[Seen, int]]], see: Callable[[str], None]) -> None:
        """Find out whether passes have the same bits on all replicas, and each time. Collective."""
        exact = self.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        facts = [processor(), torch.get_num_threads(), exact]
        everyone = self.peers.gather([socket.gethostname(), facts, own])
        answer = None
        if everyone is not None:
            kinds = {repr(facts) for _, facts, _ in everyone}
            results = [self._by_share([passes[turn] for _, _, passes in everyone]) for turn in (0, 1)]
            same = all(one == results[0][0] for one in chain(*results))
            answer = [len(kinds) == 1 and exact and same, [host for host, *_ in everyone]]
        self._by_bits, hosts = self.peers.broadcast(answer)
        self._places = [f" on {host}" for host in hosts]
        if not self._by_bits:
            see(self._told())

    def _told(self) -> str:
        return (
            "train.guard_every: replicas do not compute the same bits of the same rows, as their processors or kernels "
            f"differ; gradients are compared to {TOLERANCES[self.compute]:g} of their norm"
        )

    def _alike(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        """Whether two replicas, each given by what its ranks have seen, computed the same."""
        if self._by_bits:
            return _bits(one) == _bits(other)
        bound = TOLERANCES[self.compute]
        return all(near(_seen(a), _seen(b), bound) for a, b in zip(one, other, strict=True))

    def _compare_passes(self, own: list[Any], again: Callable[[], Any]) -> None:
        """Raise CorruptionError where replicas computed other numbers; then each passes once more, to tell who."""
        everyone, verdict = self.peers.gather(own[0]), None
        first = None if everyone is None else self._by_share(everyone)
        if first is not None:
            verdict = judge(dict(enumerate([[one] for one in first])), self._alike)
        if self.peers.broadcast(verdict) is None:
            return
        everyone = self.peers.gather(again())
        if everyone is not None and first is not None:
            results = [*zip(first, self._by_share(everyone), strict=True)]
            verdict = judge(dict(enumerate(results)), self._alike)
        _, wrong, differ = self.peers.broadcast(None if verdict is None else [0, *verdict])
        ranks = [self.shares[i] for i in wrong or differ]
        self._refuse("replicas computed other numbers of the same rows", ranks, wrong)

    def _compare_step(self, owner: int, own: Sequence[tuple[Seen, int]], see: Callable[[str], None]) -> None:
        """Raise CorruptionError where the step itself had another gradient of the micro-batch than the passes."""
        seen = [copy.witness.seen() for copy in self.copies]
        everyone, found = self.peers.gather([seen, [one for one, _ in own]]), None
        if everyone is not None:
            now, before = (self._by_share([each[kind] for each in everyone])[owner] for kind in (0, 1))
            bound = TOLERANCES[self.compute]
            if self._by_bits:
                found = [Seen(*a).digest for a in now] == [Seen(*b).digest for b in before]
            else:
                found = all(near(Seen(*a), Seen(*b), bound) for a, b in zip(now, before, strict=True))
        if self.peers.broadcast(found):
            return
        self._refuse("in the step a replica had another gradient than before", [self.shares[owner]], [owner])

    def _by_share(self, everyone: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """What the ranks of each share have, from what the copies of each process have."""
        if len(everyone) == 1:
            return [[one] for one in everyone[0]]
        return [[everyone[rank][0] for rank in ranks] for ranks in self.shares]

    def _gathered(self, own: Sequence[Any]) -> list[Any] | None:
        """One value of each copy, of all processes."""
        everyone = self.peers.gather(own)
        return None if everyone is None else list(chain(*everyone))

    def _holders(self) -> list[int]:
        """The rank, or replica of a single process, of each of the values of `_gathered`."""
        ranks = {rank for ranks in self.shares for rank in ranks}
        return [*range(len(self.copies) if len(self.copies) > 1 else len(ranks))]

    def _refuse(self, what: str, who: Iterable[Sequence[int]], known: Sequence[int]) -> None:
        names = [self._name(ranks) for ranks in who]
        if known:
            said = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} wrong, as all others agree; look at"
            blames = next(iter(who))[0] if len(names) == 1 and len(self.copies) == 1 else None
        else:
            said, blames = f"{' and '.join(names)} disagree, and nothing tells which of them is right; look at", None
        raise CorruptionError(f"{what}: {said} the memory and the processors there", blames)

    def _name(self, ranks: Sequence[int]) -> str:
        if len(self.copies) > 1:
            return f"replica {ranks[0]}"
        hosts = sorted({self._places[rank] for rank in ranks if self._places})
        return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}{''.join(hosts)}"


def _bits(results: Sequence[Any]) -> list[tuple[int, int]]:
    """What is compared where passes have the same bits. The first passes have a sketch as well."""
    return [(_seen(result).digest, result[1]) for result in results]


def _seen(result: Sequence[Any]) -> Seen:
    """The gradient of a result of `_passes`, which may have been sent as JSON."""
    return Seen(*result[0])


def _digests(held: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, int]]:
    numbers = iter(fingerprints(tensor for part in held.values() for tensor in part.values()))
    return {name: {key: next(numbers) for key in part} for name, part in held.items()}


def _unequal_part(everyone: Sequence[Mapping[str, int]]) -> list[Any] | None:
    """[name, who is wrong, who differs] of the first part that some do not have alike."""
    for name in dict.fromkeys(chain(*everyone)):
        held = {i: [one[name]] for i, one in enumerate(everyone) if name in one}
        verdict = judge(held, lambda one, other: one == other)
        if verdict is not None:
            return [name, *verdict]
    return None


def _unequal_tensor(everyone: Sequence[Mapping[str, int]]) -> str:
    first = next(one for one in everyone if one)
    return next((name for name in first for one in everyone if one and one.get(name) != first[name]), "a tensor")
