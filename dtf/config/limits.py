"""Limits on config files that are not dtf's: on their size, and on the size of what interpolation makes of them.

A YAML file of 220 bytes can hold aliases that unfold into gigabytes; so can interpolations that name each other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.schema import RESERVED, Interpolated, KeyProblem
from dtf.core.errors import ConfigError
from dtf.core.files import small_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAX_BYTES = 256 * 1024
MAX_NODES = 10_000
MAX_DEPTH = 32
MAX_TEXT = 64 * 1024
_REFERENCE = re.compile(r"\$\{\s*(\.*)([^${}:]+?)\s*\}")  # ${a.b}, ${.b}, ${..b}: another key
_READER = re.compile(r"\$\{\s*(?:oc\.env|oc\.decode|now|python_version)\s*:[^${}]*\}")  # reads no key of the config
BASIC = "basic"
"""The one launcher of Hydra that sweeps have."""

STARTED_HERE = (
    "starts trials, and here a sweep starts them itself, with its share of the host for each; leave it out, and give "
    "sweep.parallel=N for N at once"
)
_INTERPOLATIONS, _UNCLEAR, _CHAIN = 1000, 16, 100  # more of them, or longer chains, are no config a person wrote


def read_checked(path: Path) -> str:
    """The text of a YAML file once it is `checked`. ConfigError also where it cannot be read."""
    try:
        text = small_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {one_line(error)}; it must be a readable YAML file in UTF-8") from error
    return checked(path, text)


def checked(path: Path, text: str) -> str:
    """The text of the YAML file `path` once it is known to be shallow, of few nodes and free of aliases; ConfigError
    otherwise.
    """
    import yaml

    try:
        _count(path, yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.MarkedYAMLError as error:
        if error.problem_mark and "nesting" in (error.problem or ""):  # newer versions of libyaml judge the depth first
            raise _too_large(path, error.problem_mark.line) from error
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: {error.problem or one_line(error)}; it must be YAML") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {one_line(error)}; it must be a readable YAML file in UTF-8") from error
    return text


def check_hydra(hydra: DictConfig) -> None:
    """Refuse settings of Hydra that start code (callbacks, logging factories, environment variables, classes by path),
    and those that have no effect here.

    ConfigError.
    """
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(plain, dict)
    job, logs = plain["job"], [plain["hydra_logging"], plain["job_logging"]]
    for key, empty, instead in (
        ("hydra.callbacks", not plain["callbacks"], "observers"),
        ("hydra.job.env_set", not job["env_set"], "launcher.env"),
        ("hydra.job.env_copy", not job["env_copy"], "launcher.env"),
        ("hydra.job.chdir", not job["chdir"], "run.dir"),
        ("hydra.job.name", job["name"] == "dtf", "run.name"),
        ("hydra.run.dir", plain["run"]["dir"] == ".", "run.dir"),
        ("hydra.sweep.dir", not plain["sweep"]["dir"], "run.dir"),
        ("hydra.sweep.subdir", plain["sweep"]["subdir"] == ".", "run.dir"),
        ("hydra.output_subdir", plain["output_subdir"] is None, "run.dir"),
        ("hydra.mode", plain["mode"] is None, "-m"),
        ("hydra.verbose", plain["verbose"] is False, "observers"),
        ("hydra.job_logging", all(isinstance(log, dict) and log.get("root") is None for log in logs), "observers"),
    ):
        if not empty:
            raise ConfigError(f"{key} is not used here; use {instead} instead")
    launcher = plain["runtime"]["choices"].get("hydra/launcher")
    if launcher not in (None, BASIC):
        raise ConfigError(f"hydra/launcher={launcher} {STARTED_HERE}")
    named = _targets_in([plain["launcher"], plain["sweeper"]])
    if not named <= _registered_targets():
        raise ConfigError(
            f"hydra: {RESERVED}={sorted(named - _registered_targets())[0]} is no class of an installed Hydra plugin; "
            "a config names no code"
        )


def resolve_interpolations(config: DictConfig) -> dict[Any, Any]:
    """The config as plain values, without Hydra's own node, and with every interpolation replaced by its value.

    Each is resolved once, so that a chain of them cannot grow without bound. KeyProblem for what grows too large;
    errors of OmegaConf pass.
    """
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    pending = {tuple(map(str, path)): (path, text) for path, text in _interpolations(plain, ())}
    if not pending:
        return plain
    unclear = [name for name, (_, text) in pending.items() if "${" in _READER.sub("", _REFERENCE.sub("", text))]
    for names, limit in ((list(pending), _INTERPOLATIONS), (unclear, _UNCLEAR)):
        if sum(pending[name][1].count("${") for name in names) > limit:
            what = "interpolations" if names is not unclear else "interpolations whose target is no plain key"
            raise KeyProblem(".".join(names[0]), f"{'.'.join(names[0])}: more than {limit} {what}; write the values")
    work = OmegaConf.masked_copy(config, [str(name) for name in plain])
    OmegaConf.set_struct(work, False)
    OmegaConf.set_readonly(work, False)
    nodes_left = MAX_NODES

    def resolve_one(name: tuple[str, ...], depth: int) -> None:
        nonlocal nodes_left
        path, text = pending.pop(name)
        for target in _targets(name, text):
            for other in [
                path_name
                for path_name in pending
                if path_name[: len(target)] == target or target[: len(path_name)] == path_name
            ]:
                if depth == _CHAIN:
                    raise KeyProblem(
                        ".".join(name),
                        f"{'.'.join(name)}: a chain of more than {_CHAIN} interpolations; write the value",
                    )
                if other in pending:
                    resolve_one(other, depth + 1)
        parent, out = work, plain
        for part in path[:-1]:
            parent, out = parent[part], out[part]
        value = parent[path[-1]]
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        nodes_left -= _weight(value)
        if nodes_left < 0:
            key = ".".join(name)
            raise KeyProblem(key, f"{key}: interpolation makes more than {MAX_NODES} values or {MAX_TEXT} characters")
        out[path[-1]] = Interpolated(value) if isinstance(value, str) else value
        if not (isinstance(value, str) and "${" in value):  # text that only looks like an interpolation now
            parent[path[-1]] = value

    for name in [*(name for name in pending if name not in unclear), *unclear]:
        if name in pending:
            resolve_one(name, 0)
    return plain


def one_line(error: BaseException | str) -> str:
    """The message of an exception of another library, in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _count(path: Path, events: Any) -> None:
    import yaml

    nodes = depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{path}, line {event.start_mark.line + 1}: the alias *{event.anchor} is refused; write the value, or "
                "${key}"
            )
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and event.value == RESERVED:
            raise ConfigError(
                f"{path}, line {event.start_mark.line + 1}: {RESERVED} is refused, a config names no code; register a "
                "class and choose it by name"
            )
        if nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _too_large(path, event.start_mark.line)


def _too_large(path: Path, line: int) -> ConfigError:
    return ConfigError(
        f"{path}, line {line + 1}: more than {MAX_NODES} values or {MAX_DEPTH} levels; a config file is smaller"
    )


def _interpolations(value: Any, path: tuple) -> list[tuple[tuple, str]]:
    if isinstance(value, dict):
        return [
            interpolation for name, entry in value.items() for interpolation in _interpolations(entry, (*path, name))
        ]
    if isinstance(value, list):
        return [
            interpolation
            for index, entry in enumerate(value)
            for interpolation in _interpolations(entry, (*path, index))
        ]
    return [(path, value)] if isinstance(value, str) and "${" in value else []


def _targets_in(value: Any) -> set[str]:
    """What is named by `_target_` anywhere below; an interpolation in its place counts as a name no plugin has."""
    if isinstance(value, dict):
        targets = {str(value[RESERVED])} if RESERVED in value else set()
        return targets.union(*map(_targets_in, value.values()))
    if isinstance(value, list):
        return set().union(*map(_targets_in, value))
    return (
        {value}
        if isinstance(value, str) and ("oc.create" in value or "oc.decode" in value or "${${" in value)
        else set()
    )


def _registered_targets() -> set[str]:
    """Classes that Hydra and its installed plugins put under `hydra/` themselves."""
    from hydra.core.config_store import ConfigNode, ConfigStore
    from omegaconf import OmegaConf

    def walk(group: Any) -> set[str]:
        if isinstance(group, ConfigNode):
            return _targets_in(OmegaConf.to_container(group.node, resolve=False))
        return set().union(*map(walk, group.values()))

    return walk(ConfigStore.instance().repo.get("hydra", {}))


def _targets(name: tuple[str, ...], text: str) -> list[tuple[str, ...]]:
    """Keys that the plain references in `text`, which stands at `name`, point to."""
    targets = []
    for dots, key in _REFERENCE.findall(text):
        parts = tuple(re.findall(r"[^.\[\]]+", key))
        targets.append((*name[: len(name) - len(dots)], *parts) if dots else parts)
    return targets


def _weight(value: Any) -> int:
    """How many values a container holds; a text counts for its length too."""
    if isinstance(value, str):
        return 1 + len(value) * MAX_NODES // MAX_TEXT
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_weight, inner))
