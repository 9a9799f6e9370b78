"""The recipes as the config sees them: settings, loss, measures, and that the default one learns."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from dtf.config.compose import compose
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Batch
from dtf.model.init import init_model
from dtf.recipes.resnet.options import ModelOptions, ShapesOptions
from dtf.recipes.resnet.recipe import ResnetFolder, ResnetShapes


def measured(
    recipe: ResnetShapes | ResnetFolder,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> dict[str, float]:
    weight = torch.ones(len(targets)) if weight is None else weight
    batch = Batch(None, targets, weight, np.arange(len(targets)))
    return recipe.summarise(recipe.measure(outputs, batch, recipe.loss(outputs, targets)).tolist())


def test_the_default_run_is_resnet_shapes() -> None:
    composed = compose([])
    assert composed.choices["recipe"] == "resnet_shapes"
    settings = composed.check()
    assert isinstance(settings.recipe, ResnetShapes) and settings.recipe.model.arch == "resnet8"


def test_resnet_cifar10_composes_and_asks_for_its_data() -> None:
    settings = compose(["recipe=resnet_cifar10", "recipe.data.root=/no/such/place"]).settings
    assert (
        isinstance(settings.recipe, ResnetFolder)
        and settings.recipe.model.arch == "resnet14"
        and settings.step.batch_size == 128
    )
    with pytest.raises(DataError, match=r"recipe.data.root=/no/such/place does not exist"):
        settings.recipe.check()
    with pytest.raises(ConfigError, match=r"recipe.data.root is not set"):
        compose(["recipe=resnet_cifar10"]).check()


@pytest.mark.parametrize("recipe", ["resnet_shapes", "resnet_cifar10"])
@pytest.mark.parametrize(
    "other", ["optimizer=adamw", "lr=cosine", "lr=constant", "sampler.tail=drop", "precision=bf16", "train.epochs=1"]
)
def test_what_a_recipe_sets_leaves_every_other_choice_open(recipe: str, other: str) -> None:
    group, _, choice = other.partition("=")
    composed = compose([f"recipe={recipe}", other])
    assert composed.choices.get(group, choice) == choice
    assert composed.settings.step.batch_size == 128


def test_the_loss_is_the_cross_entropy_of_each_row() -> None:
    outputs, targets = torch.randn(6, 8, dtype=torch.float64), torch.arange(6)
    loss = ResnetShapes().loss(outputs, targets)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, -outputs.log_softmax(1)[torch.arange(6), targets])
    smoothed = ResnetShapes(label_smoothing=0.1).loss(outputs, targets)
    torch.testing.assert_close(smoothed, 0.9 * loss - 0.1 * outputs.log_softmax(1).mean(1))
    assert ResnetShapes().loss(outputs.bfloat16(), targets).dtype == torch.float32


def test_measures_count_rows_of_weight_one_alone() -> None:
    recipe = ResnetShapes()
    assert recipe.train_metrics == ("loss", "top1", "top5") and recipe.objective == ("top1", "max")
    outputs = torch.arange(8.0).repeat(4, 1)
    values = measured(recipe, outputs, torch.tensor([7, 3, 2, 7]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert values["top1"] == pytest.approx(1 / 3) and values["top5"] == pytest.approx(2 / 3)
    assert values["loss"] == pytest.approx(recipe.loss(outputs, torch.tensor([7, 3, 2, 7]))[:3].mean().item())


def test_few_classes_have_no_top5() -> None:
    recipe = ResnetShapes(model=ModelOptions(classes=5))
    assert set(measured(recipe, torch.eye(5), torch.arange(5))) == set(recipe.train_metrics) == {"loss", "top1"}
    assert measured(recipe, torch.eye(5), torch.arange(5))["top1"] == 1.0


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_network_without_an_opinion_is_not_right(value: float) -> None:
    values = measured(ResnetShapes(), torch.full((3, 8), value), torch.tensor([0, 4, 7]))
    assert values["top1"] == values["top5"] == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ResnetShapes(data=ShapesOptions(pixels=24, crop_pad=24)),
            "recipe.data.crop_pad=24 must be less than recipe.data.pixels=24",
        ),
        (
            lambda: ResnetShapes(data=ShapesOptions(train_rows=10**12)),
            r"recipe.data.train_rows=10+ and .* must be at most \d+ together with recipe.data.pixels=32, to fit",
        ),
        (
            lambda: ResnetShapes(data=ShapesOptions(pixels=4096, train_rows=1, eval_rows=10**7)),
            r"recipe.data.eval_rows=10+ must be at most \d+ together with recipe.data.pixels=4096",
        ),
    ],
)
def test_impossible_values_are_refused(make: Callable[[], ResnetShapes], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().check()


def test_composing_and_checking_a_recipe_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from dtf.config.compose import compose; compose([]).check().recipe\n"
        "settings = compose(['recipe=resnet_cifar10', 'recipe.data.root=/no/such/place']).settings\n"
        "try: settings.recipe.check()\n"
        "except Exception as error: assert 'does not exist' in str(error), error\n"
        "print(sorted({'torch', 'numpy', 'torchvision', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of a small network mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_drawn_shapes_can_be_learnt(one_thread: None) -> None:
    """A few steps on a few rows: the loss of rows never seen falls well below that of guessing."""
    recipe = ResnetShapes(
        model=ModelOptions(arch="resnet8", classes=3), data=ShapesOptions(pixels=16, train_rows=512, eval_rows=120)
    )
    torch.manual_seed(0)
    network = init_model(recipe, seed=0).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    train, held_out = recipe.open_data("train", 0), recipe.open_data("eval", 0)
    for step in range(72):
        inputs, targets = train.fetch(np.arange(64) + 64 * (step % 8), epoch=step // 8)
        recipe.loss(network(inputs), targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, targets = held_out.fetch(np.arange(120), 0)
        network.eval()
        values = measured(recipe, network(inputs), targets)
    assert values["top1"] > 0.6
