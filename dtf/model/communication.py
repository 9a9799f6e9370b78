"""Whether code of a model or a loss talks to other ranks: each computes other rows, and other numbers of passes."""

from __future__ import annotations

import os
import sys
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dtf.core.author_line import DTF
from dtf.core.errors import ConfigError

_TORCH = f"{torch.__path__[0]}{os.sep}"
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


class Communication(TorchDispatchMode):
    """A context. `found`: names of the collective operations and messages of `torch.distributed` in it, and
    get_world_size where it was asked for the number of several processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Self:
        asked = dist.get_world_size

        def get_world_size(group: Any = None) -> int:
            size = asked(group)
            if size > 1 and not sys._getframe(1).f_code.co_filename.startswith((_TORCH, DTF)):
                self.found.append("get_world_size")
            return size

        self._asked, dist.get_world_size = asked, get_world_size
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        dist.get_world_size = self._asked

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
