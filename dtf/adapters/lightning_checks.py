"""What a LightningModule keeps between its steps and epochs where nothing here keeps it: refused by name, in trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dtf.adapters.lightning_module import is_metric, metrics_of, overrides
from dtf.core.errors import ConfigError
from dtf.model.freeze import stay_in_evaluation

HOOKS = {True: "on_train_epoch_end", False: "on_validation_epoch_end"}
"""What is called at the end of an epoch of training, and of an evaluation."""


def check_stepping(module: nn.Module) -> None:
    """Raise ConfigError for a module that steps its optimizers itself."""
    if not getattr(module, "automatic_optimization", True):
        raise ConfigError(
            f"{type(module).__name__} sets automatic_optimization=False: it steps its optimizers itself, as a GAN "
            "does, and here the engine makes the steps, of one optimizer; train it with one loss (docs/own-recipe.md, "
            "'Two losses')"
        )


def keep_modes(module: nn.Module) -> None:
    """Keep the parts in evaluation mode that the author put there, as Lightning does since 2.2. ConfigError where that
    is the module itself.
    """
    if not module.training:
        raise ConfigError(
            f"{type(module).__name__} puts itself into evaluation mode, and would be trained in it; put the parts that "
            "are frozen there"
        )
    for part in module.modules():
        if not part.training and not is_metric(part):
            stay_in_evaluation(part)


def path_of(name: str, metric: Any, module: nn.Module) -> str:
    """Where a metric is that is logged as `name`. ConfigError for one that the module does not have."""
    for path, each in metrics_of(module).items():
        if each is metric:
            return path
    raise ConfigError(
        f"self.log({name!r}) got a metric ({type(metric).__name__}) that is made in the step, so that each batch has "
        "one of its own; make it in the constructor, as an attribute of the module"
    )


def kept(module: nn.Module) -> dict[str, Any]:
    """The author's attributes of a module, in a form that tells whether they have changed."""
    known = vars(nn.Module()).keys() | {"_trainer", "_fabric", "_metric_attributes", "_current_fx_name"}
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        if key in known:
            continue
        if isinstance(value, Tensor):
            found[key] = (value._version, id(value))
        elif isinstance(value, list | dict | set | tuple):
            found[key] = len(value)
        elif isinstance(value, int | float | str):
            found[key] = value if not (isinstance(value, float) and math.isnan(value)) else "nan"
    return found


def first_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first name whose value is another one; "" if none is."""
    return next((name for name in (*after, *before) if before.get(name) != after.get(name)), "")


@contextmanager
def unchanged(module: nn.Module, cls: type, hook: str) -> Iterator[None]:
    """A context in which the hook is called. ConfigError where it changes what steps compute with: it is called on a
    copy of the module, for what it logs.
    """
    if not overrides(cls, hook):
        yield
        return
    before, tensors = _held(module), {name: tensor.detach().clone() for name, tensor in _tensors(module).items()}
    yield
    changed = first_change(before, _held(module)) or next(
        (name for name, tensor in _tensors(module).items() if not _equal(tensor, tensors.get(name))), ""
    )
    if changed:
        raise ConfigError(
            f"{cls.__name__}.{hook}() changes self.{changed}, and here it is called for what it logs, on a copy of the "
            "module: training would not see the change; leave it out"
        )


def _held(module: nn.Module) -> dict[str, Any]:
    """Attributes of all parts, their modes, and which parameters learn."""
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        if not is_metric(part):
            at = f"{prefix}." if prefix else ""
            found |= {f"{at}{key}": value for key, value in kept(part).items()} | {f"{at}training": part.training}
    return found | {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def own_numbers(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What metrics keep beside their states, as numbers."""
    return {
        name: {
            key: value
            for key, value in kept(metric).items()
            if not key.startswith("_") and key not in metric._defaults and not isinstance(value, str | bool)
        }
        for name, metric in metrics.items()
    }


def refuse_hidden(metrics: Mapping[str, Any], new: Mapping[str, Any], step: Callable[[bool], Any]) -> None:
    """Raise ConfigError for a metric that keeps numbers beside its states, or whose states are not added to by
    `update()`. `new`: `own_numbers` of the metrics as they were made. `step(again)`: updates them by the same rows,
    from nothing, or again.
    """
    step(False)
    once = {name: {key: getattr(metric, key) for key in metric._defaults} for name, metric in metrics.items()}
    once = {name: {key: value.clone() for key, value in states.items()} for name, states in once.items()}
    step(True)
    found = own_numbers(metrics)
    for name, metric in metrics.items():
        who = f"the metric {name} ({type(metric).__name__})"
        if metric._update_count and (key := first_change(new[name], found[name])):
            raise ConfigError(
                f"{who} keeps what update() computes in self.{key}, and only its states are added up over ranks and "
                "steps: make it a state, self.add_state(...)"
            )
        for key, default in metric._defaults.items():
            twice = 2 * once[name][key].double() - default.to(once[name][key])
            if not torch.allclose(getattr(metric, key).double(), twice, rtol=1e-4, atol=1e-6, equal_nan=True):
                raise ConfigError(
                    f"{who} has a state {key} with dist_reduce_fx='sum' that update() does more to than add: the "
                    "states of some rows and of others do not make that of all; write it as a sum"
                )
