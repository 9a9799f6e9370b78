"""Overrides of a sweep: those of each trial, and which of them set it apart from the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep

from dtf.api.schema import show
from dtf.config.hydra_internals import BasicSweeper
from dtf.config.messages import typed
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def combinations(overrides: Sequence[Override]) -> tuple[list[list[str]], bool]:
    """The overrides of each trial, and whether these are all.

    They are not all where a sweeper chooses values as it goes: then it is one possible trial. ConfigError for a sweep
    over a setting of Hydra.
    """
    for override in overrides:
        if override.is_sweep_override() and override.is_hydra_override():
            text = f"{show(override.input_line)} sweeps over a setting of Hydra; give it one value"
            raise ConfigError(typed(text, override.key_or_group))
    fixed = [override for override in overrides if not override.is_sweep_override() or override.is_discrete_sweep()]
    ends = [
        f"{override.get_key_element()}={value.start}"
        for override in overrides
        if isinstance(value := override.value(), IntervalSweep)
    ]
    trials: list[list[Any]] = BasicSweeper.split_arguments(fixed, max_batch_size=None)[0]
    usual = len(fixed) == len(overrides) and not any(
        override.key_or_group.startswith("hydra/sweeper") for override in overrides
    )
    return [[as_typed(text) for text in [*trial, *ends]] for trial in (trials if usual else trials[:1])], usual


def as_typed(override: str) -> str:
    """An override as it is typed: Hydra's sweeper writes `~key` as `~key=null`."""
    return override.removesuffix("=null") if override.startswith("~") else override


def distinct(overrides: Sequence[str], shared: set[str]) -> list[str]:
    """The overrides that only some trials have. A `+` is removed: composing adds some of its own."""
    plain = {text.lstrip("+") for text in shared}
    return [text for text in (as_typed(override).lstrip("+") for override in overrides) if text not in plain]


def title_of(overrides: Sequence[str], shared: set[str]) -> str:
    """The overrides that only some trials have, in one line; all overrides where there are none."""
    return (
        " ".join(distinct(overrides, shared))
        or " ".join(as_typed(text).lstrip("+") for text in overrides)
        or "(no overrides)"
    )
