"""What an author's forward pass does by itself gives the same numbers under every strategy that divides rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from dtf.config.settings import load_parts
from tests.support.arrays import plain, seldom
from tests.support.harness import difference, reference, spread, variants

PLUGIN = "tests.support.author_passes"
load_parts([])


@pytest.mark.parametrize(
    ("strategy", "kind"),
    seldom(
        [*product(["ddp", "fsdp", "pserver"], ["reentrant", "vmap"])],
        lambda strategy, kind: (strategy == "ddp") == (kind == "reentrant") and strategy != "pserver",
    ),
)
def test_every_strategy_follows_the_reference(strategy: str, kind: str) -> None:
    """On three ranks some have a micro-batch less: under fsdp these make a pass over padding."""
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": kind}}
    assert difference(reference(**case), spread(strategy, 3, **case)) < 1e-10


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.slow)])
def test_hooks_of_a_parameter_that_a_pass_does_not_use_are_not_called(strategy: str) -> None:
    """As in plain torch: a sum over ranks comes to it all the same."""
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": "unused"}, "steps": 1}
    assert difference(reference(**case), spread(strategy, 2, **case)) < 1e-10


@pytest.mark.parametrize(
    ("strategy", "largest"),
    seldom(
        [*product(["dp", "ddp", "fsdp", "pserver"], [2.0, 100.0])],
        lambda strategy, largest: strategy == "ddp" or ((strategy == "dp") == (largest == 2.0) and strategy != "fsdp"),
    ),
)
def test_a_parameter_that_a_pass_changes_is_refused_by_name(strategy: str, largest: float) -> None:
    """Through `.data`, which leaves no trace but the values; also where these stay as they are for now."""
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": "bounded", "largest": largest}}
    with pytest.raises(AssertionError, match="the forward pass changes the parameter scale, which each rank"):
        spread(strategy, 2, **case)


def test_trial_passes_leave_such_a_parameter_as_it_was() -> None:
    """On one process, which may train such a model."""
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": "bounded"}}
    assert spread("ddp", 1, **case, steps=0)["tensors"]["model/scale"] == [3.0] * 4


def added(**more: Any) -> dict[str, Any]:
    return {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": "adds"}, **more}


@pytest.mark.parametrize(("strategy", "processes"), [("fsdp", 3), pytest.param("ddp", 5, marks=pytest.mark.slow)])
def test_a_gradient_that_padding_has_too_is_refused(strategy: str, processes: int) -> None:
    """Four micro-batches leave one of five ranks with padding; under fsdp two of three make a pass over it."""
    with pytest.raises(AssertionError, match="the gradient of 0.weight is not zero where the loss is zero"):
        spread(strategy, processes, steps=1, **added())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_padding_of_the_last_batch_alone_is_refused_when_it_comes(strategy: str) -> None:
    """The third batch has four rows, one micro-batch."""
    two = added(steps=2)
    assert difference(reference(**two), spread(strategy, 2, **two)) < 1e-10
    with pytest.raises(AssertionError, match="the gradient of 0.weight is not zero where the loss is zero"):
        spread(strategy, 2, **added(steps=3))


def sharing(place: str) -> dict[str, Any]:
    return {"plugin": "tests.support.sharing_model", "recipe": {"name": "sharing", "place": place}}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["module", pytest.param("recipe", marks=pytest.mark.slow)])
def test_replicas_that_share_a_place_compute_in_turn(place: str) -> None:
    assert difference(reference(**sharing(place)), spread("dp", 2, **sharing(place))) < 1e-10


def test_threads_that_share_a_place_are_refused() -> None:
    options = {"servers": 1, "mode": "async", "staleness": 4, "hogwild_threads": 2}
    with pytest.raises(AssertionError, match=r"strategy\.hogwild_threads=2: passes change .*_GATES, which all threads"):
        spread("pserver", 1, options=options, **sharing("module"))


def outside(kind: str) -> dict[str, Any]:
    return {"plugin": "tests.support.outside_model", "recipe": {"name": "outside", "kind": kind}}


@pytest.mark.parametrize(("strategy", "options"), plain(variants()))
@pytest.mark.parametrize(
    ("kind", "name"), [("criterion", r"recipe.scales\['log'\].weight"), ("listed", r"0.held\[0\].")]
)
def test_what_nothing_would_update_is_refused(strategy: str, options: dict, kind: str, name: str) -> None:
    with pytest.raises(AssertionError, match=f"the loss depends on {name}"):
        spread(strategy, 2, options=options, **outside(kind))


@pytest.mark.parametrize("kind", ["criterion", "listed"])
def test_so_it_is_on_one_process(kind: str) -> None:
    with pytest.raises(AssertionError, match="is no parameter of the model"):
        spread("ddp", 1, **outside(kind))


@pytest.mark.parametrize(
    ("strategy", "kind"),
    seldom(
        [*product(["ddp", "fsdp"], ["teacher", "inputs"])],
        lambda strategy, kind: (strategy == "ddp") == (kind == "teacher"),
    ),
)
def test_what_learns_nothing_may_be_held_anywhere(strategy: str, kind: str) -> None:
    assert difference(reference(**outside(kind)), spread(strategy, 2, **outside(kind))) < 1e-10


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pserver"])
def test_a_parameter_that_gets_other_memory_is_refused_on_one_process_too(strategy: str) -> None:
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": "moved"}}
    with pytest.raises(AssertionError, match="the forward pass gives the parameter layer.weight other memory"):
        spread(strategy, 1, **case)


def test_two_pipelines_refuse_a_hook_on_sums() -> None:
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": "on_sums"}}
    with pytest.raises(AssertionError, match="0.weight has a hook of register_post_accumulate_grad_hook"):
        spread("pipeline", 4, options={"degree": 2}, **case)


@pytest.mark.parametrize(
    ("strategy", "kind", "words"),
    [
        ("pipeline", "root_hook", "the whole model has forward_hooks, and no stage is the whole model"),
        ("tensor", "hooked", "splits 0, and 0.weight has a hook of register_hook, which would see a slice"),
        ("tensor", "held", r"the parameter 0.weight is kept in 7.kept\[0\] too"),
        ("pipeline", "held", r"the parameter 0.weight is kept in 7.kept\[0\] too"),
    ],
)
def test_what_a_divided_model_would_not_do_is_refused(strategy: str, kind: str, words: str) -> None:
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": kind}}
    with pytest.raises(AssertionError, match=words):
        spread(strategy, 2, **case)


@pytest.mark.parametrize("kind", ["root_hook", "hooked", "held"])
def test_strategies_that_divide_no_model_do_it(kind: str) -> None:
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": kind}}
    assert difference(reference(**case), spread("ddp", 2, **case)) < 1e-10
