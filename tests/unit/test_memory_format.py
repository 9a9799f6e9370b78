"""Channels last in memory: which models bear it, and that trying it leaves no trace."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from dtf.model.memory_format import channels_first, channels_last, convolves, objection, weights_channels_last
from tests.support.placed_model import KINDS, WHY

LAST = torch.channels_last


class Net(nn.Module):
    """Convolutions, batch statistics, dropout, and `between` before the second convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.second, self.head = nn.Dropout(0.5), nn.Conv2d(8, 4, 3, padding=1), nn.Linear(4, 2)
        self.seen = 0

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.drop(relu(self.norm(self.first(x))))
        return self.head(self.second(self.between(x)).mean((2, 3)))


class Views(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1).view(x.shape)


class ViewsInTraining(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1).view(x.shape) if self.training else x


class Copies(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.flatten(1).reshape(x.shape).contiguous()


class ReadsMemory(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.as_strided(x.shape, torch.empty(x.shape).stride()).contiguous(memory_format=LAST)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        spread = self.weight.view(len(self.weight), -1).std(1)
        return self._conv_forward(x, self.weight / spread[:, None, None, None], self.bias)


class ViewsWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = Standardised(8, 4, 3, padding=1)


class WantsManyRows(Net):
    """As a batch normalisation of parts of a batch does in training."""

    def between(self, x: Tensor) -> Tensor:
        if self.training and len(x) < 4:
            raise ValueError("Expected more than 1 value per channel when training")
        return x


class Merges(Net):
    """Evaluation with a weight into which another one is merged, and draws from generators that torch does not seed."""

    merged = False

    def train(self, mode: bool = True) -> nn.Module:
        if self.merged is mode:
            self.first.weight.data += 0.1 * (1 if not mode else -1)
            self.merged = not mode
        return super().train(mode)

    def between(self, x: Tensor) -> Tensor:
        return x * random.random() * np.random.rand()


class Fails(Net):
    def between(self, x: Tensor) -> Tensor:
        raise LookupError("no device")


def task(inputs: Any = None) -> Any:
    rows = torch.randn(2, 3, 6, 6, dtype=torch.float64) if inputs is None else inputs
    return SimpleNamespace(sample=lambda count: rows, recipe=SimpleNamespace())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Net, ""),
        (Views, "the model does not compute images whose channels are last: view size is not compatible"),
        (ViewsInTraining, "the model does not compute images whose channels are last: view size is not compatible"),
        (Copies, "second gets its input with channels first"),
        (ReadsMemory, "the model's outputs are others with channels last: it reads memory by its place"),
        (ViewsWeights, "the model does not compute images whose channels are last: view size is not compatible"),
        (WantsManyRows, "two rows cannot be computed here (ValueError)"),
        (Merges, ""),
        (Fails, "two rows cannot be computed here (LookupError)"),
        *((KINDS[kind], why) for kind, why in WHY.items()),
    ],
)
def test_a_model_shows_whether_it_bears_channels_last(kind: type[Any], why: str) -> None:
    model, rows = kind(), task()
    drops = model.drop if isinstance(model, Net) else model.drops[0]
    drops.eval()
    model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    others = random.getstate(), str(np.random.get_state())
    found = objection(rows, model, 8)
    assert found.startswith(why) and bool(found) is bool(why)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.weight.is_contiguous() for module in (model.first, model.second))
    assert torch.equal(torch.get_rng_state(), drawn) and getattr(model, "seen", 0) == 0
    assert type(drops) is nn.Dropout and not {"_masks", "_name", "_draws"} & vars(drops).keys()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert others == (random.getstate(), str(np.random.get_state()))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_with_more_weights_than_outputs_is_left_as_it_is() -> None:
    rows, model = task(), Net().eval()  # 504 weights, and 432 outputs of a row
    assert objection(rows, model, 1) == "convolutions have more weights (504) than outputs (432 of 1 rows)"
    assert objection(rows, model, 2) == ""


def test_inputs_that_are_no_images_stay_as_they_are() -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.view(-1, 1, 4, 4)).sum((1, 2, 3))

    assert objection(task(torch.randn(2, 16)), Folds(), 8) == "no input has the shape (B, C, H, W)"
    inputs = {"image": torch.randn(2, 3, 4, 5), "id": torch.ones(2, 3, 4, 5, dtype=torch.long), "x": torch.randn(2, 3)}
    put = channels_last(inputs)
    assert put["image"].is_contiguous(memory_format=LAST) and torch.equal(put["image"], inputs["image"])
    assert put["id"] is inputs["id"] and put["x"] is inputs["x"]
    back = channels_first(put)
    assert back["image"].is_contiguous() and torch.equal(back["image"], inputs["image"]) and back["x"] is inputs["x"]


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        pytest.param(name, pixels, marks=() if name in ("resnet18", "mobilenet_v2") else pytest.mark.slow)
        for name in (
            "resnet18",
            "mobilenet_v2",
            "resnet50",
            "efficientnet_b0",
            "convnext_tiny",
            "densenet121",
            "vgg11",
            "vgg11_bn",
            "swin_t",
        )
        for pixels in (32, 64)
    ],
)
def test_networks_of_torchvision_bear_channels_last(name: str, pixels: int) -> None:
    """Also where batches are a value or two for each channel, whose statistics are mostly rounding."""
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    assert objection(task(torch.randn(2, 3, pixels, pixels)), models.get_model(name, num_classes=8), 1 << 20) == ""


def test_data_with_channels_last_are_tried_with_channels_first() -> None:
    rows = torch.randn(2, 3, 6, 6).contiguous(memory_format=LAST)
    assert objection(task(rows), KINDS["dropout"](), 8) == WHY["dropout"]


def test_weights_in_the_memory_of_others_stay_there() -> None:
    model = Net()
    model.alias = nn.Parameter(model.first.weight.data)
    flat = torch.randn(4 * 8 * 9 + 5)
    model.second.weight.data = flat[5:].view(4, 8, 3, 3)
    weights_channels_last(model)
    assert model.first.weight.data_ptr() == model.alias.data_ptr()
    assert model.second.weight.data_ptr() == flat[5:].data_ptr()


def test_weights_keep_their_numbers_and_who_shares_them() -> None:
    model = Net()
    model.third = nn.Conv2d(3, 8, 3)
    model.third.weight = model.first.weight
    before, parameter = model.first.weight.detach().clone(), model.first.weight
    weights_channels_last(model)
    assert model.first.weight is parameter is model.third.weight and torch.equal(parameter, before)
    assert parameter.is_contiguous(memory_format=LAST) and model.head.weight.is_contiguous()
    assert convolves(model) and not convolves(model.head)
