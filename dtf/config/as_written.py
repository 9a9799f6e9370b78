"""Config nodes whose interpolations stay as they are written: what they come to, only the run that uses them says."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from dtf.api.schema import UNSET, coerce_option, option_node
from dtf.config.defaults_lists import YamlFile


def raw(node: DictConfig) -> dict[Any, Any]:
    """A node as plain values, with interpolations as text."""
    plain = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plain, dict)
    return plain


def leave_interpolations(config: DictConfig) -> dict[Any, Any]:
    """As `resolve_interpolations`, with UNSET in place of every interpolation, which fits each key."""
    return _masked({key: value for key, value in raw(config).items() if key != "hydra"})


def fit_option(group: str, content: dict[Any, Any]) -> dict[str, Any]:
    """`coerce_option` of what a file holds."""
    return restore(coerce_option(group, _masked(content), group), content)


def is_as_in_file(node: DictConfig, group: str, option: str, read: YamlFile | None) -> bool:
    """Whether a node holds what the file of this option says, if it has one, and no other place says more."""
    return raw(node) == {**option_node(group, option), **(read.content if read else {})}


def restore(fitted: Any, written: Any) -> Any:
    """`fitted`, made of a masked config, with the interpolations that are written there."""
    if _is_interpolation(written):
        return written
    if isinstance(fitted, dict) and isinstance(written, dict):
        return {name: restore(value, written.get(name)) for name, value in fitted.items()}
    if isinstance(fitted, list) and isinstance(written, list):
        return [restore(value, text) for value, text in zip(fitted, written, strict=True)]
    return fitted


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _masked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return UNSET if _is_interpolation(value) else value


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
