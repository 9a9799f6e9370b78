"""Steps a group of parameters by a class in the form of torch.optim's. Its state lies in dtf's tensors, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtf.api.optimizer import Group
from dtf.core.arguments import load
from dtf.core.errors import ConfigError
from dtf.host import devices

STARTED = "started"
"""Key of a state: 1 when the class has made its own, in the first step that was not skipped. Before that the class
finds none, as in torch: it may begin with that step's gradient, or learning rate.
"""

_CHUNK_BYTES = 1 << 26
"""Parameters that are stepped at once: what a step needs besides, such as copies for a step that may be skipped, is in
proportion.
"""


@dataclass(frozen=True)
class ChosenClass:
    """A class and what its constructor gets beside parameters and learning rate."""

    label: str  # as messages begin
    target: str | type  # "module:Class", or the class
    arguments: Mapping[str, Any]
    takes_weight_decay: bool
    weight_decay: float


class Slot(NamedTuple):
    """What a class keeps of a parameter under one key of its state; of `group`: under one of its `param_groups`, as a
    number of Python.
    """

    key: str  # of checkpoints
    kind: str  # `parameter`, of its shape; `scalar`, a tensor of one number; `number`, of Python; `none`; `group`
    shape: tuple[int, ...]  # of a scalar
    dtype: torch.dtype
    number: type = float  # of Python

    def python(self, value: float) -> float:
        """A number as the class keeps it; averages over ranks may have moved whole ones."""
        return value if self.number is float else self.number(round(value))


Slots = tuple[Slot, ...]

GROUP = "group."
"""What the keys of such slots begin with."""


def empty_state(slots: Slots, parameter: Tensor) -> dict[str, Tensor]:
    """State that the class has not begun: zeros."""
    state = {}
    for slot in slots:
        if slot.kind == "parameter":
            state[slot.key] = torch.zeros_like(parameter, dtype=slot.dtype, requires_grad=False)
        elif slot.kind != "none":
            state[slot.key] = torch.zeros((), dtype=slot.dtype, device=parameter.device)
    if state:
        state[STARTED] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return state


def load_class(chosen: ChosenClass) -> type[torch.optim.Optimizer]:
    """The class itself. ConfigError where it is not there."""
    try:
        return load(chosen.target)
    except (ImportError, ConfigError) as error:
        raise ConfigError(f"{chosen.label}: {error}; install its package, or correct the name") from error


def construct(
    chosen: ChosenClass, parameters: Sequence[Tensor], weight_decay: float, lr: float | None = None
) -> torch.optim.Optimizer:
    """The class over some parameters. ConfigError where it refuses them or its options."""
    cls, arguments = load_class(chosen), dict(chosen.arguments)
    if chosen.takes_weight_decay:
        arguments["weight_decay"] = weight_decay
    if lr is not None or not isinstance(inspect.signature(cls).parameters["lr"].default, float):
        arguments["lr"] = 1e-3 if lr is None else lr
    try:
        return cls(list(parameters), **arguments)
    except Exception as error:  # whatever its author raises
        raise ConfigError(f"{chosen.label} refuses its options or parameters: {error}") from error


class ClassStep:
    """Steps a group. As `dtf.api.optimizer.Step`."""

    def __init__(self, chosen: ChosenClass, group: Group, slots: Sequence[Slots]) -> None:
        self._chunks: list[_Chunk] = []
        self._cuts: list[slice] = []
        first = size = 0
        for last, parameter in enumerate(group.parameters, 1):
            size += parameter.numel() * parameter.element_size()
            if size < _CHUNK_BYTES and last < len(group.parameters) and slots[last] == slots[first]:
                continue
            cut = slice(first, last)
            own = {key: tensors[cut] for key, tensors in group.slots.items()}
            self._cuts.append(cut)
            self._chunks.append(_Chunk(chosen, group.parameters[cut], own, slots[first], group.weight_decay))
            first, size = last, 0

    def __call__(self, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        if skip is not None and devices.host_reads(skip.device.type):
            if skip.item():
                return
            skip = None
        for cut, chunk in zip(self._cuts, self._chunks, strict=True):
            chunk.step(gradients[cut], lr, skip)


class _Chunk:
    """Parameters that are stepped at once, with an object of the class, whose state refers to dtf's tensors."""

    def __init__(
        self,
        chosen: ChosenClass,
        parameters: list[Tensor],
        own: dict[str, list[Tensor]],
        slots: Slots,
        weight_decay: float,
    ) -> None:
        self._chosen, self._parameters, self._slots = chosen, parameters, slots
        self._weight_decay = weight_decay
        self._class, self._is_new = construct(chosen, parameters, weight_decay), True
        kept = [slot for slot in slots if slot.kind != "none"]
        self._of_state = [slot for slot in slots if slot.kind != "group"]
        self._touched = [*parameters, *(tensor for tensors in own.values() for tensor in tensors)]
        self._views = [
            {slot.key: _view(own[slot.key][index], slot) for slot in kept} for index in range(len(parameters))
        ]
        hosted = _hosted(chosen, parameters[0])
        self._on_host = [
            (slot, own[slot.key]) for slot in kept if slot.kind in ("number", "group") or slot.key in hosted
        ]
        self._begun = own.get(STARTED, [])
        self._mirror = _Mirror([self._begun, *(tensors for _, tensors in self._on_host)]) if self._begun else None

    def step(self, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        before = None if skip is None else [tensor.clone() for tensor in self._touched]
        if self._mirror is not None:
            self._give(*self._mirror.read())
        for group in self._class.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._class.step()
        self._is_new = False
        for parameter in self._parameters:
            parameter.grad = None
        self._take()
        if before is not None and skip is not None:
            restore(self._touched, before, skip)
        if self._mirror is not None:
            self._mirror.written()

    def _give(self, begun: list[float], *on_host: list[float]) -> None:
        """Let the class find the state that it has begun, and where it has not what its constructor makes."""
        known = [number > 0 for number in begun]
        if not all(known) and not self._is_new:  # its first step was skipped
            self._class, self._is_new = construct(self._chosen, self._parameters, self._weight_decay), True
        state = self._class.state
        for parameter, views, has in zip(self._parameters, self._views, known, strict=True):
            if has and self._is_new:
                state[parameter] = {slot.key: views.get(slot.key) for slot in self._of_state}
        for (slot, _), numbers in zip(self._on_host, on_host, strict=True):
            if slot.kind == "group":
                if any(known):
                    self._class.param_groups[0][slot.key.removeprefix(GROUP)] = slot.python(numbers[known.index(True)])
                continue
            for parameter, number, has in zip(self._parameters, numbers, known, strict=True):
                if has:
                    state[parameter][slot.key] = (
                        torch.full(slot.shape, number, dtype=slot.dtype)
                        if slot.kind == "scalar"
                        else slot.python(number)
                    )

    def _take(self) -> None:
        """Bring what the class has made anew, or keeps on the host, into dtf's tensors."""
        on_host: dict[str, list[float]] = {slot.key: [] for slot, _ in self._on_host}
        for parameter, views in zip(self._parameters, self._views, strict=True):
            state = self._class.state.get(parameter, {})
            if len(state) != len(self._of_state):
                raise self._grown(state)
            for slot in self._of_state:
                if slot.key not in state:
                    raise self._grown(state)
                value, view = state[slot.key], views.get(slot.key)
                if value is view:
                    continue
                if not _fits(value, view, slot):
                    raise ConfigError(
                        f"{self._chosen.label} keeps {_described(value)} as `{slot.key}` of a parameter of shape "
                        f"{tuple(parameter.shape)}; dtf keeps tensors of the parameter's shape, and numbers"
                    )
                if slot.key in on_host:
                    on_host[slot.key].append(float(value))
                elif view is not None:
                    state[slot.key] = view.copy_(value)
        for slot, tensors in self._on_host:
            if slot.kind == "group":
                value = self._class.param_groups[0][slot.key.removeprefix(GROUP)]
                on_host[slot.key] = [float(value)] * len(tensors)
            _fill(tensors, on_host[slot.key])
        if self._begun:
            _fill(self._begun, [1.0] * len(self._begun))

    def _grown(self, state: Any) -> ConfigError:
        keys, known = sorted(map(str, state)), [slot.key for slot in self._of_state]
        return ConfigError(
            f"{self._chosen.label} keeps {keys} of a parameter, where a trial of its first steps found {known}; "
            "dtf cannot say before a run what its checkpoints hold"
        )


def _hosted(chosen: ChosenClass, parameter: Tensor) -> frozenset[str]:
    """Keys of tensors that the class keeps on the host, of a parameter on a device."""
    if devices.host_reads(parameter.device.type):
        return frozenset()
    small = torch.ones((2,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    small.grad = torch.ones_like(small)
    instance = construct(chosen, [small], chosen.weight_decay)
    instance.step()
    state = instance.state.get(small, {})
    return frozenset(
        key for key, value in state.items() if isinstance(value, Tensor) and value.device != parameter.device
    )


def _fill(tensors: list[Tensor], numbers: list[float]) -> None:
    torch._foreach_zero_(tensors)
    torch._foreach_add_(tensors, numbers)


def _view(tensor: Tensor, slot: Slot) -> Tensor:
    return tensor.view(slot.shape) if slot.kind == "scalar" and slot.shape else tensor


def _fits(value: Any, view: Tensor | None, slot: Slot) -> bool:
    if view is None:
        return value is None
    if slot.kind == "number":
        return type(value) in (bool, int, float)
    return isinstance(value, Tensor) and value.shape == view.shape and value.dtype is view.dtype


def _described(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


class _Mirror:
    """Numbers in tensors () of a device that the host needs in the next step, as lists. A device that is at work is
    not waited for: what a step has left is copied when it ends, and read in the next one.
    """

    def __init__(self, numbers: list[list[Tensor]]) -> None:
        self._lengths = [len(tensors) for tensors in numbers]
        self._tensors = [tensor for tensors in numbers for tensor in tensors]
        self._versions: list[int] = []  # after the last step
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None

    def read(self) -> list[list[float]]:
        """Waits for the device where others have written the tensors, as when a checkpoint is loaded."""
        if self._coming is not None and self._versions == [tensor._version for tensor in self._tensors]:
            host, event = self._coming
            if event is not None:
                event.synchronize()  # of the last step, not of what came after it
            found = host.tolist()
        else:
            found = self._joined().tolist()
        lists = iter(found)
        return [[next(lists) for _ in range(length)] for length in self._lengths]

    def written(self) -> None:
        """A step has been made."""
        if devices.host_reads(self._tensors[0].device.type):
            return  # where reading costs nothing
        now, event = self._joined(), None
        host = torch.empty(now.shape, dtype=now.dtype, pin_memory=now.is_cuda)
        host.copy_(now, non_blocking=True)
        if now.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(now.device))
        self._coming = host, event
        self._versions = [tensor._version for tensor in self._tensors]

    def _joined(self) -> Tensor:
        return torch.cat([tensor.view(1) for tensor in self._tensors])


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def restore(tensors: list[Tensor], before: list[Tensor], skip: Tensor) -> None:
    """Give tensors their numbers `before` back where `skip` () is 1, bit for bit, NaN or not. Nothing waits.

    In whole numbers a product with 0 or 1 chooses bits. `before` is overwritten.
    """
    by_size: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, old in zip(tensors, before, strict=True):
        now, then = by_size.setdefault(tensor.element_size(), ([], []))
        now.append(tensor.detach().view(_BITS[tensor.element_size()]))
        then.append(old.view(_BITS[tensor.element_size()]))
    for size, (now, then) in by_size.items():
        back = skip.to(_BITS[size])
        torch._foreach_mul_(now, 1 - back)
        torch._foreach_mul_(then, back)
        torch._foreach_add_(now, then)
