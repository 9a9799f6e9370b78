"""Sums over the outputs of each module, by which two runs find the first module that computes something else."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtf.distributed.sharding import is_dtensor, local

_thread = threading.local()


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context for passes of this thread that leave no trace: their outputs are not added up."""
    before, _thread.paused = getattr(_thread, "paused", False), True
    try:
        yield
    finally:
        _thread.paused = before


class ModuleOutputs:
    """Adds up the outputs of each module of a model over its passes. Keys are names of modules, in the order in which
    they first finished; of a module that a pass calls again, `name, call 2` and so on. What it sees of a DTensor is the
    local part. Passes that are computed again (`step.remat`) do not count.

    `root`: whether the model's own output counts. `opaque`: names of modules that are not looked into; "" is the
    model. `counts`: whether passes count now; those over padding do not.
    """

    def __init__(self, model: nn.Module, root: bool = True, opaque: Collection[str] = ()) -> None:
        self.counts = True
        self._sums: dict[str, Tensor] = {}
        self._calls = Counter[str]()
        self._hooks = [model.register_forward_pre_hook(lambda module, inputs: self._calls.clear())]
        for name, module in model.named_modules():
            within = any(name != other and f"{name}.".startswith(f"{other}." * bool(other)) for other in opaque)
            if (name or root) and not within:
                hook = lambda module, inputs, outputs, name=name: self._add(name, outputs)  # noqa: E731
                self._hooks.append(module.register_forward_hook(hook))

    def close(self) -> dict[str, list[float]]:
        """Stop, and return five numbers by key: the sums of outputs, of their sizes, of their squares, and of outputs
        times a weight for each place in a row; and the numbers of a row. Waits for the device.
        """
        for hook in self._hooks:
            hook.remove()
        return {name: sums.tolist() for name, sums in self._sums.items()}

    @torch.no_grad()
    def _add(self, name: str, outputs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # computed again in a backward pass, on a GPU by another thread
        self._calls[name] += 1
        if not self.counts or getattr(_thread, "paused", False):
            return
        call = self._calls[name]
        key = name if call == 1 else f"{name}, call {call}"
        for value in tree_leaves(outputs):
            if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta and value.numel():
                part = (local(value) if is_dtensor(value) else value).detach().double()
                rows = part.reshape(part.shape[0] if part.dim() else 1, -1)
                weights = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype).cos()
                sums = torch.stack([rows.sum(), rows.abs().sum(), rows.square().sum(), (rows @ weights).sum()])
                sums = torch.cat([sums, sums.new_full((1,), rows.shape[1])])
                if key in self._sums:
                    sums[:-1] += self._sums[key][:-1]
                self._sums[key] = sums
