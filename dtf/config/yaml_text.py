"""YAML as Hydra and OmegaConf read it, with the numbers of the command line."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from dtf.config.hydra_internals import get_yaml_loader

_DIGITS, _WHOLE = "[0-9](?:_?[0-9])*", "(?:0|[1-9](?:_?[0-9])*)"
_NUMBERS = {
    "int": re.compile(rf"[-+]?{_WHOLE}$"),
    "float": re.compile(
        rf"[-+]?(?:(?:{_WHOLE}?\.{_DIGITS}|{_WHOLE}\.)(?:[eE][-+]?{_DIGITS})?|{_WHOLE}[eE][-+]?{_DIGITS}"
        r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
    ),
}
"""Texts that are numbers, those of the command line: 010, 0x10 and 1:30, which YAML 1.1 reads as 8, 16 and 90, are
not.
"""


@cache
def _yaml_loader() -> Any:
    """OmegaConf's loader with the numbers of the command line, on top of libyaml, where that is there: it reads ten
    times as fast.
    """
    import yaml

    slow = get_yaml_loader()
    slow.yaml_implicit_resolvers = {
        first: [(tag, _NUMBERS.get(tag.rpartition(":")[2], regexp)) for tag, regexp in pairs]
        for first, pairs in slow.yaml_implicit_resolvers.items()
    }
    if not hasattr(yaml, "CSafeLoader"):
        return slow

    class Fast(yaml.CSafeLoader):
        yaml_implicit_resolvers = slow.yaml_implicit_resolvers

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                    continue
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        "while constructing a mapping",
                        node.start_mark,
                        f"found duplicate key {key.value}",
                        key.start_mark,
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    return Fast


def parse_yaml(text: str) -> Any:
    """The content of a YAML file by the rules of OmegaConf: no dates, 1e3 is a number, no key twice."""
    loader = _yaml_loader()(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
