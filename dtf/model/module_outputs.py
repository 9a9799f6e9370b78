"""Sums over the outputs of each module, by which two runs find the first module that computes something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtf.distributed.sharding import is_dtensor, local


class ModuleOutputs:
    """Adds up, for each module of a model by name, the outputs of its passes: their sum, that of their sizes and that
    of their squares. Modules are in the order in which they first finished.

    What it sees of a DTensor is the local part. `counts`: whether passes count now; those over padding do not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.counts = True
        self._sums: dict[str, Tensor] = {}
        self._hooks = [
            module.register_forward_hook(lambda module, inputs, outputs, name=name: self._add(name, outputs))
            for name, module in model.named_modules()
        ]

    def close(self) -> dict[str, list[float]]:
        """Stop, and return the three sums by name. Waits for the device."""
        for hook in self._hooks:
            hook.remove()
        return {name: sums.tolist() for name, sums in self._sums.items()}

    @torch.no_grad()
    def _add(self, name: str, outputs: Any) -> None:
        if not self.counts:
            return
        for value in tree_leaves(outputs):
            if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta:
                flat = (local(value) if is_dtensor(value) else value).detach().double()
                sums = torch.stack([flat.sum(), flat.abs().sum(), flat.square().sum()])
                self._sums[name] = self._sums[name] + sums if name in self._sums else sums
