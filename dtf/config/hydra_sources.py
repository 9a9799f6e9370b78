"""Where Hydra finds options: guarded folders of the user's, dtf's own YAML files, and the registry.

Every registered class is an option `<group>/<name>` and a base `<group>/schema/<name>` for YAML files. Both are its
file in dtf's conf; a class of a plugin has none, and is read from the registry.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from dtf.api.registry import registered
from dtf.api.schema import option_node, to_plain
from dtf.config import presets
from dtf.config.defaults_lists import (
    ROOT,
    YamlFile,
    check_defaults,
    check_order,
    check_package,
    refuse_choice_as_key,
    refuse_cycle,
)
from dtf.config.hydra_internals import (
    CachingConfigRepository,
    ConfigLoaderImpl,
    ConfigRepository,
    ConfigSearchPathImpl,
    FileConfigSource,
    ImportlibResourcesConfigSource,
    SourcesRegistry,
)
from dtf.config.limits import check_hydra, one_line, read_checked
from dtf.config.option_files import SCHEMA, file_of, is_base, option_of
from dtf.config.settings import EXPERIMENT, GROUPS, Root
from dtf.config.yaml_text import parse_yaml
from dtf.core.errors import ConfigError

CONF = Path(__file__).parents[1] / "conf"
LEFT_IN = "HYDRA_REMOVE_TOP_LEVEL_DEFAULTS"
"""Hydra's flag of a node that still has its defaults list."""
HYDRA_GROUPS = ("launcher", "sweeper")
"""The groups of `hydra/` that have a choice here."""


_reads: ContextVar[dict[str, YamlFile] | None] = ContextVar("reads", default=None)


@contextmanager
def record_files() -> Iterator[dict[str, YamlFile]]:
    """Record every YAML file that Hydra reads inside the block, by its path as an option (`recipe/mine`).

    A composition that fails leaves what it has read.
    """
    reads: dict[str, YamlFile] = {}
    token = _reads.set(reads)
    try:
        yield reads
    finally:
        _reads.reset(token)


class PartsSource(ConfigSource):
    """The registry as a Hydra config source."""

    @staticmethod
    def scheme() -> str:
        return "dtf"

    def load_config(self, config_path: str) -> ConfigResult:
        option = self._find(config_path)
        if option is None:
            raise ConfigLoadError(f"{config_path} is not registered")
        group, name = option
        if group == "":
            node, package = to_plain(Root()), "_global_"
        elif config_path == presets.path_of(group, name):
            node, package = presets.preset_node(group, name), "_global_"
        elif presets.has_presets(group, name) and SCHEMA not in config_path:
            node, package = {"defaults": [f"{SCHEMA}/{name}@{group}", "_self_"]}, "_global_"
        else:
            node = option_node(group, name)
            if presets.has_presets(group, name):  # a file of the user's that starts from the class gets them too
                node = {"defaults": [f"/{presets.path_of(group, name)}@_global_", "_self_"], **node}
            package = f"observer.{name}" if group == "observer" and SCHEMA not in config_path else None
        return ConfigResult(
            provider=self.provider, path="dtf://", config=OmegaConf.create(node), header={"package": package}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        path = config_path.rstrip("/")
        return path in ("", SCHEMA, EXPERIMENT) or path.removesuffix(f"/{SCHEMA}") in GROUPS

    def is_config(self, config_path: str) -> bool:
        return self._find(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Options of a group; the bases are left out, they are for defaults lists."""
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [*GROUPS, EXPERIMENT]
        return [] if results_filter == ObjectType.GROUP else list(registered(config_path))

    @staticmethod
    def _find(config_path: str) -> tuple[str, str] | None:
        parts = config_path.removesuffix(".yaml").strip("/").split("/")
        if parts == [SCHEMA, "root"]:
            return "", "root"
        if len(parts) == 3 and (
            parts[1] == SCHEMA or (parts[1] == presets.FOLDER and presets.has_presets(parts[0], parts[2]))
        ):
            del parts[1]
        return (parts[0], parts[1]) if len(parts) == 2 and parts[1] in registered(parts[0]) else None


class GuardedFiles(FileConfigSource):
    """Hydra's source of YAML files. It records what it reads, and checks files outside dtf before it parses them."""

    def is_config(self, config_path: str) -> bool:
        return super().is_config(self._file_of(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        ours = Path(self.path) == CONF
        try:
            text = file.read_text("utf-8") if ours else read_checked(file)
            content = parse_yaml(text)
            content = {} if content is None else content
            header = self._get_header_dict(text[:512])
            result = ConfigResult(
                provider=self.provider,
                path=f"{self.scheme()}://{self.path}",
                config=OmegaConf.create(content),
                header={"package": None} if is_base(config_path) and header["package"] != "_global_" else header,
            )
        except ConfigError:
            raise
        except GrammarParseError as error:
            raise ConfigError(
                f"{file}: {error.full_key} has an interpolation that cannot be read; write ${{KEY}}"
            ) from error
        except Exception as error:  # YAML, a header, a value no parser takes: whatever a file can hold
            raise ConfigError(f"{file}: {one_line(error)}; it must be a YAML mapping of keys to values") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file} must be a YAML mapping of keys to values")
        if "hydra" in content and not isinstance(content["hydra"], dict):
            raise ConfigError(
                f"{file}: hydra={content['hydra']} takes Hydra's own settings away; it must be a mapping, or left out"
            )
        check_package(file, config_path, header["package"], text)
        defaults = content.pop("defaults", [])  # the result has copies
        check_defaults(file, config_path, defaults)
        check_order(file, config_path, defaults, content)
        refuse_choice_as_key(file, config_path, header["package"], content)
        reads = _reads.get()
        if reads is not None:
            path = config_path.removesuffix(".yaml")
            reads[path] = YamlFile(file, content, defaults, result.header)
            if not ours:
                refuse_cycle(path, reads)
        return result

    def file(self, config_path: str) -> Path:
        """What `load_config` reads."""
        return Path(self.path, self._normalize_file_name(self._file_of(config_path)))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """What a folder offers; the bases are left out, they are for defaults lists."""
        return [name for name in super().list(config_path, results_filter) if name != SCHEMA]

    def _file_of(self, config_path: str) -> str:
        """The path of an option in this folder; in dtf's own that of its class, see `file_of`."""
        if Path(self.path) != CONF or super().is_config(config_path):
            return config_path
        group, name = option_of(config_path)
        return file_of(group, name) if name in registered(group) else config_path


def _package_source(provider: str, path: str) -> ConfigSource:
    """A package as a Hydra config source: one on `hydra.searchpath` is read as the folder that it lies in."""
    package = ImportlibResourcesConfigSource(provider, path)
    if not provider.startswith("hydra.searchpath") or not package.available():
        return package
    folder = files(package.path)
    return GuardedFiles(provider, f"file://{folder}") if isinstance(folder, Path) else package


_own: dict[tuple[Path, str], tuple[ConfigResult | None, dict[str, YamlFile]]] = {}
"""By file and path as an option, what Hydra made of dtf's own files: read once, however many configs are composed."""


class _Repository(ConfigRepository):
    """Sources in order. Hydra copies it for each config that it composes."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if not isinstance(source, GuardedFiles) or Path(source.path) != CONF:
            return super().load_config(config_path)
        key = source.file(config_path), config_path
        if key not in _own:
            with record_files() as own:
                _own[key] = super().load_config(config_path), own
        result, own = _own[key]
        if (reads := _reads.get()) is not None:
            reads |= own
        return copy(result)

    def __deepcopy__(self, memo: object) -> _Repository:
        """With the same sources: nobody changes them. Hydra gives the copy another list where `hydra.searchpath` adds
        some.
        """
        return copy(self)


class Loader(ConfigLoaderImpl):
    """Hydra's composer over dtf's sources.

    Refuses settings of Hydra that would start code, however a config is asked for.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # Hydra warns of a searchpath that does not exist, and goes on
            config = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        check_hydra(config.hydra)
        return config

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[Any, CachingConfigRepository]:
        """Of Hydra's own defaults list only launcher and sweeper are composed: dtf reads nothing of the others."""
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        if config_name is None:  # it is asked for names only
            return parsed, repository
        own = repository.load_config("hydra/config")
        assert own is not None and isinstance(own.config, DictConfig)
        own.defaults_list = [
            entry
            for entry in own.defaults_list or []
            if isinstance(entry, GroupDefault) and entry.group in HYDRA_GROUPS
        ]
        # `check_hydra` refuses any logger
        own.config.hydra_logging = own.config.job_logging = {"root": None}
        return parsed, repository

    def _compose_config_from_defaults_list(self, defaults: list[Any], repo: Any) -> DictConfig:
        """In one merge: after each of Hydra's, which follow each other, OmegaConf walks over all that it has so far."""
        parts = [self._load_single_config(default, repo).config for default in defaults]
        config = OmegaConf.create()
        try:
            with flag_override(config, "no_deepcopy_set_nodes", True):
                config.merge_with(*parts)
        except OmegaConfBaseException:
            return super()._compose_config_from_defaults_list(defaults, repo)  # it names the part
        _strip_defaults(config)
        return config

    @staticmethod
    def _embed_result_config(ret: ConfigResult, package_override: str | None) -> ConfigResult:
        """A copy: Hydra merges the nodes themselves of what is in no package."""
        embedded = copy(ConfigLoaderImpl._embed_result_config(ret, package_override))
        embedded.config = deepcopy(ret.config) if embedded.config is ret.config else embedded.config
        return embedded

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Of Hydra's own groups only those that have a choice here; for tab completion."""
        found = super().get_group_options(group_name, results_filter, config_name, overrides)
        first, _, rest = group_name.strip("/").partition("/")
        if first != "hydra":
            return found
        return [name for name in found if (rest.split("/")[0] or name) in HYDRA_GROUPS]


def _strip_defaults(node: Any) -> None:
    """Take the defaults lists away that Hydra has left in configs of dataclasses."""
    if not isinstance(node, DictConfig) or node._is_missing() or node._is_none():
        return
    if node._get_flag(LEFT_IN):
        with flag_override(node, ["readonly", "struct"], False):
            node._set_flag(LEFT_IN, None)
            node.pop("defaults", None)
    for _, inner in node.items_ex(resolve=False):
        _strip_defaults(inner)


def make_loader(config_dir: str | None) -> Loader:
    """A composer that looks in Hydra's own files, `config_dir`, dtf's conf, the registry, then `hydra.searchpath`.

    ConfigError when `config_dir` is no folder.
    """
    plugins = Plugins.instance()
    plugins.register(PartsSource)
    SourcesRegistry.instance().types["file"] = GuardedFiles
    SourcesRegistry.instance().types["pkg"] = _package_source  # type: ignore[assignment]
    _offer_optuna()
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    if config_dir is not None:
        folder = os.path.abspath(config_dir)
        if not os.path.isdir(folder):
            raise ConfigError(
                f"--config-dir={config_dir} is no folder; give one that holds <group>/<option>.yaml files"
            )
        refuse_root(folder)  # Hydra would find these before dtf's
        refuse_bases(folder)
        path.append("command-line", f"file://{folder}")
    path.append("main", f"file://{CONF}")
    for plugin in plugins.discover(SearchPathPlugin):
        plugin().manipulate_search_path(path)  # type: ignore[attr-defined]
    path.append("dtf", "dtf://")
    path.append("schema", "structured://")
    return Loader(path)


def read_option(loader: Loader, group: str, option: str) -> YamlFile | None:
    """The file of an option; None where it has none."""
    with record_files() as reads:
        loader.repository.load_config(f"{group}/{option}")
    return reads.get(f"{group}/{option}")


def refuse_bases(folder: str) -> None:
    """Raise ConfigError for a folder of the user's that has a place of dtf's bases."""
    for place in (SCHEMA, *(f"{group}/{SCHEMA}" for group in GROUPS)):
        if os.path.isdir(os.path.join(folder, place)):
            raise ConfigError(f"{os.path.join(folder, place)} has the name of dtf's bases; rename the folder")


def refuse_root(folder: str) -> None:
    """Raise ConfigError for a folder of the user's with a file of the name of dtf's root config."""
    if os.path.isfile(os.path.join(folder, f"{ROOT}.yaml")):
        raise ConfigError(
            f"{os.path.join(folder, ROOT)}.yaml has the name of dtf's own root config; rename it and give "
            "--config-name=NAME"
        )


OPTUNA, BASIC_SWEEPER = "optuna", "basic"


@dataclass
class OptunaOptions:
    """The config node `hydra.sweeper`; `n_trials` as in Hydra's own plugin for Optuna 2."""

    n_trials: int = 20
    seed: int = 0


def _offer_optuna() -> None:
    """Let Hydra know the option `hydra/sweeper=optuna`."""
    ConfigStore.instance().store(group="hydra/sweeper", name=OPTUNA, node=OptunaOptions, provider="dtf")
