"""Parameters and buffers that several stages of a pipeline use have the numbers of one process; what a model keeps from
pass to pass is found before the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError
from dtf.strategies.pipeline import partition
from dtf.strategies.pipeline.partition import Cost
from dtf.strategies.pipeline.shared_tensors import refuse_gathered_twice
from tests.support.harness import difference, reference, spread
from tests.support.ranks import ranks
from tests.support.tied_models import Again

load_parts([])
TIED: dict[str, Any] = {"plugin": "tests.support.tied", "recipe": {"name": "tied", "kind": "function", "rows": 42}}
BLOCKS = {"cuts": ["first", "second", "third"]}
"""A stage more than the embedding for each block."""


def tied(kind: str) -> dict[str, Any]:
    return TIED | {"recipe": {**TIED["recipe"], "kind": kind}}


@pytest.mark.parametrize(
    ("kind", "processes", "options", "more"),
    [
        pytest.param("function", 2, {}, {}, marks=pytest.mark.slow),
        pytest.param("function", 4, BLOCKS, {"ema": 0.9, "optimizer": "adamw"}, marks=pytest.mark.slow),
        pytest.param("function", 2, {"virtual": 2, **BLOCKS}, {"clip_norm": 0.01}, marks=pytest.mark.slow),
        ("function", 4, {"degree": 2}, {"clip_norm": 0.01, "optimizer": "lars"}),
        pytest.param("function", 2, {}, {"freeze": ["embed"]}, marks=pytest.mark.slow),
        pytest.param("function", 2, {}, {"remat": "blocks"}, marks=pytest.mark.slow),
        ("modules", 2, {}, {}),
        pytest.param("modules", 4, BLOCKS, {"clip_norm": 0.01}, marks=pytest.mark.slow),
        pytest.param("modules", 2, {"virtual": 2, **BLOCKS}, {"ema": 0.9}, marks=pytest.mark.slow),
        pytest.param("modules", 4, {"degree": 2}, {}, marks=pytest.mark.slow),
        pytest.param("again", 4, BLOCKS, {"optimizer": "adamw"}, marks=pytest.mark.slow),
        ("again", 2, {"virtual": 2, **BLOCKS}, {"remat": "blocks"}),
    ],
)
def test_what_several_stages_use_is_updated_alike(
    kind: str, processes: int, options: dict[str, Any], more: dict[str, Any]
) -> None:
    found = spread("pipeline", processes, options=options, **tied(kind), **more)
    assert difference(reference(**tied(kind), **more), found) <= 1e-10


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {}),
        pytest.param(2, {"virtual": 2, **BLOCKS}, marks=pytest.mark.slow),
        pytest.param(4, {"degree": 2}, marks=pytest.mark.slow),
    ],
)
def test_tied_parameters_can_be_drawn_by_name(processes: int, options: dict[str, Any]) -> None:
    case = {**TIED, "recipe": {"name": "tied_by_name", "kind": "modules", "rows": 42}}
    assert difference(reference(**case), spread("pipeline", processes, options=options, **case)) <= 1e-10


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        pytest.param(kind, precision, marks=() if (j < 2) == (kind == "modules") else pytest.mark.slow)
        for kind in ("function", "modules")
        for j, precision in enumerate(("fp16", "bf16_master", "bf16", "bf16_params"))
    ],
)
@pytest.mark.slow
def test_tied_parameters_in_half_precision(kind: str, precision: str) -> None:
    """Their gradients are sums of two parts, each rounded for itself."""
    case = tied(kind) | {"precision": precision}
    found = spread("pipeline", 2, **case)
    assert difference(reference(**case), found, without=("optimizer/",)) <= 0.02


def copies(rank: int, size: int, **case: Any) -> list[str]:
    """The bytes of this rank's copy of the shared weight after three steps, none where it has none."""
    from tests.support import harness

    run = harness._Run(rank, size, harness.Case(strategy="pipeline", **case))
    run.fit()
    held = run.program.replicated()[0]
    run.program.leased.end()
    return [held["embed.weight"].double().numpy().tobytes().hex()] if "embed.weight" in held else []


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16_master"])
def test_copies_stay_equal_bit_for_bit(precision: str) -> None:
    case = tied("modules") | {"precision": precision, "options": {"degree": 2}}
    found = ranks(4, "tests.laws.test_pipeline_shared:copies", shared=True, **case)
    assert all(len(held) == 1 for held in found) and len({held[0] for held in found}) == 1


@pytest.mark.slow
def test_a_run_with_tied_parameters_goes_on_elsewhere(tmp_path: Path) -> None:
    """From a pipeline under ddp, from ddp in a pipeline; a checkpoint has the weight once."""
    whole = reference(**tied("modules"))
    for first, then in (("pipeline", "ddp"), ("ddp", "pipeline")):
        folder = str(tmp_path / first)
        spread(first, 2, save_every=1, halt=True, folder=folder, **tied("modules"))
        found = spread(then, 2, start=folder, **tied("modules"))
        for name, tensor in whole["tensors"].items():
            assert np.abs(np.asarray(tensor) - np.asarray(found["tensors"][name])).max() <= 1e-10, (first, name)


def test_the_table_counts_each_copy_and_none_twice() -> None:
    """Of a weight that two of three blocks have."""
    costs = [Cost(name, 1.0, 100, 0, 0, shared={"w": 60} if name != "b" else {}) for name in "abc"]
    assert partition.memory(costs, 0, 1, 1) == partition.memory(costs, 2, 3, 1) == 100
    assert partition.memory(costs, 0, 3, 1) == 240


def test_slices_of_what_two_stages_of_a_rank_use_are_refused() -> None:
    """Stages 1 and 3 of two ranks; on three ranks each has one of them."""
    model, uses = Again(), {name: [0] for name, _ in Again().named_parameters()} | {"first.mlp.weight": [1, 3]}
    with pytest.raises(ConfigError, match=r"the stages 1 and 3 are on one rank and both use first\.mlp\.weight"):
        refuse_gathered_twice(model, uses, [0, 1, 2, 3, 5], 2, 2)
    refuse_gathered_twice(model, uses, [0, 1, 2, 3, 5], 2, 1)
    refuse_gathered_twice(model, uses, [0, 1, 2, 3, 5], 3, 2)
    refuse_gathered_twice(model, uses, [0, 1, 5], 2, 2)


@pytest.mark.slow
def test_so_they_are_before_the_first_step() -> None:
    with pytest.raises(AssertionError, match="the stages 1 and 3 are on one rank and both use first"):
        spread("mesh", 4, options={"pipeline": 2, "shard": 2, "virtual": 2, **BLOCKS}, **tied("again"))


def test_what_a_model_remembers_is_found_where_rows_are_divided() -> None:
    case = {"plugin": "tests.support.tied", "recipe": {"name": "remembering", "rows": 42}}
    with pytest.raises(
        AssertionError, match="other numbers for the same rows .*: memory is the first module"
    ) as caught:
        spread("pipeline", 4, options={"degree": 2}, **case)
    assert "passes change the attribute memory.last" in str(caught.value)
    assert difference(reference(**case), spread("pipeline", 2, **case)) <= 1e-10


def test_a_generator_that_is_not_torchs_is_found_too() -> None:
    """Stages before and after would not draw on."""
    case = {"plugin": "tests.support.tied", "recipe": {"name": "remembering", "rows": 42, "python_random": True}}
    with pytest.raises(AssertionError, match="the model draws random numbers in its forward pass"):
        spread("pipeline", 2, **case)


def test_a_shared_buffer_that_changes_in_a_block_is_refused() -> None:
    """Its copies would drift apart, although all rows go through one pipeline."""
    with pytest.raises(AssertionError, match="changes the buffer table, which stages on several ranks use"):
        spread("pipeline", 2, **tied("changing"))
