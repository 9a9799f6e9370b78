"""Attention in shifted windows, as of torchvision's Swin transformers, by heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtf.api.layout import Split, SplitBy
from dtf.model.seeded_calls import HEADS
from dtf.strategies.tensor_parallel.layers import Divided


def _inside(module: Any) -> dict[str, SplitBy]:
    """The splits of the layers of such attention."""
    heads, width = module.num_heads, module.proj.out_features
    splits = {"qkv": SplitBy(heads=heads, parts=(width,) * 3), "proj": SplitBy(Split.row, heads)}
    return splits | ({"cpb_mlp.2": SplitBy(heads=heads)} if hasattr(module, "cpb_mlp") else {})


_PLACE = "torchvision.models.swin_transformer.ShiftedWindowAttention"
WINDOWS: Mapping[str, Callable[[nn.Module], dict[str, SplitBy]]] = {_PLACE: _inside, f"{_PLACE}V2": _inside}
"""Full name of a class -> what makes the splits of the layers in such a module."""


class DividedWindows(Divided):
    """Shifted windows over this rank's heads."""

    _axes = MappingProxyType({"relative_position_bias_table": 1, "logit_scale": 0})
    window_size: list[int]
    shift_size: list[int]
    attention_dropout: float
    dropout: float
    qkv: nn.Linear
    proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> the same."""
        height, width = x.shape[1:3]
        windows, mask, shift, padded = self._windows(x)
        _, first, last = self.__dict__[HEADS]
        q, k, v = self._projected(windows, last - first)
        if "logit_scale" in self._parameters:
            scale = cast(Tensor, self.logit_scale).clamp(max=math.log(100.0)).exp()
            scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1) * scale
        else:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self._bias(last - first)
        if mask is not None:  # (windows, T, T)
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        weights = functional.dropout(scores.softmax(-1), self.attention_dropout, self.training)
        y = self.proj((weights @ v).transpose(1, 2).flatten(2))
        y = functional.dropout(y, self.dropout, self.training)
        counts = [length // size for length, size in zip(padded, self.window_size, strict=True)]
        y = y.view(x.shape[0], *counts, *self.window_size, -1).transpose(2, 3).reshape(x.shape[0], *padded, -1)
        if sum(shift):
            y = y.roll(tuple(shift), (1, 2))
        return y[:, :height, :width].contiguous()

    def _windows(self, x: Tensor) -> tuple[Tensor, Tensor | None, list[int], list[int]]:
        """The windows (B * windows, T, C); what is added to scores (windows, T, T) between parts of a shifted one that
        are no neighbours; the shift; height and width with padding.
        """
        sizes = self.window_size
        ends = [-length % size for length, size in zip(x.shape[1:3], sizes, strict=True)]
        x = functional.pad(x, (0, 0, 0, ends[1], 0, ends[0]))
        padded, mask = [*x.shape[1:3]], None
        # a window as large as the image is not moved
        shift = [0 if n <= size else step for step, size, n in zip(self.shift_size, sizes, padded, strict=True)]
        if sum(shift):
            x = x.roll((-shift[0], -shift[1]), (1, 2))
            places = [torch.arange(n, device=x.device) for n in padded]
            bands = [
                (at >= n - size).long() + (at >= n - step)
                for at, n, size, step in zip(places, padded, sizes, shift, strict=True)
            ]
            areas = self._parted((3 * bands[0][:, None] + bands[1])[None, :, :, None]).squeeze(-1)
            mask = x.new_zeros(()).masked_fill(areas[:, None] != areas[:, :, None], -100.0)
        return self._parted(x), mask, shift, padded

    def _parted(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> windows (B * windows, T, C)."""
        (high, wide), (batch, height, width, _) = self.window_size, x.shape
        x = x.view(batch, height // high, high, width // wide, wide, -1).transpose(2, 3)
        return x.flatten(3, 4).flatten(0, 2)

    def _projected(self, x: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Queries, keys and values (B * windows, heads, T, channels of a head)."""
        if "logit_scale" not in self._parameters or self.qkv.bias is None:
            made = self.qkv(x)
        else:  # keys have no bias there
            q, k, v = self.qkv.bias.chunk(3)
            made = functional.linear(self.fanned(x), self.qkv.weight, torch.cat([q, torch.zeros_like(k), v]))
        return tuple(part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in made.chunk(3, -1))

    def _bias(self, heads: int) -> Tensor:
        """Of the relative positions of two places of a window, (1, heads, T, T)."""
        places = cast(Tensor, self.relative_position_index)
        if "logit_scale" not in self._parameters:
            table = cast(Tensor, self.relative_position_bias_table)
        else:
            table = cast(nn.Module, self.cpb_mlp)(self.relative_coords_table).view(-1, heads)
        bias = table[places].view(*[math.prod(self.window_size)] * 2, heads).permute(2, 0, 1).contiguous()[None]
        return bias if "logit_scale" not in self._parameters else 16 * bias.sigmoid()
