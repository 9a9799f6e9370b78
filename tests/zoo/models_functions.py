"""Models whose passes are no plain chain of modules: transforms of functions, threads, caches, samplers, scans."""

from __future__ import annotations

# pyright: reportCallIssue=false
import copy
import functools
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import ops

from tests.zoo.entries import cross_entropy, images, vectors, zoo_model

CLASSES = 4


@zoo_model("gradients_by_transform", vectors(), cross_entropy, "functions")
class Transformed(nn.Module):
    """Features are gradients of a network in its inputs, row by row (score models)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        def score(row: Tensor) -> Tensor:
            return torch.tanh(self.first(row)).sum()

        return self.last(torch.func.vmap(torch.func.grad(score))(x) + self.first(x))


@zoo_model("spatial_transformer", images(12, 3, 2), cross_entropy, "functions")
class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Sequential(nn.Conv2d(3, 4, 5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 6))
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)
        with torch.no_grad():
            self.place[3].weight.zero_()
            self.place[3].bias.copy_(torch.tensor([1.0, 0, 0, 0, 1.0, 0]))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.place(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(torch.relu(self.conv(F.grid_sample(x, grid, align_corners=False))).mean((2, 3)))


@zoo_model("deformable_regions", images(12, 3, 2), cross_entropy, "functions")
class Deformable(nn.Module):
    """A deformable convolution, and a region of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.weight = nn.Conv2d(3, 18, 3, padding=1), nn.Parameter(0.1 * torch.randn(8, 3, 3, 3))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(ops.deform_conv2d(x, 0.1 * self.offsets(x), self.weight, padding=(1, 1)))
        numbers = torch.arange(len(x), dtype=x.dtype)[:, None]
        box = torch.tensor([[1.0, 1.0, 9.0, 9.0]], dtype=x.dtype).expand(len(x), -1)
        return self.head(ops.roi_align(y, torch.cat([numbers, box], 1), 2).flatten(1))


@zoo_model("state_space_by_fourier", vectors(), cross_entropy, "functions")
class StateSpace(nn.Module):
    """A long convolution whose kernel is a sum of damped waves (as in S4D)."""

    def __init__(self) -> None:
        super().__init__()
        self.damping, self.frequency = nn.Parameter(-torch.rand(6)), nn.Parameter(torch.randn(6))
        self.mix, self.head = nn.Parameter(torch.randn(6)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(8, dtype=x.dtype)[:, None]
        kernel = (self.mix * torch.exp(torch.complex(self.damping, self.frequency) * times)).sum(1).real
        return self.head(torch.fft.irfft(torch.fft.rfft(x, 16) * torch.fft.rfft(kernel, 16), 16)[:, :8])


@zoo_model("random_field", vectors(), cross_entropy, "functions")
class RandomField(nn.Module):
    """Sums over all sequences of labels by a scan (a linear-chain conditional random field)."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.moves = nn.Linear(2, CLASSES), nn.Parameter(0.1 * torch.randn(CLASSES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        emitted = self.emit(x.reshape(len(x), 4, 2))
        scores = emitted[:, 0]
        for i in range(1, 4):
            scores = torch.logsumexp(scores.unsqueeze(2) + self.moves, 1) + emitted[:, i]
        return scores


@zoo_model("forward_in_a_thread", vectors(), cross_entropy, "functions")
class Threaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.first(x)))
        thread.start()
        thread.join()
        return self.last(torch.relu(found[0]))


@zoo_model("copied_in_the_pass", vectors(), cross_entropy, "functions")
class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + copy.deepcopy(self.first).requires_grad_(False)(x))


@zoo_model("cached_function", vectors(), cross_entropy, "functions")
class CachedFunction(nn.Module):
    """Caches a mask for each width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    @staticmethod
    @functools.cache
    def mask(width: int) -> Tensor:
        return torch.arange(width).double().cos()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) * self.mask(8).to(x.dtype))


@zoo_model("gradients_of_its_parameters", vectors(), cross_entropy, "functions")
class Sharpness(nn.Module):
    """Adds to its scores what a step along gradients of its own weights would change (sharpness-aware training)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if not self.training:
            return self.last(hidden)
        scores = self.last(hidden)
        (gradient,) = torch.autograd.grad(scores.square().sum(), self.last.weight, create_graph=True)
        return scores + 0.01 * hidden @ gradient.T / len(x)


@zoo_model("compiled_whole", vectors(), cross_entropy, "functions")
def compiled_whole() -> Any:
    return torch.compile(CachedFunction(), backend="eager")
