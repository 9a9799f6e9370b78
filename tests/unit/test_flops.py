"""The arithmetic of a pass, against numbers by hand and against torchvision's published ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dtf.model.memory import Footprint, row_flops


def flops(model: Any, *inputs: Tensor, backward: bool = True) -> int:
    with Footprint() as found:
        outputs = model(*inputs)
        if backward:
            outputs.sum().backward()
    return found.whole_flops


def test_an_mlp_by_hand() -> None:
    """Forward; then gradients of all weights, and of all inputs but the first."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    first, others = 3 * 5, 5 * 7 + 7 * 2
    assert flops(model, torch.ones(4, 3)) == 4 * 2 * (2 * first + 3 * others)
    model[2].requires_grad_(False)  # its inputs still need gradients
    assert flops(model, torch.ones(4, 3)) == 4 * 2 * (2 * first + 2 * 5 * 7 + 3 * 7 * 2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_by_hand(groups: int) -> None:
    layer = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=groups)
    once = 2 * 5 * (3 * 4) * 8 * (4 // groups) * 9  # rows, positions of the output, weights
    assert flops(layer, torch.ones(5, 4, 6, 8)) == 2 * once
    assert flops(layer, torch.ones(5, 4, 6, 8, requires_grad=True)) == 3 * once


def test_a_transposed_convolution_takes_each_input_once() -> None:
    layer = nn.ConvTranspose1d(4, 6, 5, stride=3)
    assert flops(layer, torch.ones(2, 4, 7, requires_grad=True)) == 3 * 2 * (2 * 7) * 4 * 6 * 5


def test_experts_take_their_own_rows() -> None:
    """Eight rows of three experts; gradients of the rows and of the weights too."""
    rows, weights = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((8, 16), (3, 16, 32)))
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    assert flops(lambda: torch._grouped_mm(rows, weights, offs=ends).square()) == 3 * 2 * 8 * 16 * 32


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_same_by_every_kernel(kernel: SDPBackend, causal: bool) -> None:
    """Two products of 2 b h s t d in forward and four in backward; a mask changes nothing."""
    query, key, value = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (16, 16, 16))
    with sdpa_kernel(kernel):
        found = flops(lambda: nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal))
    assert found == 6 * 2 * (2 * 3) * 16 * 16 * 8


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_layers(cell: type[nn.Module]) -> None:
    """By a kernel of their own, or by products: each step takes all matrices. By products the state that the first one
    begins with gets no gradient.
    """
    layer, steps, rows = cell(5, 7, num_layers=2), 6, 3
    shapes = [p.shape for p in layer.parameters() if p.dim() == 2]
    begins = 0 if cell is nn.LSTM else rows * sum(gates * width for gates, width in shapes[1::2])
    expected = 2 * (3 * steps * rows * sum(gates * width for gates, width in shapes) - begins)
    assert flops(lambda x: layer(x)[0], torch.randn(steps, rows, 5, requires_grad=True)) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_does_not_count(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    head, x = nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    plain = flops(lambda x: head(block(x)), x)
    assert flops(lambda x: head(checkpoint(block, x, use_reentrant=reentrant)), x) == plain == 3 * 3 * 2 * 4 * 8 * 8
    # backward begins with what is computed again
    assert flops(lambda x: checkpoint(block, x, use_reentrant=False), x) == 2 * 3 * 2 * 4 * 8 * 8


def test_gradients_of_gradients_count() -> None:
    """With a penalty on the gradient: forward, the gradient of the input, and gradients of both."""
    layer, x = nn.Linear(8, 8, bias=False), torch.ones(4, 8, requires_grad=True)

    def penalised(x: Tensor) -> Tensor:
        y = layer(x).square()
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    assert flops(penalised, x) == (2 + 2 + 2) * 2 * 4 * 8 * 8


@pytest.mark.parametrize(
    ("arch", "giga"),
    [
        ("resnet18", 1.814),
        pytest.param("resnet50", 4.089, marks=pytest.mark.slow),
        pytest.param("resnext50_32x4d", 4.23, marks=pytest.mark.slow),
        ("mobilenet_v2", 0.301),
    ],
)
def test_torchvisions_networks_as_published(arch: str, giga: float) -> None:
    """torchvision counts multiplications with their additions, of a forward pass over one image."""
    assert next(iter(torchvision.models.get_model_weights(arch))).meta["_ops"] == giga
    with torch.device("meta"):
        model, image = torchvision.models.get_model(arch), torch.empty(1, 3, 224, 224)
    forward = flops(model, image, backward=False)
    assert forward == pytest.approx(2e9 * giga, rel=0.01)
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))  # its input needs no gradient
    assert flops(model, image) == 3 * forward - flops(first, image, backward=False)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((200, 400), 100.0),
        ((201, 401), 100.0),  # such as of a norm of the weights
        ((300, 500), None),  # a block was left out by chance the second time
        ((200, 800), None),  # all rows are compared with each other
        ((200, 100), None),
        ((0, 0), 0.0),
    ],
)
def test_operations_grow_with_the_rows_or_are_unknown(counts: tuple[int, int], expected: float | None) -> None:
    trials = [(rows, Footprint()) for rows in (2, 4)]
    for (_, footprint), count in zip(trials, counts, strict=True):
        footprint.whole_flops = count
    assert row_flops(trials) == expected


def test_parts_of_the_model_add_up_over_ranks() -> None:
    first, second = nn.Linear(8, 6, bias=False), nn.Linear(6, 2, bias=False)  # two of six channels, and a whole layer
    here = nn.Parameter(first.weight.detach()[:2].clone())
    trials = []
    for rows in (2, 4):
        with Footprint() as found:
            found.add_parts([here])
            x = torch.ones(rows, 8, requires_grad=True)
            (x @ here.t()).sum().backward()
            second(torch.ones(rows, 6)).sum().backward()
        trials.append((rows, found))
    assert row_flops(trials, lambda parts: 3 * parts) == 3 * 2 * 8 * 6 + 2 * 2 * 6 * 2
