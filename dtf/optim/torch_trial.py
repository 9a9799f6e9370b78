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
from dtf.core.constructor import UNKNOWN, constructor_arguments, named
from dtf.core.errors import ConfigError
from dtf.optim.torch_step import STARTED, ChosenClass, ClassStep, Slot, Slots, construct, empty_state, load_class

_STEPS = 12
"""Some classes do something else every fifth or tenth step."""

_LR = 2.0**-7
_SHAPES = ((64,), (16, 8), (8, 4, 4, 4))
"""Halves of them fill whole vector registers, so that both are computed by the same instructions."""

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


def _numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many sizes, in an order that says nothing."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    sizes = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * 8 - 4
    return (drawn * sizes.exp2()).to(dtype)


def _step(chosen: ChosenClass, instance: torch.optim.Optimizer) -> None:
    try:
        instance.step()
    except Exception as error:  # whatever its author raises
        raise ConfigError(f"{chosen.said}: a trial of its step() fails: {type(error).__name__}: {error}") from error


def _try_slots(chosen: ChosenClass, shape: tuple[int, ...], dtype: torch.dtype) -> Slots:
    _check_form(chosen)
    parameter = _numbers(shape, 0, dtype)
    instance = construct(chosen, [parameter], chosen.weight_decay)
    found: list[Slots] = []
    for step in range(_STEPS):
        parameter.grad = _numbers(shape, 1 + step, dtype)
        _step(chosen, instance)
        state: dict[Any, Any] = instance.state.get(parameter, {})
        found.append(tuple(_slot(chosen, key, value, parameter) for key, value in state.items()))
        if len(found[-1]) != len(found[0]):
            more = sorted({slot.key for slot in found[-1]} ^ {slot.key for slot in found[0]})
            raise ConfigError(
                f"{chosen.said} keeps {', '.join(more)} from its step {step + 1} on, not from its first; dtf cannot "
                "say what its checkpoints hold"
            )
    kinds = [{slot.key: slot.kind for slot in slots} for slots in found]
    changing = [key for key, kind in kinds[0].items() if any(other.get(key) != kind for other in kinds)]
    if changing:
        raise ConfigError(f"{chosen.said} keeps as {changing[0]} now one thing, now another; dtf cannot keep both")
    return found[-1]


def _slot(chosen: ChosenClass, key: Any, value: Any, parameter: Tensor) -> Slot:
    if not isinstance(key, str) or key in (STARTED, "") or "/" in key:
        raise ConfigError(f"{chosen.said} keeps state under the key {key!r}, which is no name of a checkpoint")
    if isinstance(value, Tensor):
        if value.shape == parameter.shape and parameter.dim():
            return Slot(key, "parameter", (), value.dtype)
        if value.numel() == 1 and value.dim() <= 1:
            return Slot(key, "scalar", tuple(value.shape), value.dtype)
        raise ConfigError(
            f"{chosen.said} keeps a tensor {tuple(value.shape)} as `{key}` of a parameter {tuple(parameter.shape)}; "
            "dtf keeps tensors of the parameter's shape, and numbers. Factored or blocked state is not supported"
        )
    if value is None:
        return Slot(key, "none", (), torch.float32)
    if type(value) in (bool, int, float):
        return Slot(key, "number", (), torch.float64, type(value))
    raise ConfigError(
        f"{chosen.said} keeps a {type(value).__name__} as `{key}` of a parameter; dtf keeps tensors of the "
        "parameter's shape, and numbers"
    )


def _check_form(chosen: ChosenClass) -> None:
    """Raise ConfigError for what is no class in the form of torch.optim's, or not the one whose source was read."""
    cls = load_class(chosen)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"{chosen.said} is no subclass of torch.optim.Optimizer")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{chosen.said}: its step needs a closure that computes the loss again, and a step of dtf computes it "
            "once; take an optimizer that steps by gradients alone"
        )
    source = chosen.target
    known, real = named(constructor_arguments(source)), named(constructor_arguments(cls))
    for key, argument in known.items():
        if key not in real or (argument.default is not UNKNOWN and argument.default != real[key].default):
            raise ConfigError(
                f"{chosen.said}: its source says {argument}, the class {real.get(key, 'does not have it')}; "
                "name the class itself in place of text"
            )


def _bound(chosen: ChosenClass, parameters: Sequence[Tensor]) -> tuple[ClassStep, dict[str, list[Tensor]]]:
    slots = [slots_of(chosen, parameter) for parameter in parameters]
    states = [empty_state(own, parameter) for own, parameter in zip(slots, parameters, strict=True)]
    shared = {key: [state[key] for state in states] for key in states[0]}
    group = Group(list(parameters), shared, True, chosen.weight_decay, None)
    return ClassStep(chosen, group, slots), shared


def _steps(chosen: ChosenClass, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    """Steps of dtf, in place."""
    try:
        step, _ = _bound(chosen, parameters)
        for those in gradients:
            step([gradient.clone() for gradient in those], _LR, None)
    except ConfigError:
        raise
    except Exception as error:  # whatever its author raises
        raise ConfigError(f"{chosen.said}: a trial of its step() fails: {type(error).__name__}: {error}") from error


def _try_out(chosen: ChosenClass) -> Findings:
    refused, found = None, []
    for shape in _SHAPES:
        try:
            construct(chosen, [_numbers(shape, 0)], chosen.weight_decay)
        except ConfigError as error:  # it may take matrices alone, and says so again where a model has other parameters
            refused = refused or error
            continue
        start, gradients = _numbers(shape, 0), [_numbers(shape, 1 + step) for step in range(_STEPS)]
        _check_kept(chosen, start, gradients)
        _check_alone(chosen, start, gradients)
        found.append(all(_divides(chosen, start, gradients, axis) for axis in {0, len(shape) - 1}))
    if not found and refused is not None:
        raise refused
    return Findings(all(found))


def _check_kept(chosen: ChosenClass, start: Tensor, gradients: Sequence[Tensor]) -> None:
    """Raise ConfigError unless the class itself, steps of dtf, and steps that go on from their state are alike."""
    plain, ours, first, after = (start.clone() for _ in range(4))
    torch.default_generator.manual_seed(0)
    instance = construct(chosen, [plain], chosen.weight_decay, lr=_LR)
    _steps(chosen, [ours], [[gradient] for gradient in gradients])
    torch.default_generator.manual_seed(1)
    for gradient in gradients:
        plain.grad = gradient.clone()
        _step(chosen, instance)
    if not torch.equal(plain, ours):
        again = start.clone()
        torch.default_generator.manual_seed(0)
        _steps(chosen, [again], [[gradient] for gradient in gradients])
        torch.default_generator.manual_seed(1)
        _steps(chosen, [first], [[gradient] for gradient in gradients])
        if not torch.equal(again, first):
            raise ConfigError(f"{chosen.said} draws random numbers in its steps, and ranks would draw different ones")
        raise ConfigError(
            f"{chosen.said}: its steps are others when their learning rate comes from param_groups, where "
            "schedules of torch set it"
        )
    cut = len(gradients) // 2
    step, state = _bound(chosen, [first])
    for gradient in gradients[:cut]:
        step([gradient.clone()], _LR, None)
    after.copy_(first)
    going_on, fresh = _bound(chosen, [after])
    for key, tensors in fresh.items():
        tensors[0].copy_(state[key][0])
    for gradient in gradients[cut:]:
        going_on([gradient.clone()], _LR, None)
    if not torch.equal(after, ours):
        kept = _changed(chosen, start, gradients)
        raise ConfigError(
            f"{chosen.said} keeps more than the state of its parameters{kept}, so that a run could not go on from "
            "a checkpoint"
        )


def _changed(chosen: ChosenClass, start: Tensor, gradients: Sequence[Tensor]) -> str:
    """For a message: what else a step changes."""
    parameter = start.clone()
    instance = construct(chosen, [parameter], chosen.weight_decay)
    before = (
        repr(dict(instance.param_groups[0], params=[])),
        {key: repr(value) for key, value in vars(instance).items()},
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        instance.step()
    group = instance.param_groups[0]
    keys = [f"param_groups[...][{key!r}]" for key in group if key != "params" and repr(group[key]) not in before[0]]
    keys += [
        key
        for key, value in vars(instance).items()
        if key not in ("state", "param_groups") and repr(value) != before[1].get(key)
    ]
    return f" ({', '.join(keys)})" if keys else ""


def _check_alone(chosen: ChosenClass, start: Tensor, gradients: Sequence[Tensor]) -> None:
    """Raise ConfigError unless a parameter moves beside another one as it does alone."""
    other = start.flip(0) * 3
    together, alone, beside = [start.clone(), other.clone()], start.clone(), other.clone()
    _steps(chosen, together, [[gradient, gradient.flip(0) * 5] for gradient in gradients])
    _steps(chosen, [alone], [[gradient] for gradient in gradients])
    _steps(chosen, [beside], [[gradient.flip(0) * 5] for gradient in gradients])
    if not (torch.equal(together[0], alone) and torch.equal(together[1], beside)):
        raise ConfigError(
            f"{chosen.said}: the step of a parameter depends on the other parameters, which strategies and weight "
            "decay put into several groups; take an optimizer that steps each parameter by itself"
        )


def _divides(chosen: ChosenClass, start: Tensor, gradients: Sequence[Tensor], axis: int) -> bool:
    """Whether steps of two halves of a tensor are, bit for bit, the halves of its steps."""
    whole, halves = start.clone(), [half.contiguous() for half in start.clone().chunk(2, axis)]
    _steps(chosen, [whole], [[gradient] for gradient in gradients])
    for number, half in enumerate(halves):
        _steps(chosen, [half], [[gradient.chunk(2, axis)[number].contiguous()] for gradient in gradients])
    return torch.equal(torch.cat(halves, axis), whole)
