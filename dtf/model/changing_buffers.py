"""Buffers that a forward pass changes: each micro-batch starts from the value before the step, and one rule says what
becomes of all of them. Buffers that change without a rule are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from dtf.api.layout import BufferUpdate
from dtf.api.name_patterns import longest
from dtf.core.errors import ConfigError
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.known_parameters import changed_parameter, place_of


class ChangingBuffers:
    """The buffers of one replica of a model, or of a part of it.

    `rules`: patterns of names -> rule. `owned`: names of buffers that others keep right, such as running averages.
    `overlapping`: whether a micro-batch may start before the backward pass of another has ended. Otherwise buffers stay
    where they are in memory.
    """

    def __init__(
        self, model: nn.Module, rules: Mapping[str, BufferUpdate], owned: set[str], overlapping: bool = False
    ) -> None:
        self._overlapping = overlapping
        self._model, self._rules, self._owned = model, {**_known(model), **rules}, owned
        self._stepped: list[_Stepped] = []
        self._watched: list[tuple[dict[str, Tensor | None], str, Tensor | None, int, str]] = []
        self._modules = [
            (module._buffers, name)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self.watches_parameters = True
        """Whether frozen parameters are watched too. False where a wrapper of the model moves parameters."""
        self._counts: list[int] = []
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._places: list[tuple[int, int]] = []
        self.find()

    def find(self) -> None:
        """Look for the model's buffers anew, after others took or left some."""
        names = [(name, module, key) for name, module, key in _keys(self._model) if name not in self._owned]
        _refuse_shared(self._model, self._rules)
        ruled = [(name, module, key, self._rule(name)) for name, module, key in names]
        for name, module, key, rule in ruled:
            if rule in (BufferUpdate.mean, BufferUpdate.sum) and key in module._non_persistent_buffers_set:
                raise ConfigError(
                    f"the layout gives the buffer {name} the rule {rule.value}, and it has persistent=False: a "  # type: ignore[union-attr]
                    "checkpoint would not hold it, and a run that goes on would begin it anew; register it without "
                    "persistent=False, or give it the rule local if nothing in it outlives a pass"
                )
        self._stepped = [
            _Stepped(name, module, key, rule)
            for name, module, key, rule in ruled
            if rule in (BufferUpdate.mean, BufferUpdate.sum) and module._buffers[key] is not None
        ]
        self._plain = [(name, module, key) for name, module, key, rule in ruled if rule is None]
        self.scratch = frozenset(name for name, _, _, rule in ruled if rule is BufferUpdate.local)

    def take_declared(self, statistics: BatchNormStatistics) -> None:
        """Keep the running averages that rules cover, in place of `statistics`."""
        rules = {name: self._rule(f"{name}.running_mean") for name in statistics.layers()}
        declared = [name for name, rule in rules.items() if rule is not None]
        for name in declared:
            if rules[name] is not BufferUpdate.mean:
                raise ConfigError(
                    f"the layout gives the running averages of {name} the rule {rules[name].value}; averages have the "  # type: ignore[union-attr]
                    "rule BufferUpdate.mean"
                )
        self.take(statistics.release(declared))

    def take_uneven(self, statistics: BatchNormStatistics, calls: Mapping[str, int]) -> None:
        """Keep the averages of normalisations that a pass does not call exactly once, in place of `statistics`.

        `calls`: of each normalisation in one pass.
        """
        uneven = [name for name, layer in statistics.layers().items() if layer.training and calls[name] != 1]
        self.take(statistics.release(uneven))

    def take(self, names: Iterable[str]) -> None:
        """Keep these buffers, which others owned, by the rule `mean` from now on."""
        self._owned = self._owned - set(names)
        self._rules |= dict.fromkeys(names, BufferUpdate.mean)
        self.find()

    def _rule(self, name: str) -> BufferUpdate | None:
        return longest(self._rules, name)  # type: ignore[arg-type,return-value]

    def __bool__(self) -> bool:
        """Whether there are buffers with a rule that needs all micro-batches."""
        return bool(self._stepped)

    @property
    def names(self) -> list[str]:
        """Of the buffers whose rule needs all micro-batches."""
        return [buffer.name for buffer in self._stepped]

    # ------------------------------------------------------------ elsewhere

    def values(self) -> Tensor:
        """The buffers whose rule needs all micro-batches, as bytes in the order of `names`."""
        return torch.cat([buffer.value.cpu().contiguous().reshape(-1).view(torch.uint8) for buffer in self._stepped])

    @torch.no_grad()
    def take_values(self, values: Tensor) -> None:
        """Inverse of `values`."""
        parts = values.split([buffer.value.numel() * buffer.value.element_size() for buffer in self._stepped])
        for buffer, part in zip(self._stepped, parts, strict=True):
            buffer.value.copy_(part.clone().view(buffer.value.dtype).view(buffer.value.shape))

    def norms(self) -> dict[str, Tensor]:
        """Name -> norm, (), fp64, of what the last pass made of the buffers whose rule needs all micro-batches."""
        return {buffer.name: torch.linalg.vector_norm(buffer.value.double()) for buffer in self._stepped}

    @property
    def numbers(self) -> int:
        """How many numbers `total` has."""
        return sum(buffer.value.numel() for buffer in self._stepped)

    # ------------------------------------------------------------ a step

    def begin(self) -> None:
        """Called before the micro-batches of a step."""
        for buffer in self._stepped:
            buffer.begin()

    def begin_micro_batch(self) -> None:
        """Called before each pass of the model: buffers are as before the step."""
        for buffer in self._stepped:
            buffer.rewind(self._overlapping)

    def current(self) -> list[Tensor | None]:
        """The buffers as the forward pass of a micro-batch left them. Before the backward pass of another one."""
        return [buffer.current for buffer in self._stepped]

    def put(self, current: list[Tensor | None]) -> None:
        """Called before the backward pass of a micro-batch: what it computes again changes the buffers of its own."""
        for buffer, tensor in zip(self._stepped, current, strict=True):
            buffer.current = tensor

    def end_micro_batch(self) -> None:
        """Called after the forward and the backward pass of a micro-batch that counts."""
        for buffer in self._stepped:
            buffer.add()

    def total(self) -> Tensor | None:
        """What this replica's micro-batches made of them, as one tensor in fp64 to be summed over replicas."""
        return torch.cat([buffer.total.reshape(-1) for buffer in self._stepped]) if self._stepped else None

    @torch.no_grad()
    def finish(self, total: Tensor | None, micro_batches: int, applied: bool | Tensor) -> None:
        """Take the sum of `total` over all replicas. `applied`: whether there was an update, on a GPU bool (); without
        one all stay as they were.
        """
        if total is None:
            return
        parts = total.split([buffer.total.numel() for buffer in self._stepped])
        for buffer, part in zip(self._stepped, parts, strict=True):
            buffer.finish(part, micro_batches, applied)

    # ------------------------------------------------------------ what has no rule

    def mark(self) -> None:
        """From here on changes of buffers without a rule count."""
        self._watched = [
            (module._buffers, key, tensor, 0 if tensor is None else _version(tensor), name)
            for name, module, key in self._plain
            for tensor in (module._buffers.get(key),)
        ]
        self._counts = [len(buffers) for buffers, _ in self._modules]
        if self.watches_parameters:
            self._places = [place_of(parameter) for _, parameter in self._frozen]

    def check(self, instead: str) -> None:
        """Raise ConfigError where a buffer without a rule was changed, made or removed since `mark`. `instead`: what to
        use where no rule fits. Without host synchronisation.
        """
        for buffers, key, tensor, version, name in self._watched:
            now = buffers.get(key)
            if now is not tensor or (now is not None and _version(now) != version):
                raise _refusal(self._model, name, instead)
        for (name, parameter), place in zip(self._frozen, self._places, strict=False):
            if place_of(parameter) != place:
                raise changed_parameter(name, instead)
        if [len(buffers) for buffers, _ in self._modules] != self._counts:
            known = {name for name, _, _ in self._plain}
            self.refuse((name for name, _, _ in _keys(self._model) if name not in known), instead)

    def refuse(self, changed: Iterable[str], instead: str) -> None:
        """Raise ConfigError where one of these changed buffers has no rule. `instead`: see `check`."""
        known = self._owned | set(self.names) | self.scratch
        for name in changed:
            if name not in known and self._rule(name) is None:
                raise _refusal(self._model, name, instead)


class _Stepped:
    """One buffer with the rule `mean` or `sum`."""

    def __init__(self, name: str, module: nn.Module, key: str, rule: BufferUpdate) -> None:
        tensor = module._buffers[key]
        assert tensor is not None
        if hasattr(tensor, "_local_tensor"):
            raise ConfigError(
                f"the layout divides the module of the buffer {name}, and its forward pass changes it by the rule "
                f"{rule.value}; leave the module out of the splits"
            )
        self.name, self._module, self._key, self._rule, self._tensor = name, module, key, rule, tensor
        self._before = tensor.detach().clone()
        self.total = torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)

    @property
    def current(self) -> Tensor | None:
        """What the module has."""
        return self._module._buffers[self._key]

    @current.setter
    def current(self, tensor: Tensor | None) -> None:
        self._module._buffers[self._key] = tensor

    @property
    def value(self) -> Tensor:
        """The buffer as it is between two passes."""
        current = self.current
        if current is not self._tensor and current is not None:  # assigned meanwhile, such as by an evaluation
            self._tensor = current.detach()
        return self._tensor

    @torch.no_grad()
    def begin(self) -> None:
        self._before = self.value.clone()
        self.total = torch.zeros(self._tensor.shape, dtype=torch.float64, device=self._tensor.device)

    @torch.no_grad()
    def rewind(self, overlapping: bool) -> None:
        # a tensor of its own for each micro-batch where the backward pass of another may still need the last one
        self.current = self._before.clone() if overlapping else self._tensor.copy_(self._before)

    @torch.no_grad()
    def add(self) -> None:
        value = self.current
        if value is None or value.shape != self._before.shape:
            shape = "None" if value is None else tuple(value.shape)
            raise ConfigError(
                f"the forward pass makes the buffer {self.name} {shape}, it was {tuple(self._before.shape)}; a buffer "
                f"with the rule {self._rule.value} keeps its shape: use BufferUpdate.local for scratch memory"
            )
        self.total += value.detach().double()
        if self._rule is BufferUpdate.sum:
            self.total -= self._before.double()

    def finish(self, total: Tensor, micro_batches: int, applied: bool | Tensor) -> None:
        total = total.view(self._before.shape)
        new = self._before.double() + total if self._rule is BufferUpdate.sum else total / micro_batches
        if not self._before.dtype.is_floating_point:
            new = (new + 1e-6).floor()
        new = new.to(self._before.dtype)
        if isinstance(applied, Tensor):
            new = torch.where(applied.to(new.device), new, self._before)
        elif not applied:
            new = self._before
        self._tensor.copy_(new)
        self.current = self._tensor


def _refuse_shared(model: nn.Module, rules: Mapping[str, BufferUpdate]) -> None:
    """Raise ConfigError where a buffer of two names has a rule that needs all micro-batches: each name would get a
    value of its own.
    """
    first: dict[int, str] = {}
    for name, module, key in _keys(model):
        other = first.setdefault(id(module._buffers[key]), name)
        if other != name and module._buffers[key] is not None:
            rule = longest(rules, name) or longest(rules, other)  # type: ignore[arg-type]
            if rule in (BufferUpdate.mean, BufferUpdate.sum):
                raise ConfigError(
                    f"the layout gives the buffer {other} a rule, and {name} is the same buffer; register it in one "
                    "module, and let the other ask that one for it"
                )


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """A context for passes whose effects on buffers are undone at its end. Yields a function that says which buffers
    they have changed so far, by value, shape or absence.
    """
    before = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    values = {id(t): t.detach().clone() for _, buffers, _ in before for t in buffers.values() if t is not None}
    names = {module: name for name, module in model.named_modules()}

    def changed() -> list[str]:
        found = []
        for module, buffers, _ in before:
            for key in {**buffers, **module._buffers}:
                old, new = buffers.get(key), module._buffers.get(key)
                if old is None and new is None:
                    continue
                if old is None or new is None or not _equal(new, values[id(old)]):
                    found.append(f"{names[module]}.{key}" if names[module] else key)
        return found

    try:
        yield changed
    finally:
        with torch.no_grad():
            for module, buffers, persistent in before:
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set = persistent
                for tensor in buffers.values():
                    if tensor is not None and not _equal(tensor, values[id(tensor)]):
                        tensor.copy_(values[id(tensor)])


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same numbers; those of meta tensors, which have none, are the same."""
    local_a, local_b = (getattr(t, "_local_tensor", t) for t in (a, b))
    return (
        local_a.shape == local_b.shape
        and local_a.dtype is local_b.dtype
        and (local_a.is_meta or _same_bytes(local_a, local_b))
    )


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN."""
    return bool(torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _keys(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in model.named_modules():
        for key in () if isinstance(module, torch.jit.ScriptModule) else module._buffers:
            yield (f"{prefix}.{key}" if prefix else key), module, key


def _known(model: nn.Module) -> dict[str, BufferUpdate]:
    """Buffers of torch's own that each pass changes alike, whatever the rows: the vectors of spectral normalisation."""
    found = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, _SpectralNorm):
            found |= {f"{dot}_u": BufferUpdate.mean, f"{dot}_v": BufferUpdate.mean}
        for hook in module._forward_pre_hooks.values():  # the older one
            if isinstance(hook, SpectralNorm):
                found |= {f"{dot}{hook.name}_{side}": BufferUpdate.mean for side in "uv"}
    return found


def _refusal(model: nn.Module, name: str, instead: str) -> ConfigError:
    module = name.rpartition(".")[0]
    normalisation = dict(model.named_modules()).get(module)
    # whoever changes one of its buffers changes the others
    rule = module if module and isinstance(normalisation, nn.modules.batchnorm._NormBase) else name
    return ConfigError(
        f"the forward pass changes the buffer {name}, which each rank would change by its own rows; let the recipe's "
        f"layout say what becomes of it, Layout(buffers={{{rule!r}: BufferUpdate.mean}}) (or sum, or local for scratch "
        f"memory), or use {instead}"
    )
