"""Small trials of a class in the form of torch.optim's, on the CPU: what it keeps of a parameter, whether that is all
that it keeps, and whether its steps go element by element.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtf.api.optimizer import Group
from dtf.core.arguments import UNKNOWN, arguments_of, named
from dtf.core.errors import ConfigError
from dtf.optim.torch_step import GROUP, STARTED, ChosenClass, ClassStep, Slot, Slots, construct, empty_state, load_class

_STEPS = 12
"""Some classes do something else every fifth or tenth step."""

_LR = 2.0**-7
_SHAPES = ((64,), (16, 8), (8, 4, 4, 4), (256, 64))
"""Halves of them fill whole vector registers, so that both are computed by the same instructions. Some classes do
something else to large tensors.
"""

_EDGES = (3, 4, 5, 6, 7, 8, 9, 10)


class Findings(NamedTuple):
    """What trials say of a class with its options."""

    by_element: bool  # a step of a part of a tensor is that part of a step


_slots: dict[tuple, Slots] = {}
_findings: dict[tuple, Findings] = {}


def _key(chosen: ChosenClass) -> tuple:
    return chosen.target, repr(sorted(chosen.arguments.items())), bool(chosen.weight_decay)


def slots_of(chosen: ChosenClass, parameter: Tensor) -> Slots:
    """What the class keeps of a parameter like this one, which may be on meta. ConfigError for what dtf cannot keep."""
    key = (*_key(chosen), parameter.dim(), parameter.dtype)
    if key not in _slots:
        with _aside():
            _slots[key] = _try_slots(chosen, _EDGES[: parameter.dim()], parameter.dtype)
    return _slots[key]


def try_out(chosen: ChosenClass) -> Findings:
    """What trials say of the class. ConfigError for one that cannot be right."""
    key = _key(chosen)
    if key not in _findings:
        with _aside():
            _findings[key] = _try_out(chosen)
    return _findings[key]


@contextmanager
def _aside() -> Iterator[None]:
    """Leaves the random numbers of the process alone, and compiles nothing."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        yield


def _numbers(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, in an order that says nothing."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    sizes = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * 8 - 4
    return (drawn * sizes.exp2()).to(dtype)


def _step(chosen: ChosenClass, instance: torch.optim.Optimizer) -> None:
    try:
        instance.step()
    except Exception as error:  # whatever its author raises
        raise _failed(chosen, error) from error


class _StepFails(ConfigError):
    """Something that the class's author raises."""


def _failed(chosen: ChosenClass, error: Exception) -> ConfigError:
    return _StepFails(f"{chosen.label}: a trial of its step() fails: {type(error).__name__}: {error}")


def _try_slots(chosen: ChosenClass, shape: tuple[int, ...], dtype: torch.dtype) -> Slots:
    _check_form(chosen)
    parameter = _numbers(shape, 0, dtype)
    try:
        instance = construct(chosen, [parameter], chosen.weight_decay)
    except ConfigError as error:
        axes = f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'}"
        raise ConfigError(f"{error} (tried on a parameter with {axes}, as the model has)") from error
    found: list[Slots] = []
    before, place = dict(instance.param_groups[0]), parameter.data_ptr()
    for step in range(_STEPS):
        parameter.grad = _numbers(shape, 1 + step, dtype)
        _step(chosen, instance)
        if parameter.data_ptr() != place:
            raise ConfigError(
                f"{chosen.label} gives a parameter other memory (p.data = ..., p.set_()), and strategies keep it in "
                "memory of theirs; write its new numbers into it: p.copy_(...), p.sub_(...)"
            )
        state: dict[Any, Any] = instance.state.get(parameter, {})
        found.append(tuple(_slot(chosen, key, value, parameter) for key, value in state.items()))
        if len(found[-1]) != len(found[0]):
            more = sorted({slot.key for slot in found[-1]} ^ {slot.key for slot in found[0]})
            raise ConfigError(
                f"{chosen.label} keeps {', '.join(more)} from its step {step + 1} on, not from its first; dtf cannot "
                "say what its checkpoints hold"
            )
    kinds = [{slot.key: slot.kind for slot in slots} for slots in found]
    changing = [key for key, kind in kinds[0].items() if any(other.get(key) != kind for other in kinds)]
    if changing:
        raise ConfigError(f"{chosen.label} keeps as {changing[0]} now one thing, now another; dtf cannot keep both")
    return (*found[-1], *_group_slots(chosen, before, instance.param_groups[0]))


def _group_slots(chosen: ChosenClass, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Slot]:
    """The numbers in `param_groups` that steps have changed, such as one that counts them."""
    for key, value in after.items():
        if key in ("params", "lr") or (key in before and before[key] is value):
            continue
        if type(value) not in (bool, int, float):
            if key not in before or repr(before[key]) != repr(value):
                raise ConfigError(
                    f"{chosen.label} changes param_groups[...][{key!r}], a {type(value).__name__}; dtf keeps tensors "
                    "of the shape of parameters, and numbers"
                )
        elif key not in before or before[key] != value:
            yield Slot(f"{GROUP}{key}", "group", (), torch.float64, type(value))


def _slot(chosen: ChosenClass, key: Any, value: Any, parameter: Tensor) -> Slot:
    if not isinstance(key, str) or key in (STARTED, "") or key.startswith(GROUP) or "/" in key:
        raise ConfigError(f"{chosen.label} keeps state under the key {key!r}, which is no name of a checkpoint")
    if isinstance(value, Tensor):
        if value.shape == parameter.shape and parameter.dim():
            return Slot(key, "parameter", (), value.dtype)
        if value.numel() == 1 and value.dim() <= 1:
            return Slot(key, "scalar", tuple(value.shape), value.dtype)
        raise ConfigError(
            f"{chosen.label} keeps a tensor {tuple(value.shape)} as `{key}` of a parameter {tuple(parameter.shape)}; "
            "dtf keeps tensors of the parameter's shape, and numbers. Factored or blocked state is not supported"
        )
    if value is None:
        return Slot(key, "none", (), torch.float32)
    if type(value) in (bool, int, float):
        return Slot(key, "number", (), torch.float64, type(value))
    raise ConfigError(
        f"{chosen.label} keeps a {type(value).__name__} as `{key}` of a parameter; dtf keeps tensors of the "
        "parameter's shape, and numbers"
    )


def _check_form(chosen: ChosenClass) -> None:
    """Raise ConfigError for what is no class in the form of torch.optim's, or not the one whose source was read."""
    cls = load_class(chosen)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"{chosen.label} is no subclass of torch.optim.Optimizer")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{chosen.label}: its step needs a closure that computes the loss again, and a step of dtf computes it "
            "once; take an optimizer that steps by gradients alone"
        )
    if all(callable(getattr(cls, name, None)) for name in ("train", "eval")):
        raise ConfigError(
            f"{chosen.label} has train() and eval(): it would have others evaluate other parameters than it trains, "
            "and dtf calls neither; step.ema evaluates averages"
        )
    source = chosen.target
    known, real = named(arguments_of(source)), named(arguments_of(cls))
    for key, argument in known.items():
        if key not in real or (argument.default is not UNKNOWN and argument.default != real[key].default):
            raise ConfigError(
                f"{chosen.label}: its source says {argument}, the class {real.get(key, 'does not have it')}; "
                "name the class itself in place of text"
            )


class _Run:
    """Steps of dtf on copies of some parameters."""

    def __init__(self, chosen: ChosenClass, parameters: Sequence[Tensor], state: dict[str, list[Tensor]] | None = None):
        self.parameters = [parameter.clone() for parameter in parameters]
        slots = [slots_of(chosen, parameter) for parameter in self.parameters]
        states = [empty_state(own, parameter) for own, parameter in zip(slots, self.parameters, strict=True)]
        self.state = {key: [each[key] for each in states] for key in states[0]}
        for key, tensors in (state or {}).items():
            for own, given in zip(self.state[key], tensors, strict=True):
                own.copy_(given)
        group = Group(self.parameters, self.state, True, chosen.weight_decay, None)
        self._chosen, self._step = chosen, ClassStep(chosen, group, slots)

    def steps(self, gradients: Sequence[Sequence[Tensor]]) -> _Run:
        try:
            for those in gradients:
                self._step([gradient.clone() for gradient in those], _LR, None)
        except ConfigError:
            raise
        except Exception as error:  # whatever its author raises
            raise _failed(self._chosen, error) from error
        return self

    def tensors(self, index: int = 0) -> list[Tensor]:
        """A parameter and its state."""
        return [self.parameters[index], *(tensors[index] for tensors in self.state.values())]

    def equals(self, other: _Run, index: int = 0, other_index: int = 0) -> bool:
        return all(map(torch.equal, self.tensors(index), other.tensors(other_index)))


def _try_out(chosen: ChosenClass) -> Findings:
    try:
        return _try_out_in(chosen, torch.float64)  # where small moves show
    except _StepFails:
        return _try_out_in(chosen, torch.float32)


def _try_out_in(chosen: ChosenClass, dtype: torch.dtype) -> Findings:
    refused, found = None, []
    for shape in _SHAPES:
        start = _numbers(shape, 0, dtype)
        try:
            construct(chosen, [start], chosen.weight_decay)
        except ConfigError as error:  # it may take matrices alone, and says so again where a model has other parameters
            refused = refused or error
            continue
        gradients = [[_numbers(shape, 1 + step, dtype)] for step in range(_STEPS)]
        _check_alone(chosen, start, gradients)
        _check_kept(chosen, start, gradients)
        found.append(all(_divides(chosen, start, gradients, axis) for axis in {0, len(shape) - 1}))
    if not found and refused is not None:
        raise refused
    return Findings(all(found))


Gradients = Sequence[Sequence[Tensor]]
"""Of each step, of each parameter."""


def _check_alone(chosen: ChosenClass, start: Tensor, gradients: Gradients) -> None:
    """Raise ConfigError unless a parameter moves beside another one as it does alone, and always in the same way."""
    torch.default_generator.manual_seed(0)
    alone = _Run(chosen, [start]).steps(gradients)
    torch.default_generator.manual_seed(1)
    if not _Run(chosen, [start]).steps(gradients).equals(alone):
        raise ConfigError(f"{chosen.label} draws random numbers in its steps, and ranks would draw different ones")
    other, theirs = start.flip(0) * 3, [[gradient.flip(0) * 5] for (gradient,) in gradients]
    together = _Run(chosen, [start, other])
    together.steps([[one, another] for (one,), (another,) in zip(gradients, theirs, strict=True)])
    if not (together.equals(alone) and together.equals(_Run(chosen, [other]).steps(theirs), 1)):
        raise ConfigError(
            f"{chosen.label}: the step of a parameter depends on the other parameters, which strategies and weight "
            "decay put into several groups; take an optimizer that steps each parameter by itself"
        )


def _check_kept(chosen: ChosenClass, start: Tensor, gradients: Gradients) -> None:
    """Raise ConfigError unless the class itself, steps of dtf, and steps that go on from their state are alike."""
    whole, cut = _Run(chosen, [start]).steps(gradients), len(gradients) // 2
    first = _Run(chosen, [start]).steps(gradients[:cut])
    more = _changed_attributes(chosen, start, gradients)
    if more or not _Run(chosen, first.parameters, first.state).steps(gradients[cut:]).equals(whole):
        raise ConfigError(
            f"{chosen.label} keeps more than the state of its parameters{f' ({more})' if more else ''}, so that a run "
            "could not go on from a checkpoint"
        )
    plain = start.clone()
    instance = construct(chosen, [plain], chosen.weight_decay, _LR)
    for (gradient,) in gradients:
        plain.grad = gradient.clone()
        _step(chosen, instance)
    if not torch.equal(plain, whole.parameters[0]):
        raise ConfigError(
            f"{chosen.label}: its steps are others when their learning rate comes from param_groups, where schedules "
            "of torch set it"
        )


def _changed_attributes(chosen: ChosenClass, start: Tensor, gradients: Gradients) -> str:
    """Names of what steps change in the object itself; a checkpoint holds none of it, even if it shows later only."""
    parameter = start.clone()
    instance = construct(chosen, [parameter], chosen.weight_decay)
    before = {key: repr(value) for key, value in vars(instance).items()}
    for (gradient,) in gradients:
        parameter.grad = gradient.clone()
        _step(chosen, instance)
    changed = [
        key
        for key, value in vars(instance).items()
        if key not in ("state", "param_groups") and repr(value) != before.get(key)
    ]
    return ", ".join([*changed, *(f"state[{key!r}]" for key in instance.state if key is not parameter)])


def _divides(chosen: ChosenClass, start: Tensor, gradients: Gradients, axis: int) -> bool:
    """Whether steps of two halves of a tensor are, bit for bit, the halves of its steps, and their numbers its own."""
    whole, halves = _Run(chosen, [start]).steps(gradients), []
    for number, half in enumerate(start.chunk(2, axis)):
        parts = [[gradient.chunk(2, axis)[number].contiguous()] for (gradient,) in gradients]
        halves.append(_Run(chosen, [half.contiguous()]).steps(parts).tensors())
    return all(
        torch.equal(torch.cat([one, other], axis), tensor)
        if tensor.dim()
        else torch.equal(one, tensor) and torch.equal(other, tensor)
        for one, other, tensor in zip(*halves, whole.tensors(), strict=True)
    )
