"""What sharding is for: how little a rank holds, how models are cut, what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.optim.optimizers import AdamW
from dtf.recipes.resnet.options import ModelOptions
from dtf.recipes.resnet.recipe import ResnetShapes
from dtf.strategies.fsdp import Fsdp
from dtf.strategies.mesh import Mesh
from dtf.strategies.mesh_options import Unit
from dtf.strategies.mesh_strategy import MeshStrategy
from dtf.strategies.pipeline.schedules import Schedule
from tests.support.ranks import ranks


def task() -> Task:
    return Task(
        ResnetShapes(model=ModelOptions(arch="resnet8", classes=8)),
        AdamW(),
        Precision(),
        StepOptions(batch_size=8),
        0,
    )


def hold(rank: int, size: int, unit: str) -> dict[str, Any]:
    """Bytes of parameters and optimizer state on this rank and in all, and how many units FSDP made."""
    from torch.distributed.fsdp import FSDPModule

    program: Any = Fsdp(unit=Unit(unit)).setup(task(), World(Place(rank=rank, size=size)))
    boxes = [box for box in program.state().boxes if not box.name.startswith("share_") and "running" not in box.name]
    held = {id(box.tensor): box.tensor.numel() * box.tensor.element_size() for box in boxes}
    whole = sum(parameter.numel() * parameter.element_size() for parameter in program._replica.model.parameters())
    names = [name for name, module in program._replica.model.named_modules() if isinstance(module, FSDPModule)]
    return {"held": sum(held.values()), "whole": 3 * whole, "units": names}


@cache
def both(unit: str) -> list[dict[str, Any]]:
    """What each of two ranks holds."""
    return ranks(2, "tests.laws.test_sharded_init:hold", shared=True, unit=unit)


@pytest.mark.parametrize("unit", ["layer", "block", "stage"])
def test_two_ranks_hold_half_each(unit: str) -> None:
    """Parameters and both moments of AdamW; counters and running averages are the few bytes beyond."""
    for found in both(unit):
        assert found["held"] <= 0.55 * found["whole"]


def test_units_follow_the_layout() -> None:
    units = {unit: both(unit)[0]["units"] for unit in ("layer", "block", "stage")}
    assert {"layer1.0", "layer2.0", "layer3.0", "fc"} <= set(units["block"])
    assert "layer1.0.conv1" in units["layer"] and "layer1.0.conv1" not in units["block"]


@pytest.mark.parametrize(
    ("strategy", "processes", "words"),
    [
        (Fsdp(replicate=2), 3, "strategy.replicate=2 does not divide launcher.processes=3; use 1 or 3"),
        (Fsdp(offload=True), 1, "strategy.offload=true needs at least 2 processes"),
        (Mesh(replicate=2, unit=Unit.layer), 2, "strategy.unit=layer is of the axis shard, which has one rank here"),
        (Mesh(schedule=Schedule["gpipe"]), 2, "strategy.schedule=gpipe is of the axis pipeline, which has one rank"),
        (Mesh(replicate=2, zero=2), 2, "strategy.zero=2 is of the axis shard, which has one rank here"),
        (Mesh(tensor=2, virtual=2), 2, "strategy.virtual=2 is of the axis pipeline, which has one rank here"),
        (Fsdp(replicate=2, zero=2), 2, "strategy.zero=2 says what ranks have in slices, and replicate 2 leaves one"),
        (Fsdp(zero=1, reshard_after_forward=False), 2, "strategy.reshard_after_forward=false keeps what strategy.zero"),
        (Mesh(shard=2, tensor=2), 2, "strategy.shard=2 x strategy.tensor=2 makes 4 ranks, and launcher.processes=2"),
        (Mesh(replicate=2, tensor=2), 6, "strategy.replicate=2 x strategy.tensor=2 makes groups of 4 ranks, which do"),
        (Mesh(shard=1, tensor=2), 4, "strategy.shard=1 x strategy.tensor=2 makes 2 ranks, and launcher.processes=4"),
        (Mesh(tensor=2), 3, "strategy.tensor=2 makes groups of 2 ranks, which do not divide launcher.processes=3"),
        (Fsdp(offload=True), 2, "strategy.offload=true moves parameters from GPUs to the host, this run is on cpu"),
    ],
)
def test_what_cannot_run_is_refused_before_launch(strategy: MeshStrategy, processes: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy.check(task(), processes, "cpu")
    assert words in str(caught.value)
