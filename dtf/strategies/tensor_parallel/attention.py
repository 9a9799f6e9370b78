"""Attention by heads: a rank computes its heads from whole inputs, and the projection behind them sums over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtf.api.layout import Split, SplitBy
from dtf.core.errors import LayoutError
from dtf.distributed.collectives import total
from dtf.model.seeded_calls import HEADS
from dtf.strategies.tensor_parallel.layers import Divided
from dtf.strategies.tensor_parallel.slices import ranges
from dtf.strategies.tensor_parallel.windows import WINDOWS, DividedWindows


def attention_kind(name: str, module: nn.Module) -> tuple[type[Divided], Mapping[str, SplitBy]]:
    """The class of a module whose attention is split by heads, and the splits of what is in it. LayoutError when there
    is none.
    """
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return _Attention, {"out_proj": SplitBy(Split.row, module.num_heads)}
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if kind in WINDOWS:
        return DividedWindows, WINDOWS[kind](module)
    raise LayoutError(
        f"the recipe's layout splits {name} as heads, which {type(module).__name__} cannot be; split its layers by "
        "SplitBy(heads=...), see docs/strategies.md"
    )


def leave_fast_paths(model: nn.Module) -> None:
    """Have encoders of torch compute layer by layer in evaluations too: one kernel for all would take slices of weights
    for the whole.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path asks for this, and nothing else does
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


class _Attention(Divided):
    """nn.MultiheadAttention over this rank's heads."""

    _axes = MappingProxyType(
        {
            "in_proj_weight": 0,
            "in_proj_bias": 0,
            "q_proj_weight": 0,
            "k_proj_weight": 0,
            "v_proj_weight": 0,
            "bias_k": 2,
            "bias_v": 2,
        }
    )
    num_heads: int
    head_dim: int
    out_proj: nn.Module
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    bias_k: Tensor | None
    bias_v: Tensor | None

    def _ranges(self, key: str, width: int) -> list[tuple[int, int]]:
        parts = (width // 3,) * 3 if key.startswith("in_proj") else ()
        return ranges(f"{self._name}.{key}", SplitBy(heads=self.num_heads, parts=parts), width, self._mesh)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As that of torch."""
        batched = query.dim() == 3
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        swapped = batched and not self.batch_first
        q, k, v = self._projected(query, key, value, swapped, batched)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._mask(q, k, key_padding_mask, None if causal else attn_mask)
        if self.bias_k is not None and self.bias_v is not None:
            ends = (self._by_head(bias.expand(q.shape[0], 1, -1)) for bias in (self.bias_k, self.bias_v))
            k, v = (torch.cat([x, end], 2) for x, end in zip((k, v), ends, strict=True))
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        if mask is not None:
            mask = functional.pad(mask, (0, k.shape[2] - mask.shape[3]))
        dropout, weights = cast(float, self.dropout) if self.training else 0.0, None
        if need_weights:
            weights = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = (weights if mask is None else weights + mask).softmax(-1)
            weights = functional.dropout(weights, dropout, training=dropout > 0)
            y = weights @ v
            weights = self._weights(weights, average_attn_weights)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if swapped else y, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, swapped: bool, batched: bool) -> tuple[Tensor, ...]:
        """Queries, keys and values of this rank's heads (N, heads, length, head_dim)."""
        inputs = dict[int, Tensor]()
        for x in (query, key, value):
            inputs.setdefault(id(x), self.fanned(x if batched else x.unsqueeze(0)))
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if len(inputs) == 1 and self.in_proj_weight is not None:  # one product for all
            made = functional.linear(inputs[id(query)], self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            made = tuple(
                functional.linear(inputs[id(x)], weight, bias)
                for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
            )
        return tuple(self._by_head(x.transpose(0, 1) if swapped else x) for x in made)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, q: Tensor, k: Tensor, key_padding: Tensor | None, given: Tensor | None) -> Tensor | None:
        """What is added to the scores of this rank's heads, such as (N, heads, L, S); axes may have length 1."""
        mask = None
        if given is not None:
            mask = _added(given, q)
            heads, first, last = self.__dict__[HEADS]
            mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (-1, heads))[:, first:last]
        if key_padding is not None:
            added = _added(key_padding, q).view(q.shape[0], 1, 1, k.shape[2])
            mask = added if mask is None else mask + added
        return mask

    def _weights(self, weights: Tensor, average: bool) -> Tensor:
        """Those of all heads: their mean (N, L, S), or (N, heads, L, S)."""
        heads, first, last = self.__dict__[HEADS]
        part = weights.sum(1) / heads if average else functional.pad(weights, (0, 0, 0, 0, first, heads - last))
        return total(part, self._group, self._name)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added to scores."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)
