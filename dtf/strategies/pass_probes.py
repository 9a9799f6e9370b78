"""What one pass of a model shows of its graph, its parameters and its normalisations, and a graph that reaches all."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.distributed.sharding import is_dtensor
from dtf.distributed.world import World
from dtf.model.author_errors import line_of
from dtf.model.communication import Communication
from dtf.model.forward import global_rng_error
from dtf.model.init import HOOKS_ON_SUMS
from dtf.model.seeded_dropout import SeededDropout, find_drawing_modules
from dtf.strategies.tensor_parallel.slices import is_divided


class Reached(torch.autograd.Function):
    """The first argument. Backward comes to all others too, without a gradient for them."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        ctx.others = len(others)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient, *([None] * ctx.others)


class Reach:
    """Lets backward passes that sum gradients over ranks come to all parameters, those that this rank's rows do not use
    too: others wait for their sums. `forward`: what sums gradients; None: nothing does.

    Parameters without a gradient after the only pass of a step get zeros, in another one. They are linked to the total
    beforehand, which costs more, in steps of several passes, and where the pass at the start did not use all of them.
    """

    def __init__(self, model: nn.Module, forward: object) -> None:
        self._parameters = parameters = [p for p in model.parameters() if p.requires_grad]
        self.active = forward is not None
        # a hook would see the zeros, and torch's own search has told of what is unused
        hooked = any(parameter._backward_hooks or has_hook_on_sums(parameter) for parameter in parameters)
        for parameter in parameters if self.active else ():
            hooks = parameter._backward_hooks or {}
            hooks |= {number: partial(_call_with_gradient, hook) for number, hook in hooks.items()}
        self._links = hooked or bool(getattr(forward, "find_unused_parameters", False))
        self._later = False

    def link(self, total: Tensor, summed: bool, starting: bool) -> Tensor:
        """The total () to differentiate. `summed`: whether its pass sums gradients; `starting`: a pass at the start."""
        self.active &= not (starting and recomputes_inside(total))
        self._later = not self._links and all(parameter.grad is None for parameter in self._parameters)
        return total if self._later or not summed or not self.active else Reached.apply(total, *self._parameters)

    def finish(self, summed: bool, starting: bool) -> None:
        """Called after the backward pass of that total."""
        if not self._later or not (summed or starting):
            return
        unused = [parameter for parameter in self._parameters if parameter.grad is None]
        self._links |= starting and not summed and bool(unused)
        if unused and summed:
            torch.autograd.backward(unused, [torch.zeros_like(parameter) for parameter in unused])


def _call_with_gradient(hook: Callable[[Tensor], Tensor | None], gradient: Tensor | None) -> Tensor | None:
    """What a hook makes of a gradient. A backward pass that comes to an unused parameter for its sum has none, and its
    author's hook does not expect that.
    """
    return None if gradient is None else hook(gradient)


def recomputes_inside(total: Tensor) -> bool:
    """Whether a part of a graph is computed again by a backward pass of its own (reentrant checkpointing), which comes
    to parameters by itself.
    """
    waiting, seen = [total.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def has_hook_on_sums(parameter: Tensor) -> bool:
    """Whether it has a hook of `register_post_accumulate_grad_hook`."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def refuse_hooks_on_sums(model: nn.Module, instead: str) -> None:
    """Raise ConfigError for a parameter to which its author gave a hook that runs when a gradient was added. `instead`:
    what to use.
    """
    for name in vars(model).get(HOOKS_ON_SUMS, ()):
        raise ConfigError(
            f"{name} has a hook of register_post_accumulate_grad_hook, which runs on the sum of what this rank has "
            f"computed so far, before ranks add up; use register_hook, or {instead}"
        )


class WrittenParameters(TorchFunctionMode):
    """A context for a pass. `found`: names of parameters that functions of torch were told to change in place, even
    through `.data`, which leaves no other trace where the values stay as they are this time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        plain = [(name, p) for name, p in model.named_parameters() if not hasattr(p, "_local_tensor") and not p.is_meta]
        self._ends = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name) for name, p in plain]
        self._parameters = dict(plain)
        self._before: dict[str, tuple[Tensor, bool]] = {}  # values, and whether it learns, before the first write
        self.found: list[str] = []
        self.gradients: list[str] = []
        """Names of parameters whose gradient was read or set."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is _GRADIENT and sys._getframe(1).f_code.co_name != "_apply":
            self.gradients += [name for name, parameter in self._parameters.items() if parameter is args[0]]
        targets = args[:1] if _writes(getattr(func, "__name__", "")) else ()
        for target in tree_leaves((targets, kwargs.get("out"))):
            if isinstance(target, Tensor) and target.layout is torch.strided and not hasattr(target, "_local_tensor"):
                at = unwrapped(target).data_ptr()
                names = [name for first, end, name in self._ends if first <= at < end]
                for name in names:
                    if name not in self._before:
                        parameter = self._parameters[name]
                        self._before[name] = parameter.detach().clone(), parameter.requires_grad
                self.found += names
        return func(*args, **kwargs)

    def refuse_gradients(self) -> None:
        """Raise ConfigError where the pass came to a gradient."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:  # by a backward pass inside, where there was none before
                parameter.grad = None
                self.gradients.append(name)
        for name in self.gradients:
            raise ConfigError(
                f"the forward pass reads or changes {name}.grad, which holds what this rank has summed up so far of a "
                "step, by micro-batches: that depends on the number of processes. Leave gradients to the optimizer: "
                "dtf calls zero_grad(), and torch.autograd.grad() gives gradients that a pass needs for itself"
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters that were found what they had before. Called outside of the context."""
        for name, (values, learns) in self._before.items():
            self._parameters[name].data.copy_(values)
            self._parameters[name].requires_grad_(learns)


def written_by_pass(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The parameters that `run`, a pass, writes to, or a switch to evaluation and back. ConfigError where it talks to
    other ranks, or comes to gradients.
    """
    written, talks = WrittenParameters(model), Communication()
    with torch.compiler.set_stance("force_eager"), written, talks:
        run()
        model.eval()
        model.train()
    written.refuse_gradients()
    if not is_divided(model):  # else it is what dtf has made of it that talks
        talks.refuse("the model")
    return written.found


_GRADIENT = Tensor.grad
_KEEPS = frozenset({"requires_grad_", "detach_", "share_memory_", "retain_grad_"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_ASSIGNS = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})


def _writes(name: str) -> bool:
    """Whether a function of torch changes its first argument, by its name."""
    return name in _ASSIGNS or (name.endswith("_") and not name.endswith("__") and name not in _KEEPS)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that those of `torch.func` transforms, such as vmap, stand for."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


@contextmanager
def count_calls(layers: Mapping[str, nn.Module], masks: SeededDropout) -> Iterator[dict[str, int]]:
    """A context. Yields how often each layer is called in it, without what dtf itself computes again."""
    calls = dict.fromkeys(layers, 0)

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object) -> None:
            calls[name] += not masks.computes_again

        return hook

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def refuse_drawing(models: Sequence[nn.Module], why: str, world: World) -> Iterator[None]:
    """A context for a trial pass of an evaluation. ConfigError on all ranks where a module of one draws in it from a
    global generator. Collective.
    """
    with find_drawing_modules(named for model in models for named in model.named_modules()) as drawing:
        yield
    everyone = world.gather(drawing[:1])
    if drawing := world.broadcast(everyone and next(filter(None, everyone), [])):
        raise global_rng_error(why, drawing[0])


def _takes_divided_outputs(error: Exception) -> bool:
    """Whether an error is of a loss or of metrics that got outputs which ranks divide."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    recipes = [i for i, frame in enumerate(frames) if isinstance(frame.f_locals.get("self"), Recipe)]
    outputs = [frame.f_locals.get("outputs") for frame in frames[: min(recipes, default=0)]]
    return any(isinstance(leaf, Tensor) and is_dtensor(leaf) for leaf in tree_leaves(outputs))


def pass_error(error: Exception) -> ConfigError | None:
    """What to raise for an error of a trial pass whose cause is known. None for others."""
    if "find_unused_parameters" in str(error):
        return ConfigError("some parameters got no gradient in a step; set strategy.find_unused_parameters=true")
    if "mixed torch.Tensor and DTensor" in str(error):
        if _takes_divided_outputs(error):
            at = f", at {line}" if (line := line_of(error)) else ""
            return ConfigError(
                f"a function of torch gets outputs of the model that ranks divide{at}; use dtf.cross_entropy and "
                "dtf.target_rank for them, or leave out what divides them: the layer that the layout splits by "
                "classes, or strategy.context"
            )
        return ConfigError(
            "a tensor that is divided over ranks meets a whole one: the loss gets scores divided by classes, which "
            "take dtf.cross_entropy and dtf.target_rank, or reads a parameter outside of the passes of the module that "
            "has it, as through a global variable; return from forward() what is needed of it, or use strategy=ddp"
        )
    if "setStorage" in str(error):
        return ConfigError(
            "a parameter is used after its module has given it back, as by gradients of gradients in the loss; the "
            "parts of a model are divided too finely for that: use strategy=ddp"
        )
    return None
