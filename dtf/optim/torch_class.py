"""Optimizers that are classes in the form of torch.optim, as dtf's: options from the constructor, state by name.

Torch-free. What steps is in `dtf.optim.torch_step`; what a class may be, and whether its state may be divided, is tried
in `dtf.optim.torch_trial`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from inspect import Parameter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.api.argument_keys import argument_option
from dtf.api.optimizer import Group, Optimizer, Step
from dtf.api.registry import name_of, option, register, with_default
from dtf.core.arguments import (
    UNKNOWN,
    arguments_of,
    config_type,
    module_of,
    name_in_module,
    named,
    typed_default,
)
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from torch import Tensor

    from dtf.optim.torch_step import ChosenClass

HOW_IT_RUNS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Arguments that change no number, or that dtf sets: the class's own choice holds."""

_SET_BY_DTF = {
    "params": "dtf gives it the parameters",
    "lr": "dtf's config group `lr` gives the learning rate of each step",
    "maximize": "dtf makes a loss smaller",
}


@dataclasses.dataclass(kw_only=True)
class TorchOptimizer(Optimizer):
    """A class in the form of torch.optim's: `Class(parameters, lr=..., **options)`, `step()`, and state of each
    parameter. Fields that are not here are arguments of its constructor.
    """

    torch_class: ClassVar[str | type] = ""
    """The class, or "module:Class", which is imported when a process first needs it."""

    pinned: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Arguments of its constructor that are no config keys."""

    takes_weight_decay: ClassVar[bool] = True

    averages_squares = True  # it may: nobody knows what its state is

    weight_decay: float = option(
        default=0.0, least=0, doc="weight decay, in the way of the class: added to the gradient, or of the parameter"
    )
    decay_norm_and_bias: bool = option(
        default=True, doc="let weight decay act on biases and normalisation scales (parameters with one axis) too"
    )

    @property
    def class_name(self) -> str:
        """`torch.optim:RAdam`."""
        return f"{module_of(self.torch_class)}:{name_in_module(self.torch_class)}"

    @property
    def label(self) -> str:
        """As messages begin: `optimizer=radam (torch.optim:RAdam)`."""
        return f"optimizer={name_of('optimizer', self)} ({self.class_name})"

    @property
    def arguments(self) -> dict[str, Any]:
        """What its constructor gets beside parameters, learning rate and weight decay."""
        own = {field.name for field in dataclasses.fields(TorchOptimizer)}
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own}
        return {**chosen, **self.pinned}

    @property
    def chosen(self) -> ChosenClass:
        """What its steps are made from."""
        from dtf.optim.torch_step import ChosenClass

        return ChosenClass(self.label, self.torch_class, self.arguments, self.takes_weight_decay, self.weight_decay)

    def check(self) -> None:
        if not self.takes_weight_decay and (self.weight_decay or any(self.weight_decays.values())):
            key = "weight_decay" if self.weight_decay else "weight_decays"
            value = 0 if self.weight_decay else "{}"
            raise ConfigError(
                f"optimizer.{key}={getattr(self, key)}: {self.class_name} has no weight decay; use "
                f"optimizer.{key}={value}, or another optimizer"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and isinstance(field.default, tuple) and len(value) != len(field.default):
                raise ConfigError(
                    f"optimizer.{field.name}={list(value)} must be {len(field.default)} values, as in "
                    f"{list(field.default)}"
                )

    @property
    def by_tensor(self) -> bool:  # type: ignore[override]
        """Whether a step of a part of a tensor is not that part of a step of the tensor; tried once."""
        from dtf.optim.torch_trial import try_out

        return not try_out(self.chosen).by_element

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        from dtf.optim.torch_step import empty_state
        from dtf.optim.torch_trial import slots_of

        return empty_state(slots_of(self.chosen, parameter), parameter)

    def stepper(self, group: Group) -> Step:
        from dtf.optim.torch_step import ClassStep
        from dtf.optim.torch_trial import slots_of

        if self.by_tensor and group.combine is not None:
            raise ConfigError(
                f"{self.label}: a trial shows that its step of a part of a tensor is not that part of its step of the "
                "tensor, and this strategy divides tensors; use one that keeps them whole: strategy=ddp, zero1, dp, "
                "pipeline"
            )
        return ClassStep(self.chosen, group, [slots_of(self.chosen, parameter) for parameter in group.parameters])

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        self.stepper(group)(gradients, lr, skip)


def torch_optimizer(
    name: str, torch_class: str | type, defaults: Mapping[str, Any] = MappingProxyType({})
) -> type[TorchOptimizer]:
    """Register a class in the form of torch.optim's as `optimizer=name`, and return what was registered.

    The arguments of its constructor become config keys, with their types and defaults. Not those that are set by dtf:
    parameters, learning rate, `maximize`; nor those that say how it runs: `foreach`, `fused`, `capturable`.
    `torch_class`: "module:Class", whose source is read and which ranks import, or the class itself. `defaults`: other
    values for arguments; one whose type no config key can have is set for good.

    ConfigError for arguments that the constructor does not have, or needs and does not get. What the class does is
    tried before the first step of a run.
    """
    arguments = named(arguments_of(torch_class))
    label = f'torch_optimizer("{name}", {torch_class!r})'
    for key in defaults:
        if key in _SET_BY_DTF:
            raise ConfigError(f"{label}: {key} is set otherwise: {_SET_BY_DTF[key]}")
        if key not in arguments:
            raise ConfigError(f"{label}: the constructor takes no {key}; {suggest(key, arguments)}")
    if not arguments:
        raise ConfigError(f"{label}: its constructor is in no source that can be read; give the class itself")
    if "lr" not in arguments:
        raise ConfigError(f"{label}: the constructor takes no lr, so the learning rate of a step cannot be given to it")
    hints, fields, pinned = {}, {}, {}
    for key, argument in list(arguments.items())[1:]:
        value = defaults.get(key, argument.default)
        hint = config_type(argument.replace(default=value))
        if key == "weight_decay" and type(value) in (int, float):
            hint = float
        elif key == "weight_decay" or (hasattr(TorchOptimizer, key) or key == "name"):
            hint = None  # what dtf has under this name is something else
        if key in _SET_BY_DTF:
            continue
        if key in HOW_IT_RUNS or hint is None or value is UNKNOWN:
            if key in defaults and key != "weight_decay":
                pinned[key] = value
            elif argument.default is Parameter.empty or key == "weight_decay":
                raise ConfigError(f"{label}: no config key can be {key}; give its value in the line: {{{key!r}: ...}}")
            continue
        hints[key] = hint
        fields[key] = _field(key, typed_default(hint, value))
    title = name_in_module(torch_class)
    made = type(
        title.rpartition(".")[2],
        (TorchOptimizer,),
        {
            "__doc__": f"{module_of(torch_class)}:{title}, as its author wrote it.",
            "__module__": sys._getframe(1).f_globals.get("__name__", __name__),
            "__annotations__": hints,
            "torch_class": torch_class,
            "pinned": MappingProxyType(pinned),
            "takes_weight_decay": "weight_decay" in arguments,
            "usual_lr": rate if type(rate := arguments["lr"].default) is float else None,
            **fields,
        },
    )
    return register("optimizer", name)(made)


def _field(key: str, value: Any) -> Any:
    own = key == "weight_decay"
    return with_default(TorchOptimizer, key, value) if own else argument_option(value, doc=f"the constructor's `{key}`")
