"""Tensor parallelism: what crosses between ranks, what a rank holds, which layers can be divided, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtf.errors import ConfigError
from dtf.launcher import Place
from dtf.layout import Split
from dtf.optimizers.adamw import AdamW
from dtf.options import StepOptions
from dtf.precision import Precision
from dtf.recipe import Recipe
from dtf.recipes.resnet.recipe import Arch, ModelOptions, ResnetShapes, ShapesOptions, Stem
from dtf.strategies.tensor import Tensor as TensorStrategy
from dtf.strategy import Task
from dtf.values import Batch, Train
from dtf.world import World
from tests.ranks import ranks

ROWS, PIXELS = 6, 32


def program(rank: int, size: int, arch: str = "resnet8", degree: int = 0) -> Any:
    torch.set_num_threads(1)
    stem = Stem.imagenet if arch in ("resnet18", "resnet50") else Stem.cifar
    recipe = ResnetShapes(model=ModelOptions(arch=Arch[arch], classes=8, stem=stem), data=ShapesOptions(pixels=PIXELS, train_rows=64, eval_rows=64))
    return TensorStrategy(degree=degree).setup(Task(recipe, AdamW(), Precision(), StepOptions(batch_size=ROWS), 0), World(Place(rank=rank, size=size)))


def rows(made: Any) -> Batch | None:
    ids = np.arange(ROWS)
    inputs, targets = made._task.recipe.open_data("train", 0).fetch(ids, 0)
    return Batch(inputs, targets, torch.ones(ROWS), ids) if made.shard else None


def count(rank: int, size: int, arch: str) -> dict[str, Any]:
    """Bytes in one step, by kind of collective: counted, and as the strategy's docstring says."""
    import torch.distributed as dist

    made = program(rank, size, arch)
    batch = made.prepare(rows(made))
    model, found, formula = made._replica.model, {}, {}

    def counted(name: str, size_of: Any) -> None:
        plain = getattr(dist, name)

        def call(*tensors: Tensor, **more: Any) -> Any:
            found[name] = found.get(name, 0) + size_of(*tensors)
            return plain(*tensors, **more)

        setattr(dist, name, call)

    def add(name: str, tensor: Tensor) -> None:
        formula[name] = formula.get(name, 0) + tensor.numel() * tensor.element_size()

    def expect(split: Split) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if split in (Split.column, Split.classes) and inputs[0].requires_grad:
                add("all_reduce", inputs[0])
            elif split is Split.row:
                add("all_reduce", output)
            elif split is Split.row_scatter:
                whole = torch.empty(len(output), module.out_channels, *output.shape[2:])  # type: ignore[arg-type]
                add("reduce_scatter_tensor", whole)
                add("all_gather_into_tensor", whole)

        return hook

    for name, split in made._task.recipe.layout(model).splits.items():
        model.get_submodule(name).register_forward_hook(expect(split))
    counted("all_reduce", lambda t: t.numel() * t.element_size())
    counted("reduce_scatter_tensor", lambda part, whole: whole.numel() * whole.element_size())
    counted("all_gather_into_tensor", lambda whole, part: whole.numel() * whole.element_size())
    made.step(Train(0, 0, 0, ROWS, 0.1), batch)
    numbers = sum(1 for p in model.parameters() if p.requires_grad)
    formula["all_reduce"] += 3 * ROWS * 4 + ROWS * 4 + ROWS * 8 + 4 * numbers  # the loss; the metrics; squares of the gradient's norm
    return {"counted": found, "formula": formula}


@pytest.mark.parametrize("arch", ["resnet8", "resnet18", "resnet50"])
def test_bytes_per_step_are_those_of_the_docstring(arch: str) -> None:
    for found in ranks(2, "tests.test_divided:count", arch=arch):
        assert found["counted"] == found["formula"]
        assert ("reduce_scatter_tensor" in found["counted"]) == (arch == "resnet50")


def hold(rank: int, size: int, arch: str) -> dict[str, Any]:
    """Bytes of parameters and optimizer state of what the layout splits, on this rank and in all."""
    made = program(rank, size, arch)
    splits = made._task.recipe.layout(made._replica.model).splits
    boxes = [box for box in made.state().boxes if box.name.split("/")[1].rpartition(".")[0] in splits and "running" not in box.name]
    modules = [made._replica.model.get_submodule(name) for name in splits]
    whole = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    return {"held": sum(box.tensor.numel() * box.tensor.element_size() for box in boxes), "whole": 3 * whole}


@pytest.mark.parametrize("arch", ["resnet8", "resnet50"])
def test_two_ranks_hold_half_of_what_is_split(arch: str) -> None:
    for found in ranks(2, "tests.test_divided:hold", arch=arch):
        assert 0 < found["held"] <= 0.55 * found["whole"]


class Every(nn.Module):
    """All kinds of layers that can be divided, in one chain."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(11, 6, padding_idx=7)
        self.features = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(10, 8)
        self.scatter_up = nn.Linear(8, 9)
        self.scatter = nn.Linear(9, 8)
        self.again = nn.Linear(8, 8)
        self.conv = nn.Conv2d(8, 12, 1)
        self.norm = nn.BatchNorm2d(12)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=6)
        self.channels = nn.Dropout2d(0.5)
        self.back = nn.Conv2d(12, 8, 1)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ids(ids) + self.mix(self.features(ids))
        x = self.down(self.drop(torch.relu(self.up(x))))
        x = self.again(torch.relu(self.scatter(torch.relu(self.scatter_up(x)))))
        y = self.back(self.channels(torch.relu(self.grouped(self.norm(self.conv(x.transpose(1, 2)[..., None]))))))
        return self.out(y.mean(dim=(2, 3)))


SPLITS = {"ids": Split.row, "features": Split.column, "mix": Split.row, "up": Split.column, "drop": Split.local, "down": Split.row}
SPLITS |= {"scatter_up": Split.column, "scatter": Split.row_scatter, "again": Split.row, "conv": Split.column, "norm": Split.local}
SPLITS |= {"grouped": Split.local, "channels": Split.local, "back": Split.row, "out": Split.classes}


def every(rank: int, size: int) -> list[Any]:
    """Losses, ranks of the right class and every gradient of the chain, divided and whole."""
    from dtf import classes
    from dtf.divided import divide
    from dtf.microbatch import Masks
    from dtf.slices import local, offset

    torch.manual_seed(0)
    whole = Every().double()
    with torch.device("meta"):
        parts = Every().double()
    mesh = World(Place(rank=rank, size=size)).mesh({"tp": size})
    divide(parts, SPLITS, mesh)
    parts.to_empty(device="cpu")
    state = dict(whole.state_dict())
    with torch.no_grad():
        for name, tensor in [*parts.named_parameters(), *parts.named_buffers()]:
            here = local(tensor)
            here.copy_(state[name][tuple(slice(at, at + n) for at, n in zip(offset(tensor), here.shape, strict=True))])
    ids, targets = torch.arange(44).view(4, 11) * 5 % 11, torch.tensor([0, 4, 2, 3])
    found = []
    for model in (whole, parts):
        Masks(model, 0, torch.device("cpu")).enter(0, 0)
        scores = model(ids)
        loss = classes.cross_entropy(scores, targets, label_smoothing=0.1)
        loss.sum().backward()
        with torch.no_grad():
            found.append([loss, classes.rank(scores, targets), *(local(b) for b in model.buffers())])
    worst = max(float((a - b).abs().max()) for a, b in zip(found[0][:2], found[1][:2], strict=True))
    averages = dict(parts.named_buffers())
    for name, buffer in whole.named_buffers():
        part = tuple(slice(at, at + n) for at, n in zip(offset(averages[name]), local(averages[name]).shape, strict=True))
        torch.testing.assert_close(buffer[part], local(averages[name]), rtol=1e-12, atol=1e-12)
    gradients = dict(parts.named_parameters())
    for name, parameter in whole.named_parameters():
        mine = gradients[name]
        assert parameter.grad is not None and mine.grad is not None, name
        part = tuple(slice(at, at + n) for at, n in zip(offset(mine), local(mine).shape, strict=True))
        difference = (parameter.grad[part] - local(mine.grad)).abs()
        assert not difference.numel() or float(difference.max()) < 1e-12, name
    return [worst, float(found[0][0].sum())]


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_of_layer_computes_as_if_whole(size: int) -> None:
    """Divided by 3, features come in 4, 4 and 2, classes in 2, 2 and 1: uneven slices, biases, masks, padding ids, scattered sums."""
    for worst, loss in ranks(size, "tests.test_divided:every"):
        assert worst < 1e-12 < loss


def refused(rank: int, size: int, splits: dict[str, str]) -> str:
    from dtf.divided import divide

    with torch.device("meta"):
        model = Every()
    try:
        divide(model, {name: Split[split] for name, split in splits.items()}, World(Place(rank=rank, size=size)).mesh({"tp": size}))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"norm": "row"}, "splits norm as row, which BatchNorm2d cannot be"),
        ({"grouped": "column"}, "splits grouped as column, which Conv2d cannot be"),
        ({"grouped": "local"}, "grouped has 6 groups of channels, which strategy.degree=4 does not divide"),
    ],
)
def test_what_cannot_be_divided_is_named(splits: dict[str, str], words: str) -> None:
    assert words in ranks(4, "tests.test_divided:refused", splits=splits)[0]


class Plain(ResnetShapes):
    """A recipe that says nothing of its model's parts."""

    layout = Recipe.layout


def test_what_cannot_run_is_refused_before_launch() -> None:
    task = Task(ResnetShapes(), AdamW(), Precision(), StepOptions(), 0)
    with pytest.raises(ConfigError, match=r"strategy.degree=3 does not divide launcher.processes=8; use 1 or 2 or 4 or 8"):
        TensorStrategy(degree=3).check(task, 8, "cpu")
    TensorStrategy(degree=4).check(task, 8, "cpu")
    with pytest.raises(ConfigError, match=r"strategy=tensor: Plain has no layout\(\)"):
        TensorStrategy().check(Task(Plain(), AdamW(), Precision(), StepOptions(), 0), 2, "cpu")
