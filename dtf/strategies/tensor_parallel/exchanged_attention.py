"""Attention whose positions ranks divide: an all-to-all gives each of them all positions of some heads, another one
gives its positions back. Source: Jacobs et al. 2023 (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dtf.core.errors import LayoutError
from dtf.distributed.collectives import exchanged
from dtf.distributed.sharding import balanced, bounds


class Exchanging:
    """A module that computes attention by torch's function, from this rank's positions."""

    _dtf_exchange: Exchange

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._dtf_exchange as exchange:
            outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        exchange.check()
        return outputs

    forward = _forward


class Exchange(TorchFunctionMode):
    """A context in which attention has all positions of some of the heads, and gives these positions back."""

    def __init__(self, places: Callable[[], tuple[int, int, int]], name: str, group: dist.ProcessGroup) -> None:
        """`places`: how many positions there are, this rank's first and last + 1."""
        super().__init__()
        self._places, self._name, self._group = places, name, group
        self._calls = 0
        self._causal: dict[int, bool] = {}  # number of the call -> whether it is causal

    def check(self) -> None:
        """Raise LayoutError where the module has not computed attention by torch's function."""
        calls, self._calls = self._calls, 0
        if not calls:
            raise LayoutError(
                f"{self._name} computes attention without F.scaled_dot_product_attention, and so from the positions of "
                "one rank alone; use that function, or strategy.context=1"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        kwargs |= zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)
        query, key, value = (kwargs.pop(name, None) for name in ("query", "key", "value"))
        (width, first, last), heads = self._places(), query.shape[-3]
        self._calls += 1
        if last - first > 1:
            self._causal[self._calls] = bool(kwargs.get("is_causal"))
        elif width > 1:  # the module may ask whether there is more than one: on this rank there is not
            kwargs["is_causal"] = self._causal.get(self._calls, bool(kwargs.get("is_causal")))
        grouped = bool(kwargs.get("enable_gqa"))
        known = all(x.dim() == 4 and x.shape[-2] == last - first for x in (query, key, value))
        if not known or not (grouped or heads == key.shape[-3] == value.shape[-3]):
            raise LayoutError(
                f"{self._name} attends with queries, keys and values of shapes {tuple(query.shape)}, "
                f"{tuple(key.shape)} and {tuple(value.shape)}; strategy.context divides attention of the "
                f"{last - first} positions of a rank among themselves, with as many heads (B, heads, positions, width)"
            )
        if kwargs.get("enable_gqa"):  # keys and values of a group may be needed by several ranks
            key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
            kwargs["enable_gqa"] = False
        by_heads = [
            exchanged(x, (1, balanced), (2, bounds), width, self._group, self._name) for x in (query, key, value)
        ]
        if kwargs.get("attn_mask") is not None:
            kwargs["attn_mask"] = self._mask(kwargs["attn_mask"], width, heads)
        taken = func(*by_heads, **kwargs)
        return exchanged(taken, (2, bounds), (1, balanced), heads, self._group, self._name)

    def _mask(self, mask: Tensor, width: int, heads: int) -> Tensor:
        """What is added to the scores of this rank's heads, of a mask (..., T, T) or (..., heads, T, T)."""
        if any(n not in (1, width) for n in mask.shape[-2:]):
            raise LayoutError(
                f"{self._name} attends with a mask of shape {tuple(mask.shape)}; strategy.context gives attention "
                f"all {width} positions, so its mask must have them: make it outside of the layout's positions and "
                "give it as bool, as integers (B, T) are cut like numbers of positions; or use is_causal=True"
            )
        if mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        first, last = balanced(heads, self._group.size(), dist.get_rank(self._group))
        return mask.narrow(-3, first, last - first)
