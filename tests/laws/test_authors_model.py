"""A model starts as its author wrote it: under every strategy from what the constructor makes of it under the seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.arrays import crossed, plain, seldom
from tests.support.harness import difference, meshes, reference, spread, variants

PLUGIN = "tests.support.authored"
CASE = {"plugin": PLUGIN, "precision": "fp32"}


def written() -> dict[str, torch.Tensor]:
    """The model of `authored` in plain PyTorch."""
    from tests.support.authored_model import Model

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Model()
    return {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "options"),
    seldom(
        [*variants(), *meshes()],
        lambda strategy, options: (not options and strategy != "zero1") or "degree" in options,
    ),
)
def test_every_strategy_starts_from_what_the_constructor_made(strategy: str, options: dict) -> None:
    recipe = {"name": "authored"}
    processes = 2
    tensors = spread(strategy, processes, call="start", recipe=recipe, options=options, **CASE)["tensors"]
    for name, tensor in written().items():
        assert torch.tensor(tensors[name], dtype=torch.float64).equal(tensor.double()), name


@pytest.mark.parametrize(("strategy", "options", "processes"), crossed(variants(), [2, 3], usual=[2], programs=True))
def test_every_strategy_follows_the_reference(strategy: str, options: dict, processes: int) -> None:
    case = {"plugin": PLUGIN, "recipe": {"name": "authored"}}
    run = spread(strategy, processes, options=options, **case)
    assert difference(reference(**case), run) < 1e-10


@pytest.mark.parametrize(("strategy", "options"), plain(variants()))
def test_a_recipe_may_draw_by_name(strategy: str, options: dict) -> None:
    case = {"plugin": PLUGIN, "recipe": {"name": "by_name"}}
    run = spread(strategy, 2, options=options, **case)
    assert difference(reference(**case), run) < 1e-10


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("dp", {}),
        ("ddp", {}),
        ("fsdp", {}),
        ("pserver", {"servers": 1}),
        ("pserver", {"servers": 1, "team": 2}),
        ("pserver", {"servers": 1, "mode": "async", "staleness": 4, "hogwild_threads": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_constructors_that_draw_apart_are_refused(strategy: str, options: dict) -> None:
    """What they keep is in no tensor that could be sent."""
    processes = 1 if "hogwild_threads" in options else 2
    with pytest.raises(AssertionError, match="(different|other) numbers (from|for) the same rows"):
        spread(strategy, processes, options=options, plugin="tests.support.unseeded_model", recipe={"name": "unseeded"})


def test_a_model_that_is_kept_and_returned_again_is_refused() -> None:
    """Replicas would be one module, and what they start from would be what they have become."""
    with pytest.raises(AssertionError, match=r"Kept.build_model\(\) returned the model that it has returned before"):
        spread("dp", 2, plugin="tests.support.unseeded_model", recipe={"name": "kept"})
