"""Passes of a model with compiled modules before its first step: what cannot be compiled is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtf.api.precision import Format
from dtf.core.errors import ConfigError
from dtf.model.compiled_forward import CompiledForward, traced_only
from dtf.strategies.start_check import TOLERANCES, Numbers, differences


def try_compiled(
    compiled: Sequence[CompiledForward],
    train: Callable[[], Numbers],
    evaluate: Callable[[], None],
    expected: Numbers,
    compute: Format,
) -> None:
    """Follow the compiled modules through a pass of training and one of an evaluation, twice. ConfigError for one that
    is not one piece, that would be compiled in each pass anew, or that gives other numbers. Collective where passes
    are.

    `expected`: the numbers of the same pass of training, as the modules are. What follows code is all that is tried
    here: the compiler itself comes with the first step.
    """
    key = compiled[0].key if compiled else ""  # a pipeline may have stages without blocks
    with traced_only():
        found = train()
        evaluate()
    if compiled and not any(forward.called for forward in compiled):
        raise ConfigError(
            f"{key}: the forward pass calls none of {', '.join(forward.label for forward in compiled[:3])} as a "
            "module; call blocks as block(x), or use step.compile=off"
        )
    other = differences(expected, found, TOLERANCES[compute])
    if compiled and other:
        raise ConfigError(
            f"{key}: the model computes something else when it is compiled ({other[0]} differs): torch does not follow "
            "all that its blocks do, such as numpy's random numbers; use step.compile=off"
        )
    with traced_only(again=True):
        train()
        evaluate()
