"""What `Strategy.setup` returned is refused on all ranks unless they read each share of a batch once."""

from __future__ import annotations

from typing import Any

import pytest

from dtf.api.leased_work import LeasedWork
from dtf.core.errors import ConfigError
from dtf.core.types import Place, Shard
from dtf.distributed.world import World
from dtf.engine.program_check import check_program
from tests.laws.test_loop import FakeProgram


class Ranks(World):
    """Rank 0 of some ranks, with what the others said."""

    def __init__(self, others: list[Any]) -> None:
        super().__init__(Place(size=1 + len(others)))
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def broadcast(self, value: Any) -> Any:
        return value


def program(**fields: Any) -> FakeProgram:
    made = FakeProgram()
    vars(made).update({"shard": Shard(0, 2), "shares": 2, "micro_batch_rows": 4} | fields)
    return made


def others(*shards: list[int] | None) -> Ranks:
    counts = {"shares": 2, "micro_batch_rows": 4}
    return Ranks([["", shard, counts if shard else counts | {"leased": False}] for shard in shards])


@pytest.mark.parametrize(
    ("shard", "rest"),
    [
        (Shard(0, 2), [[1, 2]]),
        (Shard(1, 2), [[0, 2]]),
        (Shard(0, 2), [None, [1, 2], None]),
        (Shard(0, 1), []),
        (Shard(0, 1), [None]),
    ],
)
def test_shares_that_are_read_once_are_taken(shard: Shard | None, rest: list[list[int] | None]) -> None:
    right = program(shard=shard)
    assert check_program(right, "mine", others(*rest)) is right


@pytest.mark.parametrize(
    ("fields", "rest", "words"),
    [
        ({"shard": Shard(0, 1)}, [[0, 1]], "ranks 0 and 1 both read share 0 of 1 of the rows, which would count twice"),
        ({}, [None, None], "no rank reads share 1 of 2"),
        ({"shard": None}, [None], "no rank reads rows: the shard of each program is None"),
        ({"shares": 3}, [[1, 2]], "the program's shares is 3 on rank 0 and 2 on rank 1"),
        ({"micro_batch_rows": 8}, [[1, 2]], "the program's micro_batch_rows is 8 on rank 0 and 4 on rank 1"),
        ({}, [[1, 3]], "rank 0 reads one of 2 shares of the rows, and rank 1 one of 3"),
        ({"shard": Shard(2, 2)}, [[1, 2]], "rank 0, the program's shard is 2 of 2; the index is counted from 0"),
        ({"shard": (0, 2)}, [[1, 2]], r"shard is \(0, 2\); it must be a dtf.Shard\(index, count\), or None"),
        ({"shard": Shard(True, 2)}, [[1, 2]], "it must be a dtf.Shard"),
        ({"shares": 2.0}, [[1, 2]], "shares is 2.0; it must be an int of at least 1"),
        ({"micro_batch_rows": 0}, [[1, 2]], "micro_batch_rows is 0; it must be an int"),
    ],
)
def test_others_are_refused(fields: dict[str, Any], rest: list[list[int] | None], words: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy=mine: .*{words}"):
        check_program(program(**fields), "mine", others(*rest))


def test_what_a_program_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="strategy=mine: the program has no shares; set it before"):
        check_program(FakeProgram(), "mine", World(Place()))
    with pytest.raises(ConfigError, match="returned a NoneType; it must return a dtf.Program"):
        check_program(None, "mine", World(Place()))


def test_a_rank_says_what_is_wrong_on_another_one() -> None:
    with pytest.raises(ConfigError, match="strategy=mine: on rank 1, the program has no shard"):
        check_program(program(), "mine", Ranks([["the program has no shard", None, {}]]))


def test_where_other_processes_compute_no_rank_reads() -> None:
    class Servers(LeasedWork):
        """They wait for trainers."""

    right = program(shard=None, leased=Servers())
    assert check_program(right, "mine", others(None)) is right


def test_what_a_program_has_of_other_processes_is_a_leased_work() -> None:
    with pytest.raises(ConfigError, match="the program's leased is None; it must be a dtf.LeasedWork, or be left out"):
        check_program(program(leased=None), "mine", others([1, 2]))


def test_a_backend_that_torch_does_not_have_is_refused_before_ranks_meet() -> None:
    for backend in ("glooo", "cpu:gloo,cuda:ncc"):
        with pytest.raises(ConfigError, match=r"communication\(\) names the backend '(glooo|ncc)', which torch"):
            World.join(Place(size=2, store="127.0.0.1:1"), backend)
