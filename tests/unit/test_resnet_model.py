"""The networks: torchvision's names and shapes, published sizes, and drawing by torchvision's rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from dtf.core.errors import ConfigError
from dtf.model.init import init_model
from dtf.recipes.resnet.archs import LARGE, SMALL
from dtf.recipes.resnet.options import ModelOptions, Stem
from dtf.recipes.resnet.recipe import BASIC, ResnetShapes

DEEP = ("resnet101", "resnet110", "resnet152", "resnext101_32x8d", "wide_resnet101_2")
"""More blocks of the same kind."""


def shallow(archs: Iterable[str]) -> list[Any]:
    """The deep ones among them are slow."""
    return [pytest.param(arch, marks=[pytest.mark.slow] * (arch in DEEP)) for arch in archs]


def recipe(**options: object) -> ResnetShapes:
    return ResnetShapes(model=ModelOptions(**options))  # type: ignore[arg-type]


def shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("arch", shallow(LARGE))
def test_a_large_network_takes_torchvisions_weight_files(arch: str) -> None:
    with torch.device("meta"):
        ours = recipe(arch=arch, stem=Stem.imagenet, classes=1000).build_model()
        theirs = torchvision.models.get_model(arch, weights=None)
    assert shapes(ours) == shapes(theirs)


@pytest.mark.parametrize("arch", shallow(LARGE))
def test_the_cifar_stem_changes_the_shape_of_the_first_convolution_alone(arch: str) -> None:
    with torch.device("meta"):
        cifar, imagenet = (
            shapes(recipe(arch=arch, stem=stem, classes=10).build_model()) for stem in (Stem.cifar, Stem.imagenet)
        )
    assert cifar.keys() == imagenet.keys()
    assert {name for name in cifar if cifar[name] != imagenet[name]} == {"conv1.weight"}
    assert cifar["conv1.weight"] == (64, 3, 3, 3)


def test_the_cifar_stem_keeps_the_resolution_of_small_images() -> None:
    seen: list[torch.Size] = []
    with torch.device("meta"):
        network = recipe(arch="resnet18", classes=10).build_model()
        network.get_submodule("layer1").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert seen == [(2, 64, 32, 32)]


# Parameters in millions: He et al. 2015, table 6; resnet8 and resnet14 by the same formula.
@pytest.mark.parametrize(
    ("arch", "millions"),
    [("resnet20", 0.27), ("resnet32", 0.46), ("resnet44", 0.66), ("resnet56", 0.85), ("resnet110", 1.7)],
)
def test_small_networks_have_the_published_number_of_parameters(arch: str, millions: float) -> None:
    with torch.device("meta"):
        network = recipe(arch=arch, classes=10).build_model()
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.05 if millions > 1 else 0.005
    )


@pytest.mark.parametrize("arch", SMALL)
def test_small_networks_have_as_many_layers_as_their_name_says(arch: str) -> None:
    with torch.device("meta"):
        layers = [
            module
            for module in recipe(arch=arch, classes=10).build_model().modules()
            if isinstance(module, nn.Conv2d | nn.Linear)
        ]
    assert len(layers) == int(arch.removeprefix("resnet"))


def test_width_scales_every_stage() -> None:
    with torch.device("meta"):
        network = recipe(arch="resnet8", width=24, classes=5).build_model()
    assert network.get_submodule("layer3.0.conv2").weight.shape[0] == 96  # type: ignore[union-attr]
    assert network.get_submodule("fc").weight.shape == (5, 96)  # type: ignore[union-attr]


def test_the_shortcut_between_stages_subsamples_and_pads_with_zeros() -> None:
    network = recipe(arch="resnet8", width=4, classes=2).build_model()
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    y = network.get_submodule("layer2.0.downsample")(x)
    assert y[:, :4].equal(x[:, :, ::2, ::2]) and not y[:, 4:].any()
    assert y.shape == (2, 8, 4, 4) and y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("arch", shallow([*SMALL, *LARGE]))
def test_no_convolution_before_a_normalisation_has_a_bias(arch: str) -> None:
    with torch.device("meta"):
        network = recipe(arch=arch, classes=3).build_model()
    assert all(module.bias is None for module in network.modules() if isinstance(module, nn.Conv2d))


@pytest.mark.parametrize(("arch", "stem"), [("resnet20", Stem.cifar), ("resnet18", Stem.imagenet)])
def test_drawn_tensors_are_distributed_as_torchvision_draws_them(arch: str, stem: Stem) -> None:
    ours = init_model(recipe(arch=arch, stem=stem, classes=10), seed=3).state_dict()
    torch.manual_seed(0)
    theirs = recipe(arch=arch, stem=stem, classes=10).build_model()
    for module in theirs.modules():  # the rules of torchvision's ResNet.__init__
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    compared = 0
    for name, tensor in theirs.state_dict().items():
        if (tensor == tensor.flatten()[0]).all():  # constants: normalisation weights, running statistics
            assert ours[name].equal(tensor), name
        else:
            assert ours[name].std().item() == pytest.approx(tensor.std().item(), rel=6 / tensor.numel() ** 0.5), name
            assert abs(ours[name].mean().item()) < 6 * tensor.std().item() / tensor.numel() ** 0.5, name
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("arch", ["resnet8", "resnet18", "resnet50"])
def test_zero_init_residual_silences_the_last_normalisation_of_every_block(arch: str) -> None:
    network = init_model(recipe(arch=arch, zero_init_residual=True), 0)
    norms = {name: module for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)}
    silent = {name for name, module in norms.items() if not module.weight.any()}
    assert silent == {
        name for name in norms if name.startswith("layer") and name.endswith(".bn2" if arch in BASIC else ".bn3")
    }
    if arch not in SMALL:
        theirs = torchvision.models.get_model(arch, weights=None, zero_init_residual=True)
        assert silent == {
            name
            for name, module in theirs.named_modules()
            if isinstance(module, nn.BatchNorm2d) and not module.weight.any()
        }


def test_the_seed_decides_what_is_drawn() -> None:
    one, same, other = (init_model(recipe(arch="resnet8"), seed).state_dict() for seed in (1, 1, 2))
    assert all(one[name].equal(same[name]) for name in one)
    assert not one["conv1.weight"].equal(other["conv1.weight"])
    assert not one["layer1.0.conv1.weight"].equal(one["layer1.0.conv2.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"arch": "resnet20", "stem": Stem.imagenet},
            "recipe.model.stem=imagenet does not exist for recipe.model.arch=resnet20",
        ),
        ({"arch": "resnet18", "width": 32}, "recipe.model.width=32 does not apply to recipe.model.arch=resnet18"),
        ({"classes": 9}, "recipe.model.classes=9, but there are 8 kinds"),
    ],
)
def test_impossible_networks_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**options).check()
