"""Where a model uses its parameters: which module is being called at each use.

A rank that gathers a module's parameters for as long as the module computes must know.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dtf.model.attributes import Attributes
from dtf.model.changing_buffers import buffers_restored
from dtf.model.communication import Communication
from dtf.model.forward import cast_floating
from dtf.model.known_parameters import KnownParameters
from dtf.strategies.pass_probes import WrittenParameters, unwrapped

_PARAMETRIZED = ".parametrizations."


class ParamUse:
    """What forward passes of a model used. `calls`: module -> how often the last one called it, in order of
    the first calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._owners: dict[int, list[str]] = {}  # of each parameter, by id
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(name)
        self._storages = {p.untyped_storage()._cdata: id(p) for p in model.parameters()}
        self._users: dict[int, set[str]] = {key: set(names) for key, names in self._owners.items()}
        self.calls: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self.uneven: set[str] = set()
        """Modules that are called more often for some rows than for others."""
        self.keeps = False
        """Whether parameters are used after the modules that own them: in the outputs, or by gradients of gradients."""
        self.transforms = False
        """Whether the pass uses transforms of `torch.func`, inside of which nothing can be gathered."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context in which the model's forward is watched."""
        stack: list[str] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            name = self._names.get(module)
            if name is not None:
                stack.append(name)
                self.calls[name] = self.calls.get(name, 0) + 1

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if module in self._names:
                stack.pop()
                self._note(outputs, stack)  # a parameter, or a view of one, that its caller gets
                self.keeps = self.keeps or (not stack and self._has_parameter(outputs))

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            with _Uses(lambda values: self._note(values, stack)) as uses:
                yield
            self.keeps = self.keeps or uses.differentiates
            self.transforms = self.transforms or uses.transforms
        finally:
            for hook in hooks:
                hook.remove()

    def watch_passes(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        """Forward passes on these inputs, watched, that leave no trace. ConfigError for a model that changes its
        parameters in them.
        """
        attributes, known = Attributes(model), KnownParameters(model)
        written, talks = WrittenParameters(model), Communication()
        dtype = next(model.parameters()).dtype
        with buffers_restored(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
            python, numpy = random.getstate(), np.random.get_state()
            try:
                for number, rows in enumerate(inputs):
                    torch.default_generator.manual_seed(number)
                    random.seed(number)
                    np.random.seed(number)
                    self.calls = {}
                    with torch.compiler.set_stance("force_eager"), self.watch(), written, talks:
                        model(cast_floating(rows, dtype))
                    self.uneven |= (
                        {
                            name
                            for name in {**self.calls, **self._before}
                            if self.calls.get(name) != self._before.get(name)
                        }
                        if number
                        else set()
                    )
                    self._before = dict(self.calls)
                with written:
                    model.eval()
                    model.train()
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
                attributes.restore()
        talks.refuse("the model")
        written.refuse_gradients()
        known.refuse_new()
        known.refuse_changed("launcher.processes=1", written.found)

    def _has_parameter(self, values: Any) -> bool:
        return any(
            isinstance(value, Tensor) and unwrapped(value).untyped_storage()._cdata in self._storages
            for value in tree_leaves(values)
        )

    def _note(self, values: Any, stack: list[str]) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                key = self._storages.get(unwrapped(value).untyped_storage()._cdata)
                if key is not None:
                    self._users[key].add(stack[-1] if stack else "")

    def gathered_by(self, module: str, parameter: nn.Parameter) -> bool:
        """Whether all uses of a parameter happen while the module of this name is called. A parameter that no use was
        seen of counts as used by its owner.
        """
        return all(_within(user, module) for user in self._users[id(parameter)])


class _Uses(TorchFunctionMode):
    """Tells which values each function of torch gets."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note, self.differentiates, self.transforms = note, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.differentiates = self.differentiates or func is torch.autograd.grad
        self.transforms = self.transforms or peek_interpreter_stack() is not None
        if not _asks_only(func):
            self._note((args, kwargs))
        return func(*args, **(kwargs or {}))


_QUESTIONS = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "is_cuda",
        "is_meta",
        "grad_fn",
        "size",
        "dim",
        "numel",
        "stride",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "element_size",
        "type",
        "nelement",
    }
)


def _asks_only(func: Any) -> bool:
    """Whether a function of torch, or the getter of an attribute, needs no numbers of its tensor."""
    owner = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else func
    return getattr(owner, "__name__", "") in _QUESTIONS


def _within(user: str, module: str) -> bool:
    """Whether a module is, or lies in, another one. What computes a parametrized tensor belongs to the module that has
    it: its result may be the parameter itself.
    """
    user = user.split(_PARAMETRIZED)[0].removesuffix(".parametrizations")
    return not module or user == module or user.startswith(f"{module}.")
