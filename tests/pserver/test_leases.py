"""Laws of handing out work, without sockets and with a clock of its own: all that is opened is finished once, and
nobody waits for ever.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dtf.core.types import Train
from dtf.pserver.leases import EVALUATE, TRAIN, Key, Lease, Ledger
from dtf.pserver.sync_modes import Async, Geo, HalfAsync, Sync, SyncMode
from dtf.pserver.trainer.prefetch import AHEAD

SILENCE_S = 10.0
Trainers = st.integers(0, 4)


def work(kind: int, step: int, parts: int) -> list[Lease]:
    return [Lease(kind, step, part, parts, (Train(step, 0, step, 24, 0.1),)) for part in range(parts)]


class Any_(RuleBasedStateMachine):
    """Whatever comes in whatever order."""

    @initialize()
    def begin(self) -> None:
        self.ledger, self.now, self.steps = Ledger(), 0.0, 0
        self.opened: set[Key] = set()
        self.finished: Counter[Key] = Counter()
        self.has: dict[int, set[Key]] = {}  # what each trainer that thinks it lives believes to have
        self.every: list[Key] = []  # keys that were ever granted

    @rule(parts=st.integers(1, 4), kind=st.sampled_from([TRAIN, EVALUATE]))
    def opens(self, parts: int, kind: int) -> None:
        leases = work(kind, self.steps, parts)
        self.steps += 1
        self.ledger.open(leases)
        self.opened |= {lease.key for lease in leases}

    @rule(trainer=Trainers)
    def joins(self, trainer: int) -> None:
        self.ledger.join(trainer, self.now)
        self.has[trainer] = set()

    @rule(trainer=Trainers)
    def dies(self, trainer: int) -> None:
        """Nobody is told."""
        self.has.pop(trainer, None)

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        before = {key for key, _ in self.ledger.held()}
        gone = self.ledger.expire(self.now - SILENCE_S)
        assert not set(gone) & set(self.ledger.members())
        assert {key for key, holder in self.ledger.held()} <= before

    @rule(trainer=Trainers, most=st.integers(0, 3), lost=st.booleans())
    def asks(self, trainer: int, most: int, lost: bool) -> None:
        if trainer not in self.has:
            return
        if not self.ledger.renew(trainer, self.now):
            self.has[trainer] = set()  # it has to join anew
            return
        has = self.has[trainer]
        leases = self.ledger.grant(trainer, most, has)
        keys = [lease.key for lease in leases]
        assert len(set(keys)) == len(keys) and not has & set(keys)
        assert all(dict(self.ledger.held())[key] == trainer for key in keys)
        self.every += keys
        if not lost:
            has |= set(keys)
            assert {key for key, holder in self.ledger.held() if holder == trainer} <= has, (
                "nothing is held that its holder does not know of"
            )

    @precondition(lambda self: self.every)
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        """Anything that was granted once, however late and however often."""
        key = data.draw(st.sampled_from(self.every))
        self.finished[key] += self.ledger.finish(key)
        for has in self.has.values():
            has.discard(key)

    @rule(step=st.integers(100, 200))
    def finishes_what_nobody_opened(self, step: int) -> None:
        assert not self.ledger.finish((TRAIN, step, 0))

    @invariant()
    def each_piece_is_free_or_held_or_finished(self) -> None:
        if not hasattr(self, "ledger"):
            return
        held = [key for key, _ in self.ledger.held()]
        free = set(self.ledger._free)
        done = set(self.finished.elements())
        assert len(held) == len(set(held)) and max(self.finished.values(), default=0) <= 1
        assert free | set(held) | done == self.opened and len(free) + len(held) + len(done) == len(self.opened)
        assert {holder for _, holder in self.ledger.held()} <= set(self.ledger.members())
        assert (
            self.ledger.opened == len(self.opened)
            and self.ledger.finished == len(done)
            and self.ledger.idle() == (not free and not held)
        )

    def teardown(self) -> None:
        """Whoever is left, one will do: all that is open is finished."""
        if not hasattr(self, "ledger"):
            return
        survivor = next(iter(self.has), 0)
        self.now += SILENCE_S + 1
        self.ledger.join(survivor, self.now)
        self.ledger.expire(self.now - SILENCE_S)
        for _ in range(len(self.opened)):
            for lease in self.ledger.grant(survivor, 1):
                assert self.ledger.finish(lease.key)
        assert self.ledger.idle()


TestAnyOrder = Any_.TestCase


class Arrival(NamedTuple):
    step: int
    part: int


class Server:
    """What `ServerProgram` does with a mode and what trainers ask for, in turns that a seed chooses."""

    def __init__(self, sync_mode: SyncMode, trainers: int, steps: int, shares_of: list[int], seed: int) -> None:
        self.random, self.sync_mode, self.steps, self.shares_of = random.Random(seed), sync_mode, steps, shares_of
        self.shares, self.window = sync_mode.shares(trainers), sync_mode.window(trainers)
        self.ledger, self.now, self.last = Ledger(), 0.0, -1
        self.waiting: dict[int, set[int]] = {}
        self.basket: list[Arrival] = []
        self.applied: Counter[tuple[int, int]] = Counter()
        self.updates: list[list[Arrival]] = []
        self.has: dict[int, dict[Key, Lease]] = {}
        self.done: dict[int, list[Key]] = {}
        self.limits: dict[int, int] = {}

    def turn(self) -> bool:
        """The engine's: open, or merge; whether it did something."""
        if self.sync_mode.synchronous:
            self.basket.sort()
        count = self.sync_mode.ready(self.basket, self.waiting)
        if count:
            pushes, self.basket = self.basket[:count], self.basket[count:]
            self.updates.append(pushes)
            for push in pushes:
                self.applied[push] += 1
                self.waiting[push.step].discard(push.part)
                self.ledger.finish((TRAIN, push.step, push.part))
                if not self.waiting[push.step]:
                    del self.waiting[push.step]
            return True
        following = self.last + 1
        if following - min(self.waiting, default=following) <= self.window and following < self.steps:
            self.last += 1
            # the last batch of an epoch has fewer
            parts = min(self.shares, self.shares_of[self.last % len(self.shares_of)])
            self.waiting[self.last] = set(range(parts))
            self.ledger.open(
                Lease(TRAIN, self.last, part, self.shares, (Train(self.last, 0, self.last, 24, 0.1),))
                for part in range(parts)
            )
            return True
        return False

    def ask(self, trainer: int) -> None:
        has = self.has[trainer]
        if not self.ledger.renew(trainer, self.now):
            self.join(trainer)
            return
        for key in self.done[trainer]:
            self.ledger.finish(key)
        self.done[trainer] = []
        for lease in self.ledger.grant(trainer, self.limits[trainer] - len(has), has):
            has[lease.key] = lease

    def join(self, trainer: int) -> None:
        self.ledger.join(trainer, self.now)
        self.has[trainer], self.done[trainer], self.limits[trainer] = {}, [], AHEAD

    def work(self, trainer: int) -> None:
        has = self.has[trainer]
        if not has:
            return
        lease = has[min(has)]
        version = min(self.waiting, default=self.last + 1)
        if self.sync_mode.synchronous and lease.step > version:
            self.limits[trainer] = max(AHEAD, len(has)) + 1
            return
        del has[lease.key]
        self.done[trainer].append(lease.key)
        self.limits[trainer] = AHEAD
        for _ in range(self.random.choice([1, 1, 2])):  # a push may come twice
            if lease.part in self.waiting.get(lease.step, ()) and Arrival(lease.step, lease.part) not in self.basket:
                self.basket.append(Arrival(lease.step, lease.part))

    def run(self, trainers: int, deaths: float, survivors: int) -> None:
        for trainer in range(trainers):
            self.join(trainer)
        quiet = 0
        while self.last + 1 < self.steps or self.waiting:
            self.now += 1
            self.ledger.expire(self.now - SILENCE_S)
            before = (len(self.updates), self.last)
            while self.turn():
                pass
            for trainer in self.random.sample(sorted(self.has), len(self.has)):
                if self.random.random() < deaths and (len(self.has) > survivors):
                    del self.has[trainer]
                    continue
                if self.random.random() < 0.8:
                    self.ask(trainer)
                if self.random.random() < 0.8:
                    self.work(trainer)
            for trainer in set(range(trainers)) - self.has.keys():
                if survivors > 1 and self.random.random() < 0.1:  # the launcher starts it again
                    self.join(trainer)
            quiet = 0 if before != (len(self.updates), self.last) else quiet + 1
            assert quiet < 100, (
                f"nothing happens: waiting {self.waiting}, basket {self.basket}, trainers have {self.has}"
            )


def modes() -> st.SearchStrategy[SyncMode]:
    staleness = st.one_of(st.none(), st.integers(0, 4))
    return st.one_of(
        st.just(Sync(None)),
        st.builds(Async, staleness),
        st.builds(HalfAsync, staleness),
        st.builds(Geo, staleness, st.just(1)),
    )


@given(
    mode=modes(),
    trainers=st.integers(1, 5),
    shares_of=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    deaths=st.sampled_from([0.0, 0.05, 0.3]),
    survivors=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
# the last one has its hands full of what comes later
@example(mode=Sync(None), trainers=5, shares_of=[5], deaths=0.05, survivors=1, seed=0)
def test_every_mode_ends_with_any_trainers_alive(
    mode: SyncMode, trainers: int, shares_of: list[int], deaths: float, survivors: int, seed: int
) -> None:
    """Any window, steps of fewer shares than trainers; trainers that die unheard, one of which at least
    lives on.
    """
    server = Server(mode, trainers, 8, shares_of, seed)
    server.run(trainers, deaths, min(survivors, trainers))
    assert set(server.applied.values()) == {1} and server.ledger.opened == server.ledger.finished == len(server.applied)
    for trainer in server.has:
        server.ask(trainer)  # says what it has done
    assert server.ledger.idle() and server.ledger.granted <= server.ledger.finished + server.ledger.regranted
    if mode.synchronous:
        assert [push.step for update in server.updates for push in update[:1]] == list(range(8))
        assert all(update == [(update[0].step, part) for part in range(len(update))] for update in server.updates)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_no_lease_runs_further_ahead_than_the_staleness(mode: str, staleness: int) -> None:
    sync_mode = Async(staleness) if mode == "async" else HalfAsync(staleness)
    server, most = Server(sync_mode, 3, 12, [3], 1), 0
    turn = server.turn

    def watched() -> bool:
        nonlocal most
        did = turn()
        most = max(most, server.last - min(server.waiting, default=server.last))
        return did

    server.turn = watched  # type: ignore[method-assign]
    server.run(3, 0.0, 3)
    assert most == staleness


def test_a_trainer_that_comes_again_under_its_number_gives_up_what_it_had() -> None:
    ledger = Ledger()
    ledger.join(0, 0.0)
    ledger.open(work(TRAIN, 0, 2))
    assert [lease.part for lease in ledger.grant(0, 2)] == [0, 1] and ledger.grant(
        0, 2, {(TRAIN, 0, 0), (TRAIN, 0, 1)}
    ) == []
    ledger.join(0, 1.0)
    assert [lease.part for lease in ledger.grant(0, 2)] == [0, 1] and ledger.regranted == 2


def test_an_answer_that_was_lost_is_given_again() -> None:
    ledger = Ledger()
    ledger.join(0, 0.0)
    ledger.open(work(TRAIN, 0, 3))
    first = ledger.grant(0, 2)
    assert ledger.grant(0, 2) == first and ledger.granted == 2
    assert [lease.part for lease in ledger.grant(0, 2, {first[0].key})] == [1, 2], (
        "the other one, and as much new work as still fits"
    )
