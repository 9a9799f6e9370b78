"""Whether code of a model or a loss talks to other ranks: each computes other rows, and other numbers of passes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dtf.core.errors import ConfigError

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


class Communication(TorchDispatchMode):
    """A context. `found`: names of the collective operations and messages of `torch.distributed` in it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            self.found.append(func._schema.name.partition("::")[2].strip("_"))
        return func(*args, **(kwargs or {}))

    def refuse(self, who: str) -> None:
        """Raise ConfigError where `who` talked to other ranks."""
        if self.found:
            raise ConfigError(
                f"{who} talks to other ranks itself ({self.found[0]}), which compute other rows, and may have more "
                "micro-batches: its numbers would depend on the number of processes. Leave torch.distributed out; rows "
                "that a loss couples are those of a micro-batch, of step.micro_batch_rows"
            )
