"""Buffers that the forward pass changes: the same numbers by a rule, or refused by name before an update."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.support.arrays import crossed, seldom
from tests.support.changing_model import RULES
from tests.support.harness import difference, reference, spread, variants

PLUGIN = "tests.support.changing_model"
KNOWN = ("spectral", "siamese", "still", "momentum")
DIVIDING = [pair for pair in variants() if pair[0] != "tensor"]
"""tensor needs splits."""
TURNS = ["siamese", None, None, "skipped", None]
"""What each of those with options meets by default, in turn."""


def case(kind: str, **more: object) -> dict:
    recipe = {"name": "changing", "kind": kind, **{k: v for k, v in more.items() if k in ("declared", "pattern")}}
    return {"plugin": PLUGIN, "recipe": recipe, **{k: v for k, v in more.items() if k not in recipe}}


@pytest.mark.parametrize(("strategy", "options", "kind"), crossed(DIVIDING, [*RULES, *KNOWN], turns=TURNS, each=1))
def test_every_strategy_follows_the_reference(strategy: str, options: dict, kind: str) -> None:
    if kind == "skipped" and (options.get("static_graph") or options.get("balance") == "flops"):
        return  # both are promises that the rows decide nothing
    several = strategy != "pipeline" and kind in ("average", "siamese")
    run = spread(strategy, 3 if several else 2, options=options, **case(kind))
    assert difference(reference(**case(kind)), run) < 1e-10


@pytest.mark.parametrize(
    "kind",
    ["average", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("siamese", "rows", "still", "momentum"))],
)
def test_two_pipelines(kind: str) -> None:
    run = spread("pipeline", 4, options={"degree": 2}, **case(kind))
    assert difference(reference(**case(kind)), run) < 1e-10


def test_what_a_backward_pass_computes_again_changes_the_buffers_of_its_micro_batch() -> None:
    assert difference(reference(**case("again")), spread("pipeline", 2, **case("again"))) < 1e-10


@pytest.mark.parametrize("rows", [4, 10])
def test_a_layer_that_some_ranks_do_not_use(rows: int) -> None:
    """In the only pass of a step, and in one of several: other ranks wait for the gradients of its parameters."""
    skipped = case("skipped", micro_batch_rows=rows, steps=6)
    assert difference(reference(**skipped), spread("ddp", 2, **skipped)) < 1e-10


@pytest.mark.parametrize(("kind", "remat"), [("siamese", "blocks"), ("skipped", "selective")])
def test_with_blocks_that_are_computed_again(kind: str, remat: str) -> None:
    run = spread("ddp", 3, **case(kind, remat=remat))
    assert difference(reference(**case(kind)), run) < 1e-10


@pytest.mark.parametrize(
    ("strategy", "kind"),
    seldom(
        [*product(["dp", "ddp", "fsdp", "pserver"], ["average", "rows", "passes", "cache", "own"])],
        lambda strategy, kind: strategy == "ddp" or kind == "own",
    ),
)
def test_a_change_without_a_rule_is_refused_by_name(strategy: str, kind: str) -> None:
    name = {"average": "level", "rows": "seen", "passes": "passes", "cache": "cache", "own": "norm.running_mean"}[kind]
    with pytest.raises(AssertionError, match=f"the forward pass changes the buffer inner.{name}, which each rank") as e:
        spread(strategy, 2, **case(kind, declared=False))
    assert f"Layout(buffers={{'inner.{name.split('.')[0]}': BufferUpdate.mean}})" in str(e.value)


def test_layers_that_share_running_averages_are_refused_by_name() -> None:
    words = "the normalisations inner.norm and inner.other share the buffer inner.norm.running_mean"
    with pytest.raises(AssertionError, match=words):
        spread("ddp", 1, **case("shared"))


def test_a_layer_in_evaluation_mode_keeps_its_averages() -> None:
    for tensors in (reference(**case("still"))["tensors"], spread("ddp", 3, **case("still"))["tensors"]):
        assert tensors["model/inner.norm.running_mean"] == [0.0] * 12
        assert tensors["model/inner.norm.running_var"] == [1.0] * 12


def test_a_change_that_only_some_batches_make_is_refused_before_that_update() -> None:
    """The first rows do not make it."""
    with pytest.raises(AssertionError, match="the forward pass changes the buffer inner.level, which each rank"):
        spread("ddp", 2, **case("late"))


def test_a_call_that_only_some_batches_leave_out_is_refused() -> None:
    with pytest.raises(AssertionError, match="the normalisation inner.norm is called unevenly: "):
        spread("ddp", 2, **case("skipped", declared=False))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("inner.lvel", "names the buffers 'inner.lvel', and its model has none of that name; did you mean inner.level")],
)
def test_a_rule_for_no_buffer_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        spread("ddp", 2, **case("average", pattern=pattern))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "async"}, "with strategy.mode=async no two trainers start from the same; use sync"),
        ({"record": "order"}, "strategy.record writes no order of them; leave it out"),
        ({"team": 2}, r"the processes of a trainer \(strategy.team=2\) do not exchange it; use more trainers"),
    ],
)
def test_servers_take_rules_in_step_alone(
    options: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # of strategy.record
    with pytest.raises(AssertionError, match=f"the forward pass changes the buffer inner.level, and {words}"):
        spread("pserver", 2, options=options, **case("average"))


def test_a_buffer_with_a_rule_that_no_checkpoint_holds_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"the buffer inner.cache the rule mean, and it has persistent=False: a "):
        spread("ddp", 2, **case("cache", pattern="inner.cache"))


def test_a_buffer_that_has_grown_is_not_taken_in_part(tmp_path: Path) -> None:
    """A part of it would fit into what the constructor makes."""
    spread("ddp", 1, folder=str(tmp_path), save_every=1, halt=True, **case("grows"))
    with pytest.raises(AssertionError, match=r"inner.rows has shape \(\d+, 12\), and this run's has \(0, 12\)"):
        spread("ddp", 1, start=str(tmp_path / "step_000001"), **case("grows"))
