"""Names of modules and parameters by pattern. Patterns match one dotted part at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from dtf.core.errors import ConfigError
from dtf.core.text import suggest


def covers(pattern: str, name: str) -> bool:
    """Whether the pattern names `name` or something that contains it: `layer*` covers `layer1` and
    `layer1.0.conv1.weight`, `*.bn1` covers only `layer1.bn1`.

    `*`, `?` and `[...]` stand for characters of one part, never for a dot.
    """
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted))


def covered(patterns: Iterable[str], name: str) -> bool:
    """Whether any of the patterns covers the name."""
    return any(covers(pattern, name) for pattern in patterns)


def factor(factors: Mapping[str, float], name: str) -> float:
    """The product of the factors of all patterns that cover the name."""
    product = 1.0
    for pattern, value in factors.items():
        if covers(pattern, name):
            product *= value
    return product


def longest(values: Mapping[str, float], name: str) -> float | None:
    """The value of the longest pattern that covers the name; None: no pattern does."""
    matches = [pattern for pattern in values if covers(pattern, name)]
    return values[max(matches, key=lambda pattern: (len(pattern), pattern))] if matches else None


def check_used(key: str, patterns: Iterable[str], names: Iterable[str], frozen: Collection[str] = ()) -> None:
    """Raise ConfigError for a pattern of the config key `key` that covers none of a model's parameters, or only
    `frozen` ones.
    """
    known = list(names)
    for pattern in patterns:
        matches = [name for name in known if covers(pattern, name)]
        if matches and all(name in frozen for name in matches):
            raise ConfigError(
                f"{key} names {pattern!r}, which covers only parameters that recipe.model.freeze keeps from learning; "
                "leave it out of one of them"
            )
        if not matches:
            heads = {".".join(name.split(".")[: pattern.count(".") + 1]) for name in known}
            raise ConfigError(
                f"{key} names {pattern!r}, which covers no parameter of the model; {suggest(pattern, heads)}; where a "
                f"config file names it: '~{key}.{pattern}'"
            )
