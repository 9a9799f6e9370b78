"""What one pass of a model shows of its graph, its parameters and its normalisations, and a graph that reaches all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.model.init import HOOKS_ON_SUMS
from dtf.model.seeded_dropout import SeededDropout


class Reached(torch.autograd.Function):
    """The first argument. Backward comes to all others too, without a gradient for them."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        ctx.others = len(others)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient, *([None] * ctx.others)


def recomputes_inside(total: Tensor) -> bool:
    """Whether a part of a graph is computed again by a backward pass of its own (reentrant checkpointing), which comes
    to parameters by itself.
    """
    waiting, seen = [total.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def refuse_hooks_on_sums(model: nn.Module, instead: str) -> None:
    """Raise ConfigError for a parameter to which its author gave a hook that runs when a gradient was added. `instead`:
    what to use.
    """
    for name in vars(model).get(HOOKS_ON_SUMS, ()):
        raise ConfigError(
            f"{name} has a hook of register_post_accumulate_grad_hook, which runs on the sum of what this rank has "
            f"computed so far, before ranks add up; use register_hook, or {instead}"
        )


@contextmanager
def count_calls(layers: Mapping[str, nn.Module], masks: SeededDropout) -> Iterator[dict[str, int]]:
    """A context. Yields how often each layer is called in it, without what dtf itself computes again."""
    calls = dict.fromkeys(layers, 0)

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object) -> None:
            calls[name] += not masks.computes_again

        return hook

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
