"""The models of another library that a rank has made: each is made anew, as one is trained and another tried."""

from __future__ import annotations

from itertools import chain
from weakref import WeakValueDictionary

from torch import nn

from dtf.core.errors import ConfigError


class MadeParts:
    """Of all modules so far."""

    def __init__(self) -> None:
        self._seen = WeakValueDictionary[int, nn.Module]()  # by id: the hash of a metric depends on its state

    def add(self, module: nn.Module, maker: str) -> None:
        """Count a module in. ConfigError where it has a part of an earlier one."""
        for name, part in module.named_modules():
            if self._seen.get(id(part)) is part and not _holds_nothing(part):
                raise ConfigError(
                    f"{maker}() gives {name or 'the model'} that it gave before; a rank makes several: make all parts "
                    "in the function, or in the constructor"
                )
        self._seen.update((id(part), part) for part in module.modules())


def _holds_nothing(part: nn.Module) -> bool:
    """Whether it is one of torch's that has no tensors and computes the same in both modes, such as an activation that
    is the default of an argument: two models may have it.
    """
    held = next(chain(part.parameters(), part.buffers(), part.children()), None)
    own = type(part).__module__.startswith("torch.nn.modules.")
    return own and held is None and "training" not in type(part).forward.__code__.co_names
