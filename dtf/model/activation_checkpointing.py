"""Activation checkpointing: blocks free the results of their forward pass and compute them again in their backward
pass. Numbers stay bitwise the same.

Source: Chen et al. 2016 (arXiv:1604.06174); for `selective`, Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from dtf.api.layout import Layout
from dtf.api.options import Remat
from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.distributed.collectives import PARTIAL
from dtf.model.found_blocks import FoundLayout
from dtf.model.norm_calls import is_torchs_own
from dtf.model.seeded_dropout import SeededDropout

_aten = torch.ops.aten
_SAVED_OPERATORS = {
    *(_aten.convolution, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm),
    *(_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_for_cpu),
    *(_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention),
}
"""Most of the arithmetic of a network is in these: `selective` keeps their results."""


def modules_to_checkpoint(recipe: Recipe, model: nn.Module, layout: Layout, kind: Remat) -> list[str]:
    """Names of the modules of a recipe's model to checkpoint: modules of the layout's blocks that have layers inside.
    ConfigError when `kind` needs some and there are none.

    A block that is a single layer is left as it is: its input, which it keeps for its backward pass, would be kept
    anyway.
    """
    if kind is Remat.none:
        return []
    blocks = layout.blocks
    names = [name for block in blocks for name in block if any(True for _ in model.get_submodule(name).children())]
    if not names:
        needs = f"step.remat={kind.value} needs blocks to compute again"
        if isinstance(layout, FoundLayout):
            raise ConfigError(
                f"{needs}, and {type(model).__name__} has no module with layers inside of it; name blocks in "
                f"{type(recipe).__name__}.layout(), or use step.remat=none"
            )
        raise ConfigError(
            f"{needs}, and {type(recipe).__name__}.layout() names no block that is a module with layers inside; use "
            "step.remat=none"
        )
    return names


def apply_activation_checkpointing(model: nn.Module, names: Sequence[str], kind: Remat, masks: SeededDropout) -> None:
    """Checkpoint those of the named modules that `model` has, in place. `masks`: the seeded dropout of this model.

    Parameters, names, classes and hooks stay. ConfigError for a block that stages of a pipeline have cut.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name in modules:
            if type(modules[name]) is nn.Module:  # what is left of a block whose layers are called one by one
                raise ConfigError(
                    f"step.remat={kind.value} needs {name} in one piece, and the stages are cut inside it; use fewer, "
                    "or step.remat=none"
                )
            modules[name].forward = _CheckpointedForward(name, modules[name], kind, masks)


class _CheckpointedForward:
    """The forward of a module whose results are freed until its backward pass."""

    def __init__(self, name: str, module: nn.Module, kind: Remat, masks: SeededDropout) -> None:
        self._name, self._module, self._kind, self._masks = name, module, kind, masks
        # the class may change, see `seed_calls`
        self._own = None if getattr(module.forward, "__func__", None) is type(module).forward else module.forward
        self._norms: list[Any] = [part for part in module.modules() if is_torchs_own(part)]
        self._others = [part for part in module.modules() if part._buffers and not is_torchs_own(part)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        versions = _versions((args, kwargs))
        outputs = checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)
        if _versions((args, kwargs)) != versions:
            raise ConfigError(
                f"{self._name} changes its input in place, so it cannot be computed again; leave out inplace=True "
                "there, or use step.remat=none"
            )
        return outputs

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._own or partial(type(self._module).forward, self._module)
        if not self._masks.computes_again:
            return forward(*args, **kwargs)
        with self._masks.computing_again(self._module):
            return forward(*args, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """The contexts of the forward pass, and of the pass that computes it again."""
        again = self._masks.again(self._masks.key, self._masks.calls())
        if self._kind is Remat.blocks:
            return nullcontext(), self._recompute(again, nullcontext())
        results: deque[_Result] = deque()
        return _SaveResults(results), self._recompute(again, _ReuseResults(results, self._name))

    @contextmanager
    def _recompute(self, masks: AbstractContextManager, reuse: AbstractContextManager) -> Iterator[None]:
        """The state of the first forward: the dropout masks of its micro-batch, although others have passed since.
        Running averages have already counted this pass.

        They get weight 0, as the kernel must see the same tensors. torch itself restores the global generator and
        autocast.
        """
        momenta, versions = [norm.momentum for norm in self._norms], self._buffers()
        for norm in self._norms:
            norm.momentum = 0.0
        try:
            with masks, reuse:
                yield
        finally:  # most leave by an exception: torch stops when the last tensor that backward wants is there
            for norm, momentum in zip(self._norms, momenta, strict=True):
                norm.momentum = momentum
            if self._buffers() != versions:
                raise ConfigError(
                    f"the forward pass of {self._name} changes a buffer, and would do so twice in a step; use "
                    "step.remat=none"
                )

    def _buffers(self) -> list[tuple[int, int]]:
        return _versions([list(part._buffers.values()) for part in self._others])


class _Result(NamedTuple):
    operator: Any
    value: Any
    versions: list[tuple[int, int]]


class _SaveResults(TorchDispatchMode):
    """Keeps the results of expensive operators.

    torch's create_selective_checkpoint_contexts requires that every operator runs again, in the same number. Those that
    gather an FSDP layer do not.
    """

    supports_higher_order_operators = True  # torch refuses to run them otherwise

    def __init__(self, results: deque[_Result]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if _is_saved(func):
            alias = tree_map(_stand_in if PARTIAL.get() else _alias, value)
            self._results.append(_Result(func, alias, _versions(alias)))
        return value


class _ReuseResults(TorchDispatchMode):
    """Returns the results of expensive operators, in their order, instead of running them."""

    supports_higher_order_operators = True

    def __init__(self, results: deque[_Result], name: str) -> None:
        super().__init__()
        self._results, self._name = results, name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not _is_saved(func):
            return func(*args, **(kwargs or {}))
        if not self._results or self._results[0].operator is not func:
            raise ConfigError(
                f"{self._name} computes something else the second time; its forward must depend on its input alone, "
                "or use step.remat=none"
            )
        _, value, versions = self._results.popleft()
        if _versions(value) != versions:
            raise ConfigError(
                f"{self._name} changes the result of a convolution, matrix product or collective in place, which "
                "step.remat=selective keeps; leave out inplace=True after it, or use step.remat=blocks"
            )
        return value


def _is_saved(operator: Any) -> bool:
    """Whether the result of an operator is kept. Those of collectives are, so that nothing is sent twice: functional
    ones, such as those of dtf.distributed.collectives, have a result to keep.
    """
    return operator.namespace == "_c10d_functional" or getattr(operator, "overloadpacket", None) in _SAVED_OPERATORS


def _alias(value: Any) -> Any:
    """The same memory without its place in the graph. The guard makes both share one counter of changes."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _stand_in(value: Any) -> Any:
    """A tensor of the same shape without its memory. NaN, should anything read it."""
    return value.new_full((), torch.nan).expand(value.shape) if isinstance(value, Tensor) else value


def _versions(values: Any) -> list[tuple[int, int]]:
    """The tensors, and how often each was changed."""
    return [(id(value), value._version) for value in tree_leaves(values) if isinstance(value, Tensor)]
