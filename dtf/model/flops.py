"""The arithmetic of a model: floating-point operations of its matrix products and convolutions, by their shapes.

A product of (m, k) and (k, n) is 2 m k n operations: a multiplication and an addition each. Attention counts as if it
had no mask, whichever kernel computes it. torch.utils.flop_counter has no formula for attention on a CPU, counts the
scores that kernels compute again, and counts the weights of a grouped convolution in backward as if it had one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def _product(a: Tensor, b: Tensor) -> int:
    """(..., m, k) times (..., k, n), or (m, k) times (k)."""
    return 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _of_groups(a: Tensor, b: Tensor) -> int:
    """A product for each group, such as of the rows of each expert: where an operand has two axes, one of them is that
    of all groups together.
    """
    return _product(a, b) // (len(a) if a.dim() > b.dim() else 1)


def _convolution(weight: Tensor, small: Tensor) -> int:
    """`small`: the output, of a transposed one the input: there each position takes all weights once."""
    return 2 * weight.numel() * (small.numel() // max(1, small.shape[1]))


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    transposed, wanted = rest[4], rest[7]
    return (wanted[0] + wanted[1]) * _convolution(weight, x if transposed else gradient)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Queries (b, h, s, d), keys (b, h, t, d) and values (b, h, t, e); several heads of queries may share keys."""
    *heads, queries, width = query.shape
    pairs = queries * key.shape[-2]
    for count in heads:
        pairs *= count
    return 2 * pairs * (width + value.shape[-1])


def _recurrent(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Each step of each row takes all matrices once. `x`: (..., width)."""
    return 2 * (x.numel() // max(1, x.shape[-1])) * sum(weight.numel() for weight in weights if weight.dim() == 2)


_FORMULAS: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "mm": lambda args, out: _product(args[0], args[1]),
    "mv": lambda args, out: _product(args[0], args[1]),
    "bmm": lambda args, out: _product(args[0], args[1]),
    "_scaled_mm": lambda args, out: _product(args[0], args[1]),
    "_grouped_mm": lambda args, out: _of_groups(args[0], args[1]),
    "addmm": lambda args, out: _product(args[1], args[2]),
    "addmv": lambda args, out: _product(args[1], args[2]),
    "baddbmm": lambda args, out: _product(args[1], args[2]),
    "convolution": lambda args, out: _convolution(args[1], args[0] if args[6] else out),
    "convolution_backward": lambda args, out: _convolution_backward(*args),
    "_cudnn_rnn": lambda args, out: _recurrent(args[0], args[1]),
    "_cudnn_rnn_backward": lambda args, out: 2 * _recurrent(args[0], args[1]),
    "mkldnn_rnn_layer": lambda args, out: _recurrent(args[0], args[1:3]),
    "mkldnn_rnn_layer_backward": lambda args, out: 2 * _recurrent(args[0], args[1:3]),
}
_FORMULAS |= {
    f"_scaled_dot_product_{kernel}": lambda args, out: _attention(*args[:3])
    for kernel in (
        *("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"),
        "fused_attention_overrideable",
    )
}
_FORMULAS |= {  # without the scores that the kernel computes again
    f"{name}_backward": lambda args, out: 2 * _attention(*args[1:4])
    for name in [*_FORMULAS]
    if name.startswith("_scaled_dot_product_")
}


def flops(operator: Any, args: Sequence[Any], results: Any) -> int:
    """Of one call of an operator of torch; 0 for one that is neither product nor convolution."""
    if getattr(operator, "namespace", "") != "aten":
        return 0
    formula = _FORMULAS.get(operator.overloadpacket.__name__)
    return formula(args, results) if formula is not None else 0
