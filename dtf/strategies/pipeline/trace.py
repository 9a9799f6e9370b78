"""The forward pass of a model as a graph of the modules that it calls; the model and its code stay as they are.

Says nothing about what is cut.
"""

from __future__ import annotations

import builtins
import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node, Proxy, Tracer
from torch.utils._pytree import tree_leaves

from dtf.core.author_line import author_line
from dtf.core.errors import ConfigError
from dtf.model.attributes import without_trace
from dtf.model.seeded_calls import drops

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


class _Tracer(Tracer):
    """Looks into the modules named `opened` only."""

    def __init__(self, opened: set[str], model: nn.Module) -> None:
        super().__init__()
        self._opened = opened
        self._settings = {part: _settings(part) for part in model.modules()}
        self._modes = _modes()
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """The model's input, and what else it needs. Arguments with a default have it, as in a call with the input."""
        first, *more = [*inspect.signature(root_fn).parameters.values()][1:]
        needed = [each for each in more if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
        return root_fn, [self.root, *(self.create_proxy("placeholder", each.name, (), {}) for each in (first, *needed))]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and id(a) not in self._known and a not in self.tensor_attrs:
            shape = f"of shape {tuple(a.shape)}"
            raise ValueError(
                f"it computes a tensor {shape} from parameters alone, which leaves no trace"
                if a.requires_grad
                else f"it uses a tensor {shape} that is no parameter, no buffer and not made of its inputs, so it "
                "would stay as it is now"
            )
        if isinstance(a, dict) and is_dataclass(a):  # outputs of transformers are both
            values = {each.name: self.create_arg(getattr(a, each.name)) for each in fields(a)}
            return self.create_node("call_function", type(a), (), values)
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        for name, part in m.named_modules():
            if self._settings.get(part, _settings(part)) != _settings(part):
                target = ".".join(filter(None, (self.path_of_module(m), name)))
                raise ValueError(f"it sets the mode or the momentum of {target}, which leaves no trace")
        if _computes_again() and any(True for _ in m.buffers()):
            raise ValueError(
                f"it calls {self.path_of_module(m)} in torch.utils.checkpoint, which leaves no trace, and which "
                "changes buffers twice"
            )
        return super().call_module(m, forward, args, kwargs)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any | None = None
    ) -> Node:
        if _modes() != self._modes:
            raise ValueError(f"{target} runs under torch.no_grad or torch.autocast, which leave no trace")
        if kind == "call_function" and ("dropout" in getattr(target, "__name__", "") or drops(target, args, kwargs)):
            raise ValueError(
                f"{target.__name__} draws from a generator that the parts of a model do not share; use nn.Dropout, or "
                "call it in the forward of a block"
            )
        return super().create_node(kind, target, args, kwargs, name, type_expr)


class _Proxy(Proxy):
    """Stands for a tensor. What is assigned to it would be lost."""

    def __init__(self, node: Node, tracer: Tracer) -> None:
        super().__init__(node, tracer)
        object.__setattr__(self, "_made", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in vars(self):
            raise ValueError(f"it assigns the .{name} of a tensor, which leaves no trace")
        object.__setattr__(self, name, value)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What a call of a module depends on besides its arguments, and what its callers are known to set."""
    return module.training, getattr(module, "momentum", None) if isinstance(module, NORMS[0]) else None


@contextmanager
def _sizes_followed() -> Iterator[None]:
    """A context in which sizes of tensors, and tensors that are made of sizes, are a part of the graph."""
    plain = {(torch, name): getattr(torch, name) for name in ("arange", "zeros", "ones", "full", "empty")}
    plain[builtins, "len"] = len

    def following(function: Any) -> Any:
        def _make(*args: Any, **kwargs: Any) -> Any:
            # a tuple of stand-ins has a length
            values = args if function is plain[builtins, "len"] else tree_leaves((args, kwargs))
            proxies = [value for value in values if isinstance(value, Proxy)]
            if proxies:
                return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return _make

    try:
        for (owner, name), function in plain.items():
            setattr(owner, name, following(function))
        yield
    finally:
        for (owner, name), function in plain.items():
            setattr(owner, name, function)


def _modes() -> tuple[bool, ...]:
    return (torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")))


def _computes_again() -> bool:
    """Whether what is called now is computed again in the backward pass, by `torch.utils.checkpoint`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


def trace(model: nn.Module, opened: set[str], where: str) -> list[Node]:
    """The nodes of the model's forward, the same in training and evaluation; the model is left as it was."""
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise refusal(
            model, f"{scripted[0] or 'it'} is TorchScript, whose code cannot be followed; leave torch.jit out"
        )
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    parameters = [(name, parameter, _state(parameter)) for name, parameter in model.named_parameters()]
    held = [parameter.detach() for _, parameter, _ in parameters]  # else other numbers could come to the same address
    graphs, changed = [], ""
    for mode in (True, False):
        for module in model.modules():
            module.training = mode
        try:
            with without_trace([model]), _sizes_followed():
                try:
                    graphs.append(_Tracer(opened, model).trace(model))
                finally:
                    now = dict(model.named_buffers())
                    unlike = (name for name, before in buffers.items() if _differs(now.get(name), *before))
                    changed = changed or next(unlike, "")
        except Exception as error:  # the model's own code, run on stand-ins for tensors, may raise anything
            if changed:
                break
            line = author_line([*traceback.walk_tb(error.__traceback__)])
            place = f"at {line}, {where}" if line else where
            raise refusal(model, f"its forward cannot be followed: {error}, {place}") from error
        finally:  # constants that the tracer met, and stand-ins that the forward assigned
            for values, before in [*attributes, *places]:
                values.clear()
                values.update(before)
    if changed:
        raise refusal(
            model, f"the forward pass changes the buffer {changed}, which only one process can keep right, {where}"
        )
    written = next((name for name, parameter, state in parameters if _state(parameter) != state), None)
    del held
    if written is not None:
        raise refusal(model, f"the forward pass itself changes the parameter {written}, or whether it learns, {where}")
    if str(graphs[0]) != str(graphs[1]):
        raise refusal(model, f"its forward asks for self.training {where}, e.g. nn.Dropout")
    return list(graphs[0].nodes)


def _state(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Differs after the parameter was changed, or replaced by assigning its data."""
    return parameter.requires_grad, parameter._version, parameter.untyped_storage()._cdata


def _differs(now: Any, buffer: torch.Tensor, version: int) -> bool:
    """Whether a buffer was changed or replaced. What stands in its place may be a stand-in, which has no version."""
    return now is not buffer or buffer._version != version


def refusal(model: nn.Module, why: str, error: type[ConfigError] = ConfigError) -> ConfigError:
    return error(f"{type(model).__name__} cannot be cut into stages: {why}")
