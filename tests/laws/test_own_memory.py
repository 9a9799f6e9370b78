"""Parameters that a model reaches past the module that owns them: refused by name where they would go stale."""

from __future__ import annotations

from typing import Any

import pytest

from dtf.config.settings import load_parts
from tests.support.harness import difference, reference, spread

load_parts([])


def case(kind: str) -> dict[str, Any]:
    recipe = {"name": "passes", "kind": kind}
    return {"plugin": "tests.support.author_passes", "recipe": recipe, "precision": "fp32"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("listed", "the parameter mid.weight is also kept in the attribute kept"),
        ("closure", "the parameter mid.weight is also kept in the attribute kept"),
        ("penalty", "the parameter first.weight is also kept in the attribute kept"),
        ("alias", "mid.weight and kept share memory"),
    ],
)
def test_a_parameter_that_is_kept_elsewhere_is_refused_under_fsdp(kind: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        spread("fsdp", 2, **case(kind))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ddp", {"shard_optimizer": True}), ("fsdp", {}), ("pipeline", {}), ("pserver", {})],
    ids=str,
)
def test_two_parameters_of_one_memory_are_refused(strategy: str, options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="mid.weight and other.weight share memory without being one parameter"):
        spread(strategy, 2, options=options, **case("tied_data"))


def test_ddp_keeps_the_memory_of_two_parameters() -> None:
    assert difference(spread("ddp", 1, **case("tied_data")), spread("ddp", 2, **case("tied_data"))) < 1e-5


@pytest.mark.parametrize(("strategy", "options"), [("fsdp", {}), ("fsdp", {"unit": "layer"}), ("zero1", {})], ids=str)
def test_a_layer_that_moves_its_weights_learns(strategy: str, options: dict[str, Any]) -> None:
    """torch's recurrent layers do on CUDA, whenever they meet new weights."""
    recurrent = {"plugin": "tests.support.recurrent_toy", "recipe": {"name": "recurrent"}, "steps": 4}
    assert difference(reference(**recurrent), spread(strategy, 2, options=options, **recurrent)) < 1e-10
