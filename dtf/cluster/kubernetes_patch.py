"""`launcher.extra` of Kubernetes: partial objects that are merged into those that are rendered. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import yaml

from dtf.core.errors import ConfigError

_KEYS = ("name", "mountPath")
"""By which of its fields an entry of a list is known."""
_FORM = "give launcher.extra=['{kind: Pod, spec: {nodeSelector: {NAME: VALUE}}}']"


def checked_patches(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The partial objects of `launcher.extra`. ConfigError for what is none."""
    patches = []
    for text in texts:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"launcher.extra={text!r} is no YAML: {' '.join(str(error).split())}; {_FORM}") from None
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise ConfigError(f"launcher.extra={text!r} is no partial object with its kind; {_FORM}")
        allowed = ("kind", "metadata", "spec")
        others = [str(key) for key in value if key not in allowed]
        if others:
            raise ConfigError(f"launcher.extra={text!r} has the key {others[0]}; known are {', '.join(allowed)}")
        patches.append(value)
    return patches


def patched(objects: Sequence[dict[str, Any]], patches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects with each partial object merged into those of its kind; those of kind Pod into each pod template.

    ConfigError for a kind that is not there.
    """
    objects = deepcopy(list(objects))
    for patch in patches:
        kind, rest = patch["kind"], {key: value for key, value in patch.items() if key != "kind"}
        targets = list(_pod_templates(objects)) if kind == "Pod" else [one for one in objects if one["kind"] == kind]
        if not targets:
            known = ", ".join(dict.fromkeys(["Pod", *(one["kind"] for one in objects)]))
            raise ConfigError(f"launcher.extra: kind={kind} is not among what is submitted; known are {known}")
        for target in targets:
            _merge(target, rest)
    return objects


def _pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    """All parts of objects that describe pods, as they are: what has containers."""
    if isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield value
        else:
            for child in value.values():
                yield from _pod_templates(child)
    elif isinstance(value, list):
        for child in value:
            yield from _pod_templates(child)


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """As `kubectl patch` does: mappings are merged, entries of lists too where they have names; what is null goes, and
    all else is replaced.
    """
    for key, value in patch.items():
        old = target.get(key)
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(value, list) and isinstance(old, list) and (field := _field([*old, *value])):
            known = {entry[field]: entry for entry in old}
            for entry in value:
                if entry[field] in known:
                    _merge(known[entry[field]], entry)
                else:
                    old.append(deepcopy(entry))
        else:
            target[key] = deepcopy(value)


def _field(entries: Sequence[Any]) -> str:
    """By which field all of these entries are known; empty where there is none. Mounts have names that are not their
    own.
    """
    fields = [key for key in reversed(_KEYS) if all(isinstance(entry, dict) and key in entry for entry in entries)]
    return fields[0] if fields else ""
