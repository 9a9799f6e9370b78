"""Networks by name: torchvision's and timm's own lists, their last layers, and the images that they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

from dtf.api.layout import BufferUpdate, Split
from dtf.config.compose import compose
from dtf.core.errors import ConfigError
from dtf.model.found_blocks import found_blocks
from dtf.model.pretrained import match_weights, open_weights
from dtf.recipes.resnet import archs
from dtf.recipes.resnet.archs import (
    FAMILIES,
    FAMILY_OF,
    LARGE,
    SMALL,
    SMALL_VITS,
    check_arch,
    check_pixels,
    timm_names,
)
from dtf.recipes.resnet.options import ModelOptions, ShapesOptions, Stem
from dtf.recipes.resnet.recipe import ResnetShapes

SMALLEST = {family: kind.names.split()[0] for family, kind in FAMILIES.items()}


def recipe(arch: str, pixels: int = 32, **options: Any) -> ResnetShapes:
    return ResnetShapes(model=ModelOptions(arch=arch, **options), data=ShapesOptions(pixels=pixels))


def build(arch: str, pixels: int, classes: int) -> nn.Module:
    """Without memory, where its constructor can do without."""
    if arch.startswith("regnet"):
        return recipe(arch, pixels, classes=classes).build_model().to("meta")
    with torch.device("meta"):
        return recipe(arch, pixels, classes=classes).build_model()


def test_the_list_is_torchvisions_own() -> None:
    known = torchvision.models.list_models(module=torchvision.models)
    assert sorted(FAMILY_OF) == sorted([*known, *SMALL_VITS])


@pytest.mark.parametrize(("arch", "width", "heads"), [("vit_ti_16", 192, 3), ("vit_s_16", 384, 6)])
def test_small_vision_transformers_are_torchvisions_own_module(arch: str, width: int, heads: int) -> None:
    network = build(arch, 48, 5)
    assert type(network) is torchvision.models.VisionTransformer
    assert (network.image_size, network.patch_size, network.hidden_dim, network.mlp_dim) == (48, 16, width, 4 * width)
    blocks: Any = list(network.encoder.layers)
    assert len(blocks) == 12 and {block.self_attention.num_heads for block in blocks} == {heads}
    assert [layer.out_features for layer in network.heads] == [5]


def test_names_of_timm_are_read_from_its_files() -> None:
    assert timm_names() == set(timm.list_models())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layers_alone_depend_on_the_classes(family: str) -> None:
    arch, kind = SMALLEST[family], FAMILIES[family]
    few, many = (build(arch, kind.least, classes) for classes in (3, 5))
    other = {
        name.rpartition(".")[0]
        for (name, mine), (_, theirs) in zip(few.named_parameters(), many.named_parameters(), strict=True)
        if mine.shape != theirs.shape
    }
    splits = recipe(arch, kind.least).layout(few).splits
    assert other == set(kind.heads.split()) == {name for name, split in splits.items() if split is Split.classes}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if place % 3 == 0 else pytest.mark.slow) for place, name in enumerate(FAMILIES)],
)
def test_images_of_the_smallest_size_pass_and_no_smaller_ones(family: str) -> None:
    arch, kind = SMALLEST[family], FAMILIES[family]

    def passes(pixels: int) -> bool:
        try:
            network = build(arch, pixels, 3)
            for training in (True, False):
                network.train(training)(torch.empty(2, 3, pixels, pixels, device="meta"))
        except (RuntimeError, ValueError, AssertionError):
            return False
        return True

    assert passes(kind.least)
    if not kind.sized and (kind.least > 32 or family in ("densenet", "googlenet", "vgg")):
        assert not passes(kind.least - 1)


@pytest.mark.parametrize("arch", [*SMALL, *LARGE])
def test_found_blocks_of_residual_networks_are_those_of_their_layout(arch: str) -> None:
    with torch.device("meta"):
        network = recipe(arch).build_model()
    assert found_blocks(network) == recipe(arch).layout(network).blocks


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("efficientnet_b9", "is no network; did you mean efficientnet_b7"),
        ("timm/vit_tiny_patch16_22", "timm has no vit_tiny_patch16_22; did you mean vit_tiny_patch16_224?"),
        ("timm_resnet10t", "is no network; did you mean timm/resnet10t? networks of timm are timm/NAME"),
        ("resnet10t", "is no network; did you mean timm/resnet10t?"),
        ("timm/qqq", "timm has no qqq; timm.list_models"),
    ],
)
def test_an_unknown_name_is_refused_with_a_near_one(arch: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arch(arch)
    assert words in str(caught.value)


def test_without_timm_its_networks_are_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archs, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs timm, which is not installed; pip install 'dtf\[timm\]'"):
        check_arch("timm/resnet26d")


@pytest.mark.parametrize(
    ("arch", "pixels", "smallest", "words"),
    [
        ("vit_b_16", 100, 100, "takes images of a multiple of 16 pixels; use 96 or 112"),
        ("maxvit_t", 32, 32, "takes images of a multiple of 224 pixels; use 224"),
        ("inception_v3", 224, 224, "takes images of at least 299 pixels; use 299"),
        ("vit_b_16", 224, 96, "recipe.data.grow_from=96: recipe.model.arch=vit_b_16 takes images of one size"),
        ("alexnet", 128, 32, "recipe.data.grow_from=32: recipe.model.arch=alexnet takes images of at least 63 pixels"),
    ],
)
def test_images_of_another_size_are_refused(arch: str, pixels: int, smallest: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_pixels(arch, pixels, smallest)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stem": Stem.cifar}, "recipe.model.stem=cifar does not apply to recipe.model.arch=swin_t"),
        ({"zero_init_residual": True}, "recipe.model.zero_init_residual=true does not apply to"),
        ({"width": 32}, "recipe.model.width=32 does not apply to recipe.model.arch=swin_t"),
    ],
)
def test_options_of_residual_networks_are_refused_for_others(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe("swin_t", **options).check()


def test_what_a_recipe_sets_for_its_own_network_does_not_stand_in_the_way_of_another() -> None:
    words = ["recipe=resnet18_imagenette", "recipe.model.arch=efficientnet_b0"]
    model = compose(words).config["recipe"]["model"]
    assert (model["stem"], model["zero_init_residual"]) == ("auto", False)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t.c3_in1k"])
def test_a_network_of_timm_takes_its_files_and_gets_a_new_head(name: str, tmp_path: Path) -> None:
    torch.save(timm.create_model(name, num_classes=7).state_dict(), tmp_path / "w.pth")
    made = recipe(f"timm/{name}", 224, classes=4)
    made.model.check()
    network = made.build_model()
    _, fit = match_weights(open_weights(str(tmp_path / "w.pth"), "w"), made, network, "w")
    assert len(fit.anew) == 2 and len(fit.kept) + 2 == sum(
        not key.endswith("num_batches_tracked") for key in network.state_dict()
    )


def test_a_network_of_timm_for_one_size_is_made_for_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    network = recipe("timm/vit_tiny_patch16_224", 32, classes=3).build_model().eval()
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", lambda *names, **options: nn.Linear(**options))
        with pytest.raises(ConfigError, match="cannot be made for images of that size.*use recipe.data.pixels=224"):
            recipe("timm/vit_tiny_patch16_224", 40, classes=3).build_model()
    with pytest.raises(ConfigError, match="resnet18.nothing"):
        recipe("timm/resnet18.nothing", 40, classes=3).build_model()


@pytest.mark.parametrize(
    ("arch", "older"),
    [
        ("densenet121", {"denselayer1.norm1": "denselayer1.norm.1", "denselayer1.conv2": "denselayer1.conv.2"}),
        ("vit_b_32", {"mlp.0": "mlp.linear_1", "mlp.3": "mlp.linear_2"}),
    ],
)
def test_files_with_names_of_older_code_are_read(arch: str, older: dict[str, str], tmp_path: Path) -> None:
    made = recipe(arch, 32, classes=10)
    network = made.build_model()
    state = network.state_dict()
    for now, then in older.items():
        state = {name.replace(now, then): tensor for name, tensor in state.items()}
    assert state.keys() != network.state_dict().keys()
    torch.save(state, tmp_path / "old.pth")
    weights, fit = match_weights(open_weights(str(tmp_path / "old.pth"), "w"), made, network, "w", whole=True)
    name = next(name for name in fit.kept if next(iter(older)) in name)
    assert weights.read(name).equal(network.state_dict()[name])


@pytest.mark.slow
def test_weights_for_images_of_another_size_are_refused_with_the_key(tmp_path: Path) -> None:
    small, large = (recipe("vit_b_32", pixels, classes=10) for pixels in (32, 64))
    torch.save(small.build_model().state_dict(), tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="pos_embedding.*recipe.model and recipe.data.pixels that it was made with"):
        match_weights(open_weights(str(tmp_path / "w.pth"), "w"), large, large.build_model(), "w")


def test_auxiliary_outputs_count_in_the_loss_of_training() -> None:
    made = recipe("googlenet", classes=3)
    scores, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    one = made.loss(scores, targets)
    assert made.loss((scores, scores, scores), targets).allclose(1.6 * one)


@pytest.mark.parametrize(("arch", "own"), [("timm/regnetx_002", True), ("timm/resnet10t", False)])
def test_running_averages_of_timms_own_normalisations_have_a_rule(arch: str, own: bool) -> None:
    """Those with an activation in them have a forward pass of their own, of which nothing else is known."""
    network = build(arch, 32, 3)
    norms = [name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and recipe(arch).layout(network).buffers == (dict.fromkeys(norms, BufferUpdate.mean) if own else {})
