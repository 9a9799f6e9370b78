"""The parameters of a model, to see which of them passes make or change: only updates may."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.model.fingerprint import fingerprints


class KnownParameters:
    """The parameters of a model as they are now. Of DTensors, which move by themselves, the names alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        self._places = _places(model)

    def changed(self) -> list[str]:
        """Names of those that are not as they were: by place, value or whether they learn."""
        now = _places(self._model)
        return [name for name, place in self._places.items() if now.get(name) != place]

    def refuse_new(self) -> None:
        """Raise ConfigError for a parameter that a pass has made."""
        for name, parameter in self._model.named_parameters():
            if name not in self._own or not (self._own[name]() is parameter or hasattr(parameter, "_local_tensor")):
                raise ConfigError(
                    f"the forward pass makes the parameter {name}, which no optimizer knows; make it in the "
                    "constructor, and in the pass use what is computed of it"
                )

    def refuse_moved(self) -> None:
        """Raise ConfigError for a learning parameter to which a pass has given other memory, which updates do not
        know.
        """
        for name, (place, _, learns, _) in _places(self._model).items():
            if learns and name in self._places and place != self._places[name][0]:
                raise ConfigError(
                    f"the forward pass gives the parameter {name} other memory, and updates go to what it had; write "
                    f"into it, as {name}.data.copy_(...), or use what is computed of it"
                )

    def refuse_changed(self, instead: str, written: Sequence[str] = ()) -> None:
        """Raise ConfigError for a parameter that passes have changed, or have `written`. `instead`: what to use for
        such a model.
        """
        for name in written or self.changed():
            raise changed_parameter(name, instead)


def changed_parameter(name: str, instead: str) -> ConfigError:
    """The error for a parameter that the model itself changes."""
    return ConfigError(
        f"the forward pass changes the parameter {name}, which each rank would change by its own rows; bound a copy of "
        f"it where it is used, make it a buffer with a rule in the recipe's Layout.buffers, or use {instead}. If it is "
        "train() or eval() that changes it, as one that merges weights, or requires_grad, do that in the constructor"
    )


def place_of(parameter: Tensor) -> tuple[int, int]:
    """Differs when a parameter was changed, or got other memory."""
    part = getattr(parameter, "_local_tensor", parameter)
    return part.data_ptr(), part._version


@torch.no_grad()
def _places(model: nn.Module) -> Mapping[str, tuple[Any, ...]]:
    """By their bits too: a change through `.data` leaves no other trace."""
    plain = {name: p for name, p in model.named_parameters() if not hasattr(p, "_local_tensor")}
    values = fingerprints(plain.values())
    return {
        name: (*place_of(p), p.requires_grad, value) for (name, p), value in zip(plain.items(), values, strict=True)
    }
