"""Who waits for whom among the ranks of this host, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dtf.core.errors import Exit
from dtf.core.types import Failed, Note
from dtf.host.heartbeat import Beat, Board
from dtf.host.waits import Entry, Position

WAIT_S = 10.0
"""Without a sign of life, in a step or at the start, until the places of ranks are compared. After each line that is
written the next one needs twice as long: a model of long steps does not fill the screen."""
LONG_S = 30.0
"""The same for ranks that are all at the same place."""

_WORKING = ("start", "fetch", "step", "log", "evaluate")


class Seen(NamedTuple):
    """What is known of one rank."""

    beat: Beat
    position: Position
    since: float  # its last sign of life


class Finding(NamedTuple):
    """What there is to say, and the rank it is about."""

    text: str
    rank: int
    step: int


class _Wait(NamedTuple):
    """`rank` waits in `entry`; `other` has not entered it."""

    rank: int
    entry: Entry
    other: int


class WaitWatch:
    """Looks at the ranks of a board now and then, and tells `see` once of each wait that is found."""

    def __init__(self, board: Board, see: Callable[[Note], None]) -> None:
        self._board, self._see = board, see
        self._told: object = None
        self._patience = 1.0

    def look(self, ranks: list[int], awake_since: float, now: float) -> Failed | None:
        """The refusal of ranks that are proven to be stuck. Everything else is told."""
        signs = {rank: max(self._board.last_sign(rank), awake_since) for rank in ranks}
        if not signs or now - min(signs.values()) < WAIT_S:
            return None
        seen = {rank: Seen(self._board.read(rank), self._board.position(rank), signs[rank]) for rank in ranks}
        found = stuck(seen, now, WAIT_S)
        if found:
            return Failed(found.rank, found.step, int(Exit.CONFIG), found.text, "")
        found = waiting(seen, now, WAIT_S * self._patience) or long_step(seen, now, LONG_S * self._patience)
        wait = min(signs.values())
        if found and wait != self._told:
            self._told = wait
            self._patience *= 2
            self._see(Note("warning" if len(ranks) > 1 else "info", found.text))
        return None


def stuck(seen: Mapping[int, Seen], now: float, after_s: float) -> Finding | None:
    """Ranks that have been silent for `after_s` and whose entries prove that none of them can go on.

    Either two ranks entered different operations where all enter the same ones, in the same order. Or each of some
    ranks waits, on the host, for the next one, which has not entered the operation. Whoever computes can still enter.
    """
    quiet = {rank: one for rank, one in seen.items() if now - one.since >= after_s and one.beat.phase in _WORKING}
    waits = _different(quiet) or _circle(quiet)
    if not waits:
        return None
    # the rank that is further on left something out
    ahead = max((wait.rank for wait in waits), key=lambda rank: _progress(quiet[rank]))
    waits = sorted(waits, key=lambda wait: wait.rank == ahead)
    parts = [
        f"rank {wait.rank} {_waits(quiet[wait.rank], wait.entry, now)}, rank {wait.other} never entered it"
        for wait in waits
    ]
    advice = next((wait.entry.advice for wait in waits if wait.other == ahead and wait.entry.advice), "")
    advice = advice.format(rank=ahead) or "All ranks have to do the same, in the same order"
    return Finding(f"{'; '.join(parts)}; they never meet. {advice}", ahead, quiet[ahead].beat.step)


def waiting(seen: Mapping[int, Seen], now: float, after_s: float) -> Finding | None:
    """A rank that has waited for `after_s` in an operation that another rank of this host has not entered."""
    for rank, one in sorted(seen.items(), key=lambda item: item[1].since):
        if now - one.since < after_s or not one.position.inside or one.beat.phase not in _WORKING:
            continue
        entry = _last(one)
        missing = [
            other for other in entry.ranks if other in seen and other != rank and not _entered(seen[other], entry)
        ]
        away = [other for other in entry.ranks if other not in seen]
        if missing:
            first = missing[0]
            more = f", nor have {len(missing) - 1} other ranks" if missing[1:] else ""
            text = (
                f"rank {rank} {_waits(one, entry, now)}, rank {first} has not entered it: "
                f"{_where(seen[first], now)}{more}"
            )
            return Finding(text, first, seen[first].beat.step)
        if away:
            text = (
                f"rank {rank} {_waits(one, entry, now)}; all ranks of this host that take part have entered it; "
                f"those of other hosts ({_listed(away)}) are seen there"
            )
            return Finding(text, rank, one.beat.step)
    return None


def long_step(seen: Mapping[int, Seen], now: float, after_s: float) -> Finding | None:
    """All ranks have been in a step, without a sign of life, for `after_s`."""
    if any(one.beat.phase != "step" or now - one.since < after_s for one in seen.values()):
        return None
    last = max(seen.values(), key=lambda one: one.since)
    step, age = last.beat.step, f"{now - last.since:.0f} s"
    places = {rank: _place(one) for rank, one in seen.items()}
    if len(set(places.values())) == 1:
        who = "all ranks are" if len(seen) > 1 else "it is"
        text = f"step {step + 1} takes long: {who} in {places[min(places)]} for {age}"
    else:
        text = f"step {step + 1} takes long: " + "; ".join(
            f"rank {rank} is in {place} for {now - seen[rank].since:.0f} s"
            for rank, place in sorted(places.items())[:8]
        )
    return Finding(text, min(seen), step)


def _different(quiet: Mapping[int, Seen]) -> list[_Wait]:
    """Two ranks whose entries of the same number on a group differ."""
    first: dict[tuple[str, int], tuple[int, Entry]] = {}
    for rank, one in sorted(quiet.items()):
        for entry in one.position.entries:
            if not entry.ordered or not entry.name:
                continue
            other, same = first.setdefault((entry.group, entry.number), (rank, entry))
            if same.name != entry.name and rank in same.ranks:
                return [_Wait(other, same, rank), _Wait(rank, entry, other)]
    return []


def _circle(quiet: Mapping[int, Seen]) -> list[_Wait]:
    """Ranks each of which waits for the next, and the last for the first."""
    waits: dict[int, list[_Wait]] = {}
    for rank, one in quiet.items():
        if one.position.inside and _last(one).group:
            entry = _last(one)
            waits[rank] = [
                _Wait(rank, entry, other)
                for other in entry.ranks
                if other != rank
                and other in quiet
                and quiet[other].position.inside
                and _surely_not(quiet[other], entry)
            ]
    for start in sorted(waits):
        path: list[_Wait] = []
        reached = {start}
        at = start
        while waits.get(at):
            step = next((wait for wait in waits[at] if wait.other in reached), waits[at][0])
            path.append(step)
            if step.other in reached:
                begin = next(i for i, wait in enumerate(path) if wait.rank == step.other)
                return path[begin:]
            reached.add(step.other)
            at = step.other
    return []


def _entered(one: Seen, entry: Entry) -> bool:
    """Whether a rank is known to have entered what another one waits in."""
    return any(own.group == entry.group and own.number >= entry.number for own in one.position.entries)


def _surely_not(one: Seen, entry: Entry) -> bool:
    known = one.position.complete or any(own.group == entry.group for own in one.position.entries)
    return known and not _entered(one, entry)


def _last(one: Seen) -> Entry:
    return one.position.entries[-1] if one.position.entries else Entry("", "", (), 0, False, "", 0)


def _progress(one: Seen) -> tuple[int, int, int]:
    """How far a rank is: step, part of the step, and operation within it."""
    return one.beat.step, one.position.places, _last(one).code


def _waits(one: Seen, entry: Entry, now: float) -> str:
    if not one.position.inside or entry != _last(one):
        return f"entered {entry.name}"
    return f"has waited for {now - one.since:.0f} s in {entry.name or 'an operation'}"


def _place(one: Seen) -> str:
    """Where a rank is in its step."""
    if one.position.inside:
        return _last(one).name or "an operation"
    return one.position.place or f"phase {one.beat.phase}"


def _where(one: Seen, now: float) -> str:
    age, last = f"{now - one.since:.0f} s", _last(one).name
    if one.position.inside:
        return f"it {_waits(one, _last(one), now)}"
    where = (
        f"{one.position.place} of step {one.beat.step + 1}" if one.beat.phase == "step" and one.position.place else ""
    )
    after = f", after {last}" if last else ""
    return f"it is in {where or f'phase {one.beat.phase}'} for {age}{after}"


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
