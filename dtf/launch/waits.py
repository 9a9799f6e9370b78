"""Who waits for whom among the ranks of this host, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dtf.core.errors import ConfigError, Exit, NeverMeetError
from dtf.core.types import Failed, Note
from dtf.host.heartbeat import Beat, Board
from dtf.host.waits import RING, Entry, Position
from dtf.launch.exit_cause import GroupResult

WAIT_S = 10.0
"""Without a sign of life, in a step or at the start, until the places of ranks are compared. After each line that is
written the next one needs twice as long: a model of long steps does not fill the screen."""
LONG_S = 30.0
"""The same for ranks that are all at the same place."""
_SURE_S = 1.0
"""Between seeing that entries differ and the refusal: a rank that fails may say so meanwhile."""
_LOOK = 64
"""Entries of each rank that are compared all the time."""

_WORKING = ("start", "fetch", "step", "log", "evaluate")


class Seen(NamedTuple):
    """What is known of one rank."""

    beat: Beat
    position: Position
    since: float  # its last sign of life


class Finding(NamedTuple):
    """What there is to say, and the rank it is about. `error`: the name of a class, for a refusal."""

    text: str
    rank: int
    step: int
    error: str = ""


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
        self._patience = {True: 1.0, False: 1.0}  # at the start, and later
        self._different_since = 0.0
        self._started_at, self._start_patience = 0.0, 1.0

    def look(self, ranks: list[int], awake_since: float, now: float) -> Failed | None:
        """The refusal of ranks that are proven never to meet. Everything else is told."""
        self._tell_of_start(ranks, now)
        signs = {rank: max(self._board.last_sign(rank), awake_since) for rank in ranks}
        differing = self._differ(signs, now) if len(ranks) > 1 else []
        if not differing and (not signs or now - min(signs.values()) < WAIT_S):
            return None
        seen = {rank: self._seen(rank, signs) for rank in ranks}
        found = _refusal(seen, differing, now) if differing else stuck(seen, now, WAIT_S)
        if found:
            return _failed(found)
        self._tell(seen, now)
        return None

    def _tell_of_start(self, ranks: list[int], now: float) -> None:
        """A line for a start of many short parts, each of which is a sign of life."""
        starting = [rank for rank in ranks if self._board.read(rank).phase == "start"]
        if not starting:
            self._started_at, self._start_patience = 0.0, 1.0
        elif not self._started_at:
            self._started_at = now
        elif now - self._started_at >= LONG_S * self._start_patience:
            self._start_patience *= 2
            first = self._seen(starting[0], {})
            text = f"the start takes long: {_listed(starting)} in {_place(first)} after {now - self._started_at:.0f} s"
            why = "; libraries are loaded, models are built, and tried on a few rows"
            self._see(Note("info", text if first.position.inside else f"{text}{why}"))

    def _tell(self, seen: Mapping[int, Seen], now: float) -> None:
        starting = any(one.beat.phase == "start" for one in seen.values())
        patience, oldest = self._patience[starting], min(one.since for one in seen.values())
        wait = waiting(seen, now, WAIT_S * patience)
        found = wait or long_step(seen, now, LONG_S * patience)
        if found and oldest != self._told:
            self._told = oldest
            self._patience[starting] *= 2
            self._see(Note("warning" if wait else "info", found.text))

    def explain(self, result: GroupResult, ranks: list[int]) -> GroupResult:
        """The result of ranks that have all ended: a refusal instead of a lost connection or a crash, where ranks had
        entered different operations. With some backends that ends a rank at once.
        """
        if result.cause is None or not (result.external or "gloo" in result.cause.message):
            return result
        seen = {rank: self._seen(rank, {}) for rank in ranks}
        waits = _different(seen)
        if not waits:
            return result
        found = _refusal(seen, waits, 0.0)
        cause = _failed(found._replace(text=f"{found.text}; then: {result.cause.message}"))
        return GroupResult(Exit.CONFIG, cause)

    def _seen(self, rank: int, signs: Mapping[int, float], last: int = RING) -> Seen:
        return Seen(self._board.read(rank), self._board.position(rank, last), signs.get(rank, 0.0))

    def _differ(self, signs: Mapping[int, float], now: float) -> list[_Wait]:
        """Two ranks that enter different operations, at this look and for at least a second."""
        waits = _different({rank: self._seen(rank, signs, _LOOK) for rank in signs})
        if not waits:
            self._different_since = 0.0
        elif not self._different_since:
            self._different_since = now
        return waits if waits and now - self._different_since >= _SURE_S else []


def _failed(found: Finding) -> Failed:
    return Failed(found.rank, found.step, int(Exit.CONFIG), found.text, "", error=found.error)


def stuck(seen: Mapping[int, Seen], now: float, after_s: float) -> Finding | None:
    """Ranks that have been silent for `after_s` and whose entries prove that none of them can go on.

    Either two ranks entered different operations where all enter the same ones, in the same order. Or each of some
    ranks waits, on the host, for the next one, which has not entered the operation. Whoever computes can still enter.
    """
    quiet = {rank: one for rank, one in seen.items() if now - one.since >= after_s and one.beat.phase in _WORKING}
    waits = _different(quiet) or _circle(quiet)
    return _refusal(quiet, waits, now) if waits else None


def _refusal(seen: Mapping[int, Seen], waits: list[_Wait], now: float) -> Finding:
    """That ranks never meet, and why."""
    strayed, advice = _unused(seen, [wait.rank for wait in waits])
    parts = [
        f"rank {wait.rank} {_waits(seen[wait.rank], wait.entry, now)}, which rank {wait.other} has not entered"
        for wait in sorted(waits, key=lambda wait: wait.rank == strayed)
    ]
    text = f"{'; '.join(parts)}. They never meet. {advice or 'All ranks have to do the same, in the same order'}"
    error = ConfigError if advice else NeverMeetError
    return Finding(text, strayed, seen[strayed].beat.step, error.__name__)


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
    return one.position.entries[-1] if one.position.entries else Entry("", "", (), 0, False)


def _unused(seen: Mapping[int, Seen], ranks: list[int]) -> tuple[int, str]:
    """One of these ranks that has not used a module, in this pass, that another one has; and the advice for it.

    One that has finished its forward pass comes before one that may still come to the module. Of modules the one that
    earlier passes used first. Without such a module: the rank with the fewest finished steps, and no advice.
    """
    used, order = {rank: _used(seen[rank]) for rank in ranks}, dict[str, int]()
    for rank in ranks:
        for entry in seen[rank].position.entries:
            order.setdefault(entry.name, len(order))
    found = [
        (seen[rank].position.place == "forward", order[name], rank, advice)
        for rank in ranks
        for other in ranks
        for name, advice in used[other].items()
        if name not in used[rank]
    ]
    if found:
        _, _, rank, advice = min(found)
        return rank, advice.format(rank=rank)
    return min(ranks, key=lambda rank: (seen[rank].beat.step, rank)), ""


def _used(one: Seen) -> dict[str, str]:
    """The modules that a rank has used since its last forward pass began, with the advice for each."""
    position = one.position
    first = position.places - {"forward": 0, "backward": 1}.get(position.place, 2)
    return {entry.name: entry.advice for entry in position.entries if entry.used and entry.places >= first}


def _waits(one: Seen, entry: Entry, now: float) -> str:
    if not now or not one.position.inside or entry != _last(one):
        return f"entered {entry.name}"
    return f"has waited for {now - one.since:.0f} s in {entry.name or 'an operation'}"


def _place(one: Seen) -> str:
    """Where a rank is in its step."""
    if one.position.inside:
        return _last(one).name or "an operation"
    return one.position.place or f"phase {one.beat.phase}"


def _where(one: Seen, now: float) -> str:
    last = _last(one)
    if one.position.inside:
        return f"it {_waits(one, last, now)}"
    where = f"phase {one.beat.phase}"
    if one.position.place and one.beat.phase in ("start", "step"):
        where = one.position.place + (f" of step {one.beat.step + 1}" if one.beat.phase == "step" else "")
    module = f"in {last.name}, " if last.used else ""
    after = f", after {last.name}" if last.name and not last.used else ""
    return f"it has been {module}in {where} for {now - one.since:.0f} s{after}"


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
