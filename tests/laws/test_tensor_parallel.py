"""Tensor parallelism: what crosses between ranks, what a rank holds, what is refused before launch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtf.api.layout import Split
from dtf.api.options import Remat, StepOptions
from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Place, Train
from dtf.distributed.world import World
from dtf.optim.optimizers import AdamW
from dtf.recipes.resnet.options import ModelOptions, ShapesOptions, Stem
from dtf.recipes.resnet.recipe import ResnetShapes
from dtf.strategies.tensor import Tensor as TensorStrategy
from tests.support.ranks import ranks

ROWS, PIXELS = 6, 32
REMATS = (Remat.blocks, Remat.selective)


def program(rank: int, size: int, arch: str = "resnet8", degree: int = 0, remat: Remat = Remat.none) -> Any:
    torch.set_num_threads(1)
    stem = Stem.imagenet if arch in ("resnet18", "resnet50") else Stem.cifar
    recipe = ResnetShapes(
        model=ModelOptions(arch=arch, classes=8, stem=stem),
        data=ShapesOptions(pixels=PIXELS, train_rows=64, eval_rows=64),
    )
    task = Task(recipe, AdamW(), Precision(), StepOptions(batch_size=ROWS, remat=remat), 0)
    return TensorStrategy(degree=degree).setup(task, World(Place(rank=rank, size=size)))


def rows(made: Any) -> Batch | None:
    ids = np.arange(ROWS)
    inputs, targets = made._task.recipe.open_data("train", 0).fetch(ids, 0)
    return Batch(inputs, targets, torch.ones(ROWS), ids) if made.shard else None


class Crossing(TorchDispatchMode):
    """Bytes of what collectives work on, the larger of what goes in and what comes out, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name: str = func.name().partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            kind = {"allreduce_": "all_reduce"}.get(name, name)
            tensors = [value for value in tree_leaves((args, results)) if isinstance(value, Tensor)]
            self.found[kind] = self.found.get(kind, 0) + max(
                tensor.numel() * tensor.element_size() for tensor in tensors
            )
        return results


def count(rank: int, size: int, arch: str, remat: str) -> dict[str, Any]:
    """Bytes in one step, by kind of collective: counted, and as the strategy's docstring says."""
    kind = Remat(remat)
    made = program(rank, size, arch, remat=kind)
    batch = made.prepare(rows(made))
    model, formula = made._replica.model, {}
    layout = made._task.recipe.layout(model)

    def add(name: str, tensor: Tensor, times: int = 1) -> None:
        formula[name] = formula.get(name, 0) + times * tensor.numel() * tensor.element_size()

    def expect(name: str, split: Split) -> Any:
        forward = (
            2 if kind is Remat.blocks and any(name.startswith(f"{block}.") for block in sum(layout.blocks, ())) else 1
        )

        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if torch._C._current_graph_task_id() >= 0:  # computed again
                return
            if split in (Split.column, Split.classes) and inputs[0].requires_grad:
                add("all_reduce", inputs[0])
            elif split is Split.row:
                add("all_reduce", output, forward)
            elif split is Split.row_scatter:
                whole = torch.empty(len(output), module.out_channels, *output.shape[2:])  # type: ignore[arg-type]
                add("reduce_scatter_tensor", whole, forward)
                add("all_gather_into_tensor", whole)

        return hook

    for name, split in layout.splits.items():
        model.get_submodule(name).register_forward_hook(expect(name, split))
    with Crossing() as crossing:
        made.step(Train(0, 0, 0, ROWS, 0.1), batch)
    numbers = sum(1 for p in model.parameters() if p.requires_grad)
    # the loss; the metrics; squares of the gradient's norm
    formula["all_reduce"] += 3 * ROWS * 4 + ROWS * 4 + ROWS * 8 + 4 * numbers
    return {"counted": crossing.found, "formula": formula}


@pytest.mark.parametrize(
    ("arch", "remat"),
    [
        ("resnet50", Remat.none),
        *(("resnet8", kind) for kind in REMATS),
        *(pytest.param("resnet50", kind, marks=pytest.mark.slow) for kind in REMATS),
        pytest.param("resnet8", Remat.none, marks=pytest.mark.slow),
    ],
)
def test_bytes_per_step_are_those_of_the_docstring(arch: str, remat: Remat) -> None:
    for found in ranks(2, "tests.laws.test_tensor_parallel:count", shared=True, arch=arch, remat=remat.value):
        assert found["counted"] == found["formula"]
        assert ("reduce_scatter_tensor" in found["counted"]) == (arch == "resnet50")


def hold(rank: int, size: int, arch: str) -> dict[str, Any]:
    """Bytes of parameters and optimizer state of what the layout splits, on this rank and in all."""
    made = program(rank, size, arch)
    splits = made._task.recipe.layout(made._replica.model).splits
    boxes = [
        box
        for box in made.state().boxes
        if box.name.split("/")[1].rpartition(".")[0] in splits and "running" not in box.name
    ]
    whole = {box.name: math.prod(box.shape) * box.tensor.element_size() for box in boxes}
    held = sum(box.tensor.numel() * box.tensor.element_size() for box in boxes)
    return {"held": held, "whole": sum(whole.values())}


@pytest.mark.parametrize("arch", ["resnet8", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_two_ranks_hold_half_of_what_is_split(arch: str) -> None:
    for found in ranks(2, "tests.laws.test_tensor_parallel:hold", shared=True, arch=arch):
        assert 0 < found["held"] <= 0.55 * found["whole"]


def test_what_cannot_run_is_refused_before_launch() -> None:
    task = Task(ResnetShapes(), AdamW(), Precision(), StepOptions(), 0)
    with pytest.raises(
        ConfigError, match=r"strategy.degree=3 does not divide launcher.processes=8; use 1 or 2 or 4 or 8"
    ):
        TensorStrategy(degree=3).check(task, 8, "cpu")
    TensorStrategy(degree=4).check(task, 8, "cpu")
