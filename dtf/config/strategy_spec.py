"""Reads lists of strategies with their options, such as `tensor degree=2`, and checks them before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from dtf.config.compose import Composed


@dataclass(frozen=True)
class Entry:
    """One entry of such a list."""

    text: str  # as written
    strategy: str
    options: dict[str, str]  # of the strategy
    list_options: dict[str, str]  # that the list defines for its entries

    @property
    def overrides(self) -> dict[str, str]:
        """Overrides, key to value, that choose this strategy with its options."""
        return {"strategy": self.strategy, **{f"strategy.{key}": value for key, value in self.options.items()}}


def read_entry(
    composed: Composed,
    place: str,
    text: str,
    list_options: tuple[str, ...] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> Entry:
    """Read an entry of the key `place`. ConfigError for one that names no strategy, or an option that it does not have.

    `list_options`: options that the list adds to those of the strategy. `elsewhere`: advice on keys that are given in
    another place.
    """
    known = composed.composer.options("strategy")
    has = f"{place} has '{text}'"
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigError(f"{has}, which cannot be read: {error}") from error
    if name not in known:
        raise ConfigError(f"{place} names {name!r}; {suggest(name, known)}")
    if not words:
        return Entry(text, name, {}, {})
    if not all("=" in word for word in words):
        raise ConfigError(f"{has}; after the strategy's name come options as key=value, parted by blanks")
    given = {}
    keys = {*composed.recompose(["job=train", f"strategy={name}"]).config["strategy"].keys() - {"name"}, *list_options}
    for key, _, value in (word.partition("=") for word in words):
        if key in given:
            raise ConfigError(f"{has}, which gives {key} twice; give it once")
        if key.partition(".")[0] not in keys:
            more = (elsewhere or {}).get(key, "")
            raise ConfigError(f"{has}, but {key} is no option of {name}; {suggest(key, keys)}{more and f'; {more}'}")
        given[key] = value
    entry = Entry(
        text,
        name,
        {key: value for key, value in given.items() if key not in list_options},
        {key: given[key] for key in list_options if key in given},
    )
    if not entry.options:  # composed above
        return entry
    try:
        composed.recompose(["job=train", *(f"{key}={value}" for key, value in entry.overrides.items())])
    except ConfigError as error:
        from dtf.config.messages import without_place  # brings Hydra, which ranks, that import this module, do not need

        raise ConfigError(f"{has}: {without_place(str(error))}") from error
    return entry
