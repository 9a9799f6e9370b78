"""What a config file sets for one choice of a recipe where the command line makes another: `dim` of a factorization
machine for a logistic regression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtf.api.recipe import Recipe
from dtf.api.registry import lookup
from dtf.api.row_optimizer import DEFAULT
from dtf.api.schema import build_option, option_node, unset


def overtaken(config: Mapping[str, Any], typed: Callable[[str], bool]) -> list[str]:
    """Keys that files set, or nobody, and that have no effect because of what is `typed`: what was typed itself is
    refused by whom it concerns.
    """
    node = config["recipe"]
    if lookup("recipe", node["name"]).idle is Recipe.idle or unset(node):  # type: ignore[attr-defined]
        return []
    return [key for key, because in build_option("recipe", node).idle().items() if typed(because) and not typed(key)]


def reset(tree: Any, key: str) -> None:
    """Give a key, or a whole group, of a config its default; an entry of a mapping goes."""
    group, *path = key.split(".")
    default = option_node(group, tree[group]["name"] if path else DEFAULT)
    if not path:
        tree[group] = default
        return
    node = tree[group]
    *parents, name = path
    for parent in parents:
        node, default = node[parent], default[parent]
    if name in default:
        node[name] = default[name]
    else:
        node.pop(name, None)
