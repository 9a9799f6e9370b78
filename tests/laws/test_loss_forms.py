"""A loss may be sums with counts, or a scalar mean: there is one denominator, whatever the micro-batches and ranks."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from tests.support.arrays import crossed, seldom
from tests.support.harness import BATCH, difference, meshes, reference, spread, variants
from tests.support.loss_toy import LossForms

PLUGIN = "tests.support.loss_toy"


def case(form: str, **more: object) -> dict:
    return {"plugin": PLUGIN, "recipe": {"name": "losses", "form": form}, **more}


@pytest.mark.parametrize(
    ("strategy", "options", "form"), crossed(variants(), ["pair", "labels"], each=1, programs=True)
)
def test_every_strategy_follows_the_reference(strategy: str, options: dict, form: str) -> None:
    run = spread(strategy, 3 if form == "pair" else 2, options=options, **case(form))
    assert difference(reference(**case(form)), run) < 1e-10


@pytest.mark.parametrize(
    ("strategy", "options"),
    seldom(
        [*meshes(), ("mesh", {"pipeline": 2, "tensor": 2})],
        lambda strategy, options: strategy == "pipeline" or {"pipeline", "tensor"} <= options.keys(),
    ),
)
def test_combined_with_each_other(strategy: str, options: dict) -> None:
    assert difference(reference(**case("pair")), spread(strategy, 4, options=options, **case("pair"))) < 1e-10


@pytest.mark.parametrize("form", ["single", "rows"])
def test_other_forms(form: str) -> None:
    assert difference(reference(**case(form)), spread("ddp", 2, **case(form))) < 1e-10


@pytest.mark.parametrize(
    ("trainers", "options"),
    [
        pytest.param(1, {}, id="one-trainer"),
        pytest.param(2, {"mode": "half_async", "staleness": 0}, id="half-async-in-step"),
        pytest.param(1, {"mode": "async", "staleness": 0}, id="async-alone"),
        pytest.param(1, {"mode": "geo", "geo_steps": 1, "staleness": 0}, id="geo-alone"),
        pytest.param(4, {"team": 2}, id="teams"),
    ],
)
def test_parameter_servers_know_the_counts_of_all_trainers(trainers: int, options: dict) -> None:
    expected, found = reference(**case("pair")), spread("pserver", trainers, options=options, **case("pair"))
    if "mode" in options:  # the order of arrival, and steps of the metrics, which come later there
        found |= {name: expected[name] for name in ("train", "ids")}
    assert difference(expected, found) < 1e-10


@pytest.mark.parametrize(
    ("strategy", "options", "form", "labelled"),
    seldom(
        [(*each, *labels) for each, labels in product(variants(), [("pair", 0), ("masked", 0), ("masked", 6)])],
        lambda strategy, options, form, labelled: (
            not options
            and (strategy, form, labelled) in (("ddp", "pair", 0), ("pipeline", "masked", 0), ("pserver", "masked", 6))
        ),
    ),
)
def test_a_batch_without_labels_has_a_gradient_of_zero(strategy: str, options: dict, form: str, labelled: int) -> None:
    """A micro-batch without labels too, whose masked mean and gradient are NaN."""
    the_case = case(form)
    the_case["recipe"]["labelled"] = labelled
    expected = reference(**the_case)
    assert difference(expected, spread(strategy, 2, options=options, **the_case)) < 1e-10
    norms = [values["grad_norm"] for values in expected["train"].values()]
    assert all(norm > 0 for norm in norms) if labelled else norms == [0.0] * len(norms)


@pytest.mark.parametrize(
    ("form", "labelled"),
    seldom(
        [*product(["labels", "masked"], [0, 6, 1000])],
        lambda form, labelled: (form, labelled) in (("labels", 0), ("masked", 6)),
    ),
)
def test_one_process_that_cuts_nothing_counts_labels_too(form: str, labelled: int) -> None:
    """Also where a batch has none, whose mean is NaN. The loss of a step is a mean of micro-batches, and differs."""
    whole = case(form, micro_batch_rows=0)
    whole["recipe"]["labelled"] = labelled
    runs = reference(**whole), spread("ddp", 2, **whole)
    for run in runs:
        for values in run["train"].values():
            del values["loss"]
    assert difference(*runs) < 1e-10


@pytest.mark.parametrize("form", ["pair", "single", "labels"])
def test_the_first_step_is_that_of_plain_torch_over_the_whole_batch(form: str) -> None:
    """Though rows are cut into micro-batches of five with different numbers of labels."""
    toy = LossForms(rows=42)
    torch.manual_seed(0)
    model = toy.build_model().double()
    run = reference(**case(form, clip_norm=0.0))
    ids = run["ids"]["0"]
    inputs, targets = toy.open_data("train", 0).fetch(np.array(ids), 0)
    assert len(ids) == BATCH and len({int((targets[a:b] != -100).sum()) for a, b in pairwise(range(0, BATCH, 5))}) > 1
    loss = torch.nn.functional.cross_entropy(model(inputs.double()).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert run["train"]["1"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("form", "strategy", "words"),
    [
        ("sum", "ddp", "LossForms.loss returned a scalar that is no mean over rows"),
        ("two", "ddp", "two losses that both need a gradient, as for two optimizers"),
        ("constant", "ddp", "LossForms.loss returned a loss without a gradient"),
        ("constant", "pipeline", "LossForms.loss returned a loss without a gradient"),
        ("number", "ddp", "LossForms.loss returned float: a plain number has no gradient"),
        ("named", "ddp", "3 losses that all need a gradient, as for 3 optimizers"),
    ],
)
def test_what_has_no_denominator_is_refused(form: str, strategy: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        spread(strategy, 2, **case(form))
