"""Errors inside a model become errors that name the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dtf.core.errors import DtfError, LayoutError
from dtf.model.author_errors import line_of

_OTHERS = ("gloo", "NCCL", "memory", "index out of range in self")
"""Words in errors of other causes: another rank is gone, there is not enough memory, or an embedding got an id that it
would not have undivided either.
"""


@contextmanager
def name_failing_module(model: nn.Module) -> Iterator[None]:
    """A context: an error in a pass of a divided model becomes a ConfigError that names the module at which it
    happened.
    """
    entered = ["the model"]
    hooks = [
        module.register_forward_pre_hook(
            lambda module, inputs, name=name: entered.append(
                f"{name} ({type(module).__name__.removeprefix('Divided')})"
            )
        )
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    except DtfError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if any(word in str(error) for word in _OTHERS):
            raise
        hint = "; divided classes need dtf.cross_entropy and dtf.target_rank" if "DTensor" in str(error) else ""
        line = line_of(error)
        what = f"{error}, at {line}" if line else f"{error}"
        raise LayoutError(
            f"the pass fails at or after {entered[-1]} ({what}); look at how the recipe's layout splits it and what "
            f"is before it{hint}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
