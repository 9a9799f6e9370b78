"""The models of `tests.support.mistakes`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mistake: str) -> Tensor:
        ctx.mistake = mistake
        return x / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.mistake == "backward_memory":
            return torch.empty(1 << 50)
        raise ValueError("no rule for this gradient")


class Part(nn.Module):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.narrow = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.mistake == "forward_raises":
            return x.reshape(7, -1)
        if self.mistake == "forward_wrong_width":
            return self.narrow(x)
        if self.mistake == "forward_memory":
            raise MemoryError
        if self.mistake == "forward_memory_of_torch":
            return x + torch.empty(1 << 50)[0]
        if self.mistake == "forward_memory_of_gpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        if self.mistake in ("backward_raises", "backward_memory"):
            return Halves.apply(x, self.mistake)  # type: ignore[return-value]
        if self.mistake == "backward_in_place":
            y = x.sigmoid()
            z = y * 2
            y.add_(1)
            return z
        return x


class Mistaken(nn.Module):
    def __init__(self, mistake: str, body: nn.Module) -> None:
        super().__init__()
        self.body, self.mistake = body, mistake
        self.tail = nn.Sequential(nn.Identity(), Part(mistake))
        self.tail[1].narrow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y
