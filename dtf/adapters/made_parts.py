"""The LightningModules that a rank has made: each is made anew, as one is trained and another tried."""

from __future__ import annotations

import weakref

from torch import nn

from dtf.core.errors import ConfigError


class MadeParts:
    """Of all modules so far."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[nn.Module]] = {}  # by id: the hash of a metric depends on its state

    def add(self, module: nn.Module, maker: str) -> None:
        """Count a module in. ConfigError where it has a part of an earlier one."""
        for name, part in module.named_modules():
            earlier = self._seen.get(id(part))
            if earlier is not None and earlier() is part:
                raise ConfigError(
                    f"{maker}() gives {name or 'the module'} that it gave before; a rank makes several modules: make "
                    "all parts in the function, or in the constructor"
                )
        self._seen |= {id(part): weakref.ref(part) for part in module.modules()}
