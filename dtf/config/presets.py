"""What goes with recipes of plugins, see `Recipe.presets`, as an option of Hydra's beside the recipe's schema."""

from __future__ import annotations

from typing import Any

from dtf.api.registry import registered
from dtf.config.settings import GROUPS

FOLDER = "presets"
"""Of these options; it is no option of the group."""


def has_presets(group: str, name: str) -> bool:
    """Whether it is a recipe that something goes with."""
    return group == "recipe" and name in registered(group) and bool(registered(group)[name].presets)  # type: ignore[attr-defined]


def path_of(group: str, name: str) -> str:
    """The path of the option."""
    return f"{group}/{FOLDER}/{name}"


def preset_node(group: str, name: str) -> dict[str, Any]:
    """The option, as a YAML file of package `_global_` would have it."""
    presets = registered(group)[name].presets  # type: ignore[attr-defined]
    chosen = [{f"override /{key}": value} for key, value in presets.items() if key in GROUPS]
    return {"defaults": ["_self_", *chosen], **preset_values(group, name)}


def preset_values(group: str, name: str) -> dict[str, Any]:
    """Root key -> values of keys in it."""
    presets = registered(group)[name].presets  # type: ignore[attr-defined]
    return {key: dict(value) for key, value in presets.items() if key not in GROUPS}
