"""A loss may be sums with counts, or a scalar mean: there is one denominator, whatever the micro-batches and ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.arrays import crossed
from tests.support.harness import BATCH, difference, meshes, reference, spread, variants
from tests.support.loss_toy import LossForms

PLUGIN = "tests.support.loss_toy"
ONE_TRAINER = [pair for pair in variants() if pair[0] != "pserver"]


def case(form: str, **more: object) -> dict:
    return {"plugin": PLUGIN, "recipe": {"name": "losses", "form": form}, **more}


@pytest.mark.parametrize(("strategy", "options", "form"), crossed(ONE_TRAINER, ["pair", "labels"]))
def test_every_strategy_follows_the_reference(strategy: str, options: dict, form: str) -> None:
    run = spread(strategy, 3 if form == "pair" else 2, options=options, **case(form))
    assert difference(reference(**case(form)), run) < 1e-10


@pytest.mark.parametrize(("strategy", "options"), [*meshes()])
def test_combined_with_data_parallelism(strategy: str, options: dict) -> None:
    assert difference(reference(**case("pair")), spread(strategy, 4, options=options, **case("pair"))) < 1e-10


@pytest.mark.parametrize("form", ["single", "rows"])
def test_other_forms(form: str) -> None:
    assert difference(reference(**case(form)), spread("ddp", 2, **case(form))) < 1e-10


def test_one_server_and_one_trainer() -> None:
    assert difference(reference(**case("pair")), spread("pserver", 1, **case("pair"))) < 1e-10


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
        (
            "pair",
            "pserver",
            "LossForms.loss returned sums and counts, and trainers do not know the counts",
        ),
    ],
)
def test_what_has_no_denominator_is_refused(form: str, strategy: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        spread(strategy, 2, **case(form))
