"""Who waits for whom: what ranks write is what the launching process reads, and what it concludes from that is true.

The law: only ranks that can never go on are refused; a rank that computes is named as the one the others wait for, and
ranks at one place are not accused.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import starmap

import pytest

from dtf.host import heartbeat
from dtf.host import waits as memory
from dtf.host.heartbeat import Beat, Board
from dtf.host.waits import RING, Entry, Operation, Position, Use, group_of, operation
from dtf.launch.waits import Seen, WaitWatch, long_step, stuck, waiting

NOW = 1000.0
ADVICE = "Rank {rank} leaves it out."


def gather(name: str, number: int, group: str = "shards 0,1", ranks: tuple[int, ...] = (0, 1)) -> Entry:
    return Entry(f"the all-gather of {name}", group, ranks, number, True, places=1)


def uses(name: str, places: int = 1) -> Entry:
    return Entry(name, "", (), 0, False, True, f"{name}: {ADVICE}", places)


def at(
    *entries: Entry, inside: bool = True, quiet_s: float = 20.0, phase: str = "step", place: str = "forward"
) -> Seen:
    return Seen(Beat(NOW - 100, phase, 4, 5), Position(NOW, entries, inside, place, 1), NOW - quiet_s)


def test_ranks_in_different_operations_are_refused_and_the_unused_module_is_named() -> None:
    seen = {
        0: at(uses("a"), gather("a", 1), gather("c", 2)),
        1: at(uses("a"), gather("a", 1), uses("b"), gather("b", 2)),
    }
    found = stuck(seen, NOW, 10)
    assert found and (found.rank, found.step) == (0, 4)
    assert found.text == (
        "rank 1 has waited for 20 s in the all-gather of b, which rank 0 has not entered; rank 0 has waited for 20 s "
        "in the all-gather of c, which rank 1 has not entered. They never meet. b: Rank 0 leaves it out."
    )


def test_the_rank_that_went_past_a_module_is_named_not_the_one_that_may_still_come_to_another() -> None:
    """Both left the start together. Rank 1 is at the last module, or in its backward pass, without the one before."""
    before = [uses("a", 0), uses("b", 0), uses("last", 0)]
    for place, places in (("forward", 1), ("backward", 2)):
        seen = {
            0: at(*before, uses("a"), gather("a", 1), uses("b"), gather("b", 2)),
            1: at(*before, uses("a"), gather("a", 1), uses("last"), gather("last", 2), place=place),
        }
        seen[1] = seen[1]._replace(position=seen[1].position._replace(places=places))
        found = stuck(seen, NOW, 10)
        assert found and found.rank == 1 and found.text.endswith("b: Rank 1 leaves it out.")


def test_operations_left_long_ago_prove_it_too() -> None:
    """On a GPU the host goes on while the device waits."""
    seen = {0: at(gather("c", 2), gather("d", 3), inside=False), 1: at(gather("b", 2), gather("c", 3), inside=False)}
    found = stuck(seen, NOW, 10)
    assert found and "rank 0 entered the all-gather of c, which rank 1 has not entered" in found.text


def test_ranks_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    seen = {rank: at(gather("x", 1, f"pair {rank}", (rank, (rank + 1) % 3))) for rank in range(3)}
    found = stuck(seen, NOW, 10)
    assert found and all(f"which rank {rank} has not entered" in found.text for rank in range(3))


@pytest.mark.parametrize(
    ("zero", "why"),
    [
        (at(gather("a", 1), inside=False), "it computes, and may enter"),
        (at(gather("a", 1), gather("b", 2)), "they are at one place"),
        (at(gather("a", 1), gather("c", 2), quiet_s=1), "it is moving"),
        (at(gather("a", 1), gather("w", 1, "alone", (0,))), "whom it waits for is not rank 1"),
        (at(gather("a", 1), gather("w", 1, "channel 0,1")), "rank 1 has entered what it waits in"),
        (at(gather("a", 1), gather("c", 2)._replace(ordered=False)), "the two ends of a message have different names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_proof_nobody_is_refused(zero: Seen, why: str) -> None:
    one = at(gather("w", 1, "channel 0,1"), gather("a", 1), gather("b", 2))
    assert stuck({0: zero, 1: one}, NOW, 10) is None, why


def test_a_slow_rank_is_named_with_what_it_does() -> None:
    seen = {0: at(gather("a", 1), uses("a"), inside=False, quiet_s=40), 1: at(gather("a", 1), gather("b", 2))}
    found = waiting(seen, NOW, 10)
    assert found and found.text == (
        "rank 1 has waited for 20 s in the all-gather of b, rank 0 has not entered it: it has been in a, in forward of "
        "step 5 for 40 s"
    )
    assert waiting(seen, NOW, 30) is None, "not yet"


def test_a_rank_that_still_starts_is_named() -> None:
    seen = {0: at(inside=False, phase="start", place=""), 1: at(gather("b", 1), phase="start", place="")}
    found = waiting(seen, NOW, 10)
    assert found and "rank 0 has not entered it: it has been in phase start for 20 s" in found.text


def test_ranks_of_other_hosts_are_not_accused() -> None:
    entry = gather("b", 1, "shards", (0, 1, 2, 3))
    found = waiting({0: at(entry), 1: at(entry)}, NOW, 10)
    assert found and "all ranks of this host that take part have entered it" in found.text
    assert "those of other hosts (ranks 2 to 3) are seen there" in found.text


def test_ranks_at_one_place_take_long() -> None:
    seen = {rank: at(gather("b", 1), inside=False, quiet_s=31 + rank, place="backward") for rank in range(2)}
    assert waiting(seen, NOW, 10) is None and stuck(seen, NOW, 10) is None
    found = long_step(seen, NOW, 30)
    assert found and found.text == "step 5 takes long: all ranks are in backward for 31 s"
    assert long_step(seen, NOW, 40) is None
    seen[0] = seen[0]._replace(position=seen[0].position._replace(place="optimizer"))
    found = long_step(seen, NOW, 30)
    assert found and found.text == "step 5 takes long: rank 0 is in optimizer for 31 s; rank 1 is in backward for 32 s"


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch):
    for module, name in ((heartbeat, "_cell"), (memory, "_numbers"), (memory, "_names")):
        monkeypatch.setattr(module, name, getattr(module, name))
    # the names of all models that earlier tests made in this process may be more than there is room for
    monkeypatch.setattr(memory, "_lines", [])
    monkeypatch.setattr(memory, "_place_code", cache(memory._place_code.__wrapped__))
    made = Board(2)
    yield made
    made.close()


def test_a_start_of_many_signs_of_life_gets_lines_too(board: Board) -> None:
    said: list[str] = []
    watch = WaitWatch(board, lambda note: said.append(note.text))
    begun = board.read(0).at
    for second in range(0, 65, 5):  # a rank that has just given a sign of life
        assert watch.look([0, 1], begun + second, begun + second) is None
    what = "libraries are loaded, models are built, and tried on a few rows"
    assert said == [
        f"the start takes long: ranks 0 to 1 in phase start after {seconds} s; {what}" for seconds in (30, 60)
    ]


def test_a_board_shows_what_another_process_entered(board: Board) -> None:
    before = Operation("defined before the rank had a place", group_of("early", (0, 1)))
    if (child := os.fork()) == 0:
        heartbeat.attach(board.fd, 1)
        memory.place("forward")
        with before:
            pass
        Use("layer", ADVICE)()
        sums = operation("a sum", group_of("all", (0, 1)))
        for _ in range(RING):
            with sums:
                pass
        sums.__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    seen = board.position(1)
    assert (seen.inside, seen.place, seen.places, seen.complete) == (True, "forward", 1, False)
    assert len(seen.entries) == RING
    assert seen.entries[-1] == Entry("a sum", "all 0,1", (0, 1), RING + 1, True, places=1)
    assert [entry.number for entry in seen.entries] == [*range(2, RING + 2)]
    assert board.last_sign(1) == max(seen.at, board.read(1).at) and board.position(0) == Position()
    board.reset(1)
    assert board.position(1) == Position(), "a new process of the rank begins anew"


def test_the_first_entries_are_all_there(board: Board) -> None:
    heartbeat.attach(board.fd, 0)
    one = Operation("one", group_of("first", (0, 1)))
    with one:
        Use("layer", ADVICE)()
    seen = board.position(0)
    assert [*starmap(lambda name, *_: name, seen.entries)] == ["one", "layer"]
    assert seen.complete and not seen.inside and seen.entries[1].used and seen.entries[1].advice == ADVICE


def test_without_room_for_names_entries_are_nameless(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat.attach(board.fd, 0)
    Operation("first", group_of("long", (0, 1)))
    with Operation("x" * (1 << 18), group_of("long", (0, 1))), Operation("later", group_of("later", (0, 1))):
        seen = board.position(0)
    assert [entry.name for entry in seen.entries] == ["", ""] and seen.inside
