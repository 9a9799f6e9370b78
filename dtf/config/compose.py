"""From a command line to a finished config: Hydra composes it, and dtf checks every key.

What comes out holds plain values only: no DictConfig, no interpolation, no key that no class has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from hydra import version
from hydra.core.default_element import GroupDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override, read_write
from omegaconf.errors import OmegaConfBaseException

from dtf.api.job import Job
from dtf.api.registry import registered
from dtf.api.row_optimizer import DEFAULT
from dtf.api.schema import UNSET, KeyProblem, build_option, unset
from dtf.config.advice import CommandLine, drop_advice, rate_notes
from dtf.config.as_written import is_as_in_file
from dtf.config.command_line import parse_arguments
from dtf.config.defaults_lists import ROOT, YamlFile, require_base
from dtf.config.environment import refuse_variables
from dtf.config.from_host import fill_from_host
from dtf.config.hydra_errors import translated
from dtf.config.hydra_sources import make_loader, read_option, record_files
from dtf.config.importable import Chosen, chosen_classes, plugins_of
from dtf.config.limits import resolve_interpolations
from dtf.config.messages import COMMAND_LINE, Located, is_set_by, parse, with_suggestions
from dtf.config.node_names import check_nodes, set_true_names
from dtf.config.override_checks import check_override, node_at, refuse_address, refuse_shadows, refuse_targets
from dtf.config.part_checks import check_parts
from dtf.config.plugin_names import plugins_in, plugins_in_overrides
from dtf.config.provenance import NO_EFFECT, Source, check_texts, check_unset, origin, sources
from dtf.config.python_overrides import Overrides, as_texts, in_words_of_python, plugin_override, summary
from dtf.config.settings import (
    EXPERIMENT,
    GROUPS,
    Settings,
    build_settings,
    coerce_config,
    inactive_keys,
    load_parts,
    reset_to_default,
)
from dtf.core.errors import ConfigError
from dtf.core.redaction import redact

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

T = TypeVar("T")
Resolve = Callable[[DictConfig], dict[Any, Any]]


def compose(argv: Sequence[str]) -> Composed:
    """The config that a command line asks for.

    ConfigError for anything in it, or in the files it names, that fits no class.
    """
    flags = parse_arguments(argv)
    return Composer(flags.config_dir, flags.config_name, flags.overrides).compose(flags.overrides)


@dataclass(frozen=True, repr=False)
class Composed:
    """A composed, resolved and validated config."""

    config: dict[str, Any]  # plain; may hold "???" where a mandatory key was not given, `settings` refuses that
    choices: dict[str, Any]  # group -> option as it was chosen; options that are YAML files have names of their own
    overrides: tuple[str, ...]
    # as Hydra composed it, with its own node and interpolations as written
    tree: DictConfig = field(repr=False, compare=False)
    composer: Composer = field(repr=False, compare=False)
    reads: dict[str, YamlFile] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()  # lines on values that the chosen options have no key for, see `drop_advice`
    inactive: tuple[str, ...] = ()  # keys without effect, which have their defaults
    classes: tuple[Chosen, ...] = field(default=(), repr=False, compare=False)  # that the config was checked against

    @cached_property
    def settings(self) -> Settings:
        """Objects of the registered classes. ConfigError when a mandatory key is missing."""
        with self._located():
            return build_settings(self.config)

    @property
    def job(self) -> Job:
        """The job alone: what it does may need no other part."""
        with self._located():
            missing = unset(self.config["job"], "job")
            if missing:
                raise KeyProblem(missing[0], f"{missing[0]}=??? is mandatory; give {missing[0]}=VALUE")
            return build_option("job", self.config["job"])

    @property
    def command(self) -> list[str]:
        """Arguments that compose the same config in another process."""
        return [*self.composer.flags, *self.overrides]

    def check(self, data: bool = True) -> Settings:
        """Let every part check the settings, and return them. Jobs that start ranks call it before they do.

        `data=False`: the recipe is not checked, as its data need not be there. ConfigError or DataError.
        """
        settings = self.settings
        with self._located():
            sparse = self.composer.read("sparse", DEFAULT)
            check_parts(settings, data, is_as_in_file(self.tree["sparse"], "sparse", DEFAULT, sparse))
        return settings

    def recompose(self, overrides: Sequence[str]) -> Composed:
        """Compose the same command line with more overrides at its end.

        Where these choose an option of a group, the earlier choice is dropped. Where it is another option than before,
        earlier overrides `<group>.key=value` are dropped too, as they belong to the earlier option.
        """
        new = parse(overrides, self.composer.loader)
        chosen = {override.key_or_group: override.value() for override in new if self.composer.chooses(override)}
        remaining = []
        for text, override in zip(self.overrides, parse(self.overrides, self.composer.loader), strict=True):
            group = override.key_or_group.split(".")[0]
            is_other_option = group in chosen and chosen[group] != self.choices.get(group)
            if override.key_or_group not in chosen and not is_other_option:
                remaining.append(text)
        return self.composer.compose([*remaining, *overrides])

    def with_(self, overrides: Overrides) -> Composed:
        """The config with more overrides, in the forms that `dtf.compose` takes; see `recompose`."""
        with in_words_of_python():
            return self.recompose(as_texts(overrides)).with_homes()

    def with_homes(self) -> Composed:
        """The same config with the modules that define its classes among its plugins, so that other processes import
        them.
        """
        if self.config["plugins"] == UNSET or not (homes := plugins_of(self.config)):
            return self
        texts = [text for text in self.overrides if not text.startswith("plugins=")]
        return self.composer.compose([*plugin_override([*self.config["plugins"], *homes]), *texts])

    @property
    def is_outdated(self) -> bool:
        """Whether a class that it chooses was registered anew since it was composed, as by a cell that runs again."""
        return any(registered(chosen.group).get(chosen.name) is not chosen.cls for chosen in self.classes)

    def __str__(self) -> str:
        """What was chosen of each group, and the keys that were given."""
        return summary(self.choices, self.overrides)

    def __repr__(self) -> str:
        return f"<dtf config\n{self}>"

    def to_yaml(self) -> str:
        """Every key with its value, as `config.yaml` of a run has them: secrets are starred out."""
        import yaml

        return yaml.safe_dump(redact(self.config), sort_keys=False)

    def chosen(self) -> dict[str, list[str]]:
        """The options that the command line itself chooses, by group."""
        named = [
            override
            for override in parse(self.overrides, self.composer.loader)
            if self.composer.chooses(override) and not override.is_delete()
        ]
        values = {override.key_or_group: override.value() for override in named}
        return {group: value if isinstance(value, list) else [value] for group, value in values.items() if value}  # type: ignore[dict-item]

    def origin(self, key: str) -> str:
        """Where a key got its value: `on the command line`, `in FILE`, or "" when it is a default."""
        return self.composer.origin(key, self.overrides, self.reads)

    def sources(self, key: str) -> list[Source]:
        """The places that give a key a value; the last one counts."""
        composer = self.composer
        found = sources(key, composer.config_name, self.overrides, composer.loader, self.reads)
        return [*found, NO_EFFECT] if any(f"{key}.".startswith(f"{name}.") for name in self.inactive) else found

    def _located(self) -> Located:
        return Located(self.origin)


class Composer:
    """Composes configs from dtf's conf, a folder of the user's, and the registry. `typed`: all of the command line."""

    def __init__(
        self, config_dir: str | None = None, config_name: str | None = None, typed: Sequence[str] | None = None
    ) -> None:
        version.setbase("1.3")
        setup_globals()
        JobRuntime.instance().set("name", "dtf")
        load_parts([])
        self.config_dir, self.config_name = config_dir, config_name or ROOT
        self.flags = [
            f"--{key}={value}" for key, value in (("config-dir", config_dir), ("config-name", config_name)) if value
        ]
        self.loader, self.typed = make_loader(config_dir), typed
        self._plugins: list[str] = []

    def compose(self, overrides: Sequence[str], resolve: Resolve = resolve_interpolations) -> Composed:
        """See `compose`; `overrides` are those of one run, not of a sweep. `resolve`: how a config becomes plain."""
        given = list(overrides)
        with Located(lambda key: COMMAND_LINE):
            for override in parse(given, self.loader):
                check_override(override, self.loader)
        config, reads = self.load(given)
        return self.finish(config, given, reads, resolve)

    def load(self, overrides: list[str]) -> tuple[DictConfig, dict[str, YamlFile]]:
        """What Hydra composes, not yet checked, and the YAML files that it read.

        Where the job uses the model of a run, the command line stands over the config of that run.
        """
        parsed = parse(overrides, self.loader)
        chosen = {
            override.key_or_group: str(override.value())
            for override in parsed
            if not override.is_delete() and not override.is_sweep_override() and not isinstance(override.value(), dict)
        }
        first = overrides
        # only the run's recipe may have some keys, so which run it is must be found without them
        if _uses_model(chosen.get("job")):
            first = [
                text
                for text, override in zip(overrides, parsed, strict=True)
                if "." not in override.key_or_group or override.key_or_group.startswith("job.")
            ]
        config, reads = self.with_plugins(overrides, lambda: self._load(first))
        found = node_at(config, "job")
        job = OmegaConf.to_container(found) if OmegaConf.is_dict(found) else {}
        if not isinstance(job, dict) or not _uses_model(job.get("name")):
            return config, reads
        from dtf.config.inherit import overrides_from_run

        keys = registered("job")[job["name"]].keys_of_run  # type: ignore[attr-defined]
        inherited = overrides_from_run(str(job.get("model", "")), keys, chosen, self._plugins)
        config, reads = self.with_plugins(overrides, lambda: self._load([*inherited, *overrides]))
        with read_write(config.hydra.overrides):
            # what was typed, for titles of trials
            config.hydra.overrides.task = list(config.hydra.overrides.task)[len(inherited) :]
        return config, reads

    def with_plugins(self, overrides: Sequence[str], action: Callable[[], T]) -> tuple[T, dict[str, YamlFile]]:
        """Import the plugins that `overrides` name, and return the result of `action` and the YAML files it read.

        `action` is repeated until every plugin that these files name is imported. It may fail before that: a file that
        names a plugin may choose an option which exists only after the import.
        """
        named = plugins_in_overrides(overrides)
        while True:
            new = [name for name in named if name not in self._plugins]
            if new:
                load_parts([*self._plugins, *new])
                self._plugins += new
            failure, result = None, None
            with record_files() as reads:
                try:
                    result = action()
                except Exception as error:  # noqa: BLE001  explained below, unless a plugin it asks for is missing
                    failure = error
            named = [name for read in reads.values() for name in plugins_in(read.content)]
            if set(named) <= set(self._plugins):
                require_base(self.config_name, reads)
                if failure is not None:
                    raise translated(failure, overrides, self.loader, reads) from failure
                return result, reads  # type: ignore[return-value]

    def finish(
        self,
        composed: DictConfig,
        overrides: Sequence[str],
        reads: dict[str, YamlFile],
        resolve: Resolve = resolve_interpolations,
    ) -> Composed:
        """Resolve and validate what Hydra composed."""
        choices = {
            group: choice
            for group, choice in composed.hydra.runtime.choices.items()
            if group in GROUPS or group == EXPERIMENT
        }
        refuse_shadows(composed, choices)
        state = HydraConfig.instance()
        before, state.cfg = state.cfg, None
        given = CommandLine(self.config_name, overrides, self.loader, reads)
        with Located(lambda key: self.origin(key, overrides, reads)):
            try:
                state.set_config(composed)  # for ${hydra:...}
                plain = resolve(composed)
                refuse_targets(plain)
                check_nodes(plain, reads, given.places)
                check_unset(plain, reads, given.places)
                notes = drop_advice(plain, composed, given)
                fitted = _fit(plain)
                check_texts(plain, fitted, given.places)
                config, inactive = self._reset_inactive_keys(composed, fitted, overrides)
                set_true_names(config, composed)
                fill_from_host(config, lambda key: bool(self.origin(key, overrides, reads)))
                notes += rate_notes(config, given)
                refuse_address(config)
                refuse_variables(config, given, overrides if self.typed is None else self.typed)
            except (ConfigError, KeyboardInterrupt):
                raise
            except OmegaConfBaseException as error:  # an interpolation that leads nowhere
                key = str(error.full_key or "")
                raise KeyProblem(key, f"{error.full_key}: {str(error).splitlines()[0]}") from error
            except Exception as error:
                raise translated(error, overrides, self.loader, reads) from error
            finally:
                state.cfg = before
        if config["plugins"] != UNSET:
            config["plugins"] += [name for name in self._plugins if name not in config["plugins"]]
        options: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(choices))  # type: ignore[assignment]
        classes = tuple(chosen_classes(config))
        return Composed(
            config, options, tuple(overrides), composed, self, reads, tuple(notes), tuple(inactive), classes
        )

    def _reset_inactive_keys(
        self, composed: DictConfig, config: dict[str, Any], overrides: Sequence[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """Set keys that have no effect because of the command line to their defaults, in both configs in place; see
        `Recipe.inactive_keys`. Returns `config`, and these keys.
        """
        keys = inactive_keys(config, lambda key: is_set_by(key, overrides, self.loader))
        for key in keys:
            reset_to_default(config, key)
            with flag_override(composed, ["readonly", "struct"], False):
                reset_to_default(composed, key)
        return config, keys

    def origin(self, key: str, overrides: Sequence[str], reads: dict[str, YamlFile]) -> str:
        """See `Composed.origin`."""
        return origin(key, self.config_name, overrides, self.loader, reads)

    def options(self, group: str) -> list[str]:
        """Names that `<group>=` accepts."""
        return self.loader.get_group_options(group)

    def defaults(self) -> dict[str, list[str]]:
        """Group -> options of the root config's defaults list."""
        loaded = self.loader.repository.load_config(self.config_name)
        chosen: dict[str, list[str]] = {}
        for entry in loaded.defaults_list or [] if loaded else []:
            if isinstance(entry, GroupDefault) and entry.group and entry.value:
                chosen[entry.group] = [entry.value] if isinstance(entry.value, str) else list(entry.value)
        return chosen

    def read(self, group: str, option: str) -> YamlFile | None:
        """The file of an option; None where it has none."""
        return read_option(self.loader, group, option)

    def chooses(self, override: Override) -> bool:
        """Whether an override speaks of the option of a group, and not of keys."""
        return self.loader.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)

    def _load(self, overrides: list[str]) -> DictConfig:
        try:
            return self.loader.load_configuration(self.config_name, overrides, RunMode.RUN)
        except ConfigCompositionException as error:
            if not str(error).startswith("Could not override"):
                raise
        # An unknown key, or a new entry of a mapping. Let it in, so that it is checked like a key of a file.
        forced = [
            f"++{text}" if self._is_plain(override) else text
            for text, override in zip(overrides, parse(overrides, self.loader), strict=True)
        ]
        return self.loader.load_configuration(self.config_name, forced, RunMode.RUN)

    def _is_plain(self, override: Override) -> bool:
        marked = override.is_add() or override.is_force_add() or override.is_delete() or override.package is not None
        return not marked and not override.is_hydra_override() and not self.chooses(override)


def _uses_model(job: Any) -> bool:
    known = registered("job").get(str(job))
    return known is not None and known.uses_model  # type: ignore[attr-defined]


def _fit(plain: dict[Any, Any]) -> dict[str, Any]:
    try:
        return coerce_config(plain)
    except KeyProblem as problem:
        raise with_suggestions(problem, plain) from problem
