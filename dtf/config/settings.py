"""The root of a config as typed objects, and the modules whose classes it may name.

Used by the launching process and by ranks alike; reads no files and knows no command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from dtf.api.lr import Schedule
from dtf.api.options import BudgetOptions, RunOptions, StepOptions, SweepOptions, TrainOptions
from dtf.api.precision import Format
from dtf.api.recipe import Recipe
from dtf.api.registry import groups, lookup, name_of, option, registered
from dtf.api.row_optimizer import DEFAULT
from dtf.api.row_storage import MOST_RECORD_BYTES, Values
from dtf.api.sampler import Tail
from dtf.api.schema import KeyProblem, build, build_option, coerce, coerce_option, option_node, show, unset
from dtf.api.sparse_table import NO_NUMBA, name_fault
from dtf.config.plugin_modules import brings_parts, entry_point_modules, load_plugin
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from dtf.api.job import Job
    from dtf.api.launcher import Launcher
    from dtf.api.observer import Observer
    from dtf.api.optimizer import Optimizer
    from dtf.api.precision import Precision
    from dtf.api.row_optimizer import RowOptimizer
    from dtf.api.sampler import Sampler
    from dtf.api.strategy import Strategy
    from dtf.checkpoint.options import Every

GROUPS = {
    "job": "what to do",
    "recipe": "model, data, loss and metrics",
    "strategy": "how the work is spread over processes",
    "precision": "number formats",
    "optimizer": "how gradients become updates",
    "sparse": "how rows of sparse tables learn",
    "lr": "learning rate over time",
    "sampler": "which rows make up a global batch",
    "checkpoint": "when to save, what to keep, where to resume",
    "launcher": "how processes come to be",
    "observer": "who reports; several at once: observer=[console,jsonl]",
}
"""Groups of parts, in the order they are shown."""

EXPERIMENT = "experiment"
"""The group of complete named runs: YAML files only, no node of its own."""

_PARTS = {
    "api": "lr precision",
    "checkpoint": "options",
    "data": "samplers",
    "optim": "optimizers torch_optimizers",
    "sparse": "row_optimizers",
    "strategies": "ddp dp fsdp mesh tensor pipeline.strategy",
    "pserver": "strategy",
    "observers": "console events jsonl mlflow_observer profile prometheus resources tensorboard wandb_observer",
    "launch": "env inline local manual static torchrun",
    "cluster": "kubernetes ray_platform sagemaker_platform slurm",
    "jobs": "cancel chaos.job checkpoint describe diff doctor evaluate export logs predict relay report status train "
    "tune verify",
}
"""Package -> its modules that register classes."""

_FOLDER = re.compile(r"[A-Za-z0-9._-]{0,128}")


@dataclass(frozen=True, kw_only=True)
class Root:
    """Keys outside all groups."""

    seed: int = option(
        default=0,
        least=0,
        most=2**64 - 1,  # what torch takes
        doc="from which every random number of the run follows",
    )
    plugins: list[str] = option(factory=list, doc="importable modules whose registered classes become options")
    run: RunOptions = option(factory=RunOptions, doc="where the run is kept and what it aims at")
    step: StepOptions = option(factory=StepOptions, doc="one optimizer step")
    train: TrainOptions = option(factory=TrainOptions, doc="length of the run and what happens on the way")
    budget: BudgetOptions = option(
        factory=BudgetOptions,
        doc="what the run, or a sweep, may take; at its end the state is saved and the ranks stop",
    )
    sweep: SweepOptions = option(factory=SweepOptions, doc="how the trials of a sweep (-m) are run")


@dataclass(frozen=True, kw_only=True)
class Settings(Root):
    """A whole config, typed."""

    job: Job
    recipe: Recipe
    strategy: Strategy
    precision: Precision
    optimizer: Optimizer
    sparse: RowOptimizer
    lr: Schedule
    sampler: Sampler
    checkpoint: Every
    launcher: Launcher
    observer: dict[str, Observer]

    @property
    def objective(self) -> tuple[str, str]:
        """The evaluation metric of the run, and `max` or `min`."""
        name = self.run.objective
        return (name, self.recipe.direction(name)) if name else self.recipe.objective

    def check(self) -> None:
        """Raise KeyProblem for root keys that make no run."""
        _check_steps(self)
        if self.job.trains and self.recipe.row_traits is not None:
            said = f"recipe={name_of('recipe', self.recipe)} (by {type(self.recipe).__name__}.row_traits)"
            self.sampler.check_rows(self.recipe.row_traits, said)
        _check_evaluations(self)
        _check_run(self)

    def check_tables(self, is_default: bool) -> None:
        """Raise ConfigError for sparse tables that cannot be trained with these settings, and for a choice of `sparse`
        where there are no tables. Called after the recipe's check. `is_default`: nothing was chosen.
        """
        widths = self.recipe.table_widths()
        for name in widths:
            if fault := name_fault(name):
                raise ConfigError(f"table_widths(): table {name!r} {fault}")
        if not widths:
            if self.job.trains and not is_default and self.sparse != lookup("sparse", DEFAULT)():
                name, because = type(self.recipe).__name__, self.recipe.inactive_keys().get("sparse")
                raise KeyProblem(
                    "sparse",
                    f"sparse says how rows of sparse tables learn, and {name} has "
                    f"none{f' as {because} is set' if because else ''}; leave sparse=... out",
                )
            if self.job.trains and self.checkpoint.delta_every is not None:
                raise KeyProblem(
                    "checkpoint.delta_every",
                    f"checkpoint.delta_every={self.checkpoint.delta_every} saves changed rows of sparse tables, and "
                    f"{type(self.recipe).__name__} has none; leave it out, and set checkpoint.every_steps",
                )
            return
        if importlib.util.find_spec("numba") is None:
            raise ConfigError(NO_NUMBA)
        self._check_values()
        self.sparse.check_storage()
        if not self.job.trains:
            return
        if self.step.ema:
            raise KeyProblem(
                "step.ema",
                f"step.ema={self.step.ema:g} averages all weights, and the rows of a sparse table are too many for "
                "that; use step.ema=0, or a dense table",
            )
        self.sparse.check_rows()
        self._check_disk()
        # schedules of other people may have none: then ranks find out
        self.sparse.shrinkage(self.sparse.rate(getattr(self.lr, "peak", 0.0)))

    def _check_values(self) -> None:
        """Raise KeyProblem for a number format that rows cannot have."""
        if self.sparse.values is Values.bf16 and self.precision.param is Format.fp64:
            raise KeyProblem(
                "sparse.values",
                "sparse.values=bf16 rounds rows that are float32, and precision.param=fp64 keeps float64; use "
                "precision=fp32 or sparse.values=param",
            )

    def _check_disk(self) -> None:
        """Raise KeyProblem for sparse tables that cannot lie on disk."""
        if not self.sparse.disk:
            return
        if self.checkpoint.delta_every is not None:
            raise KeyProblem(
                "checkpoint.delta_every",
                f"checkpoint.delta_every={self.checkpoint.delta_every} saves changed rows of tables in memory, and "
                f"sparse.disk={self.sparse.disk} is set, where every save links what did not change; leave it out, and "
                "set checkpoint.every_steps",
            )
        item = 8 if self.precision.param is Format.fp64 else 4
        for name, width in self.recipe.table_widths().items():
            size = 8 + item * self.sparse.record_columns(width) + self.sparse.extra_bytes
            if size > MOST_RECORD_BYTES:
                raise KeyProblem(
                    "sparse.disk",
                    f"sparse.disk={self.sparse.disk}: a row of table {name} takes {size:,} bytes with its state, and a "
                    f"page of {MOST_RECORD_BYTES:,} holds none; use a narrower table, a rule with less state "
                    "(sparse=rowwise_adagrad), or leave sparse.disk out",
                )


def coerce_config(config: dict[Any, Any]) -> dict[str, Any]:
    """`config` with every value of its key's type and every default filled in; UNSET stays.

    KeyProblem for the first thing wrong.
    """
    root = {field.name for field in fields(Root)}
    for name, value in config.items():
        if name not in root | set(GROUPS):
            raise KeyProblem(
                str(name), f"{show(name)}={show(value)} is no known key; {suggest(str(name), root | set(GROUPS))}"
            )
    fitted: dict[str, Any] = coerce(Root, {name: value for name, value in config.items() if name in root}, "")
    for group in GROUPS:
        if group == "observer":
            fitted[group] = _fit_observers(config.get(group))
        elif group not in config:
            raise KeyProblem(group, f"{group} is not chosen; give {group}=NAME")
        else:
            fitted[group] = coerce_option(group, config[group], group)
    return fitted


def parse_settings(config: dict[str, Any]) -> Settings:
    """Objects of the registered classes from a plain, resolved config; imports the plugins it names.

    ConfigError when it is no config.
    """
    load_parts(coerce(list[str], config.get("plugins", []), "plugins"))
    return build_settings(coerce_config(config))


def build_settings(config: dict[str, Any]) -> Settings:
    """`parse_settings` for what `coerce_config` returned."""
    missing = unset(config)
    if missing:
        raise KeyProblem(missing[0], f"{missing[0]}=??? is mandatory; give {missing[0]}=VALUE")
    hints = get_type_hints(Root)
    root = {name: build(hints[name], config[name]) for name in hints}
    parts = {group: build_option(group, config[group]) for group in GROUPS if group != "observer"}
    observers = {name: build_option("observer", value) for name, value in config["observer"].items()}
    settings = Settings(**root, **parts, observer=observers)
    settings.recipe.join(settings)
    return settings


def inactive_keys(config: Mapping[str, Any], on_command_line: Callable[[str], bool]) -> list[str]:
    """Keys that have no effect because of what the command line set. Their values come from files or are defaults.

    `on_command_line`: whether the command line set a key. A key that it set itself is left out: the part that reads the
    key refuses it.
    """
    node = config["recipe"]
    if lookup("recipe", node["name"]).inactive_keys is Recipe.inactive_keys or unset(node):  # type: ignore[attr-defined]
        return []
    inactive = build_option("recipe", node).inactive_keys()
    return [key for key, reason in inactive.items() if on_command_line(reason) and not on_command_line(key)]


def reset_to_default(tree: Any, key: str) -> None:
    """Set a key, or a whole group, of a config to its default; remove an entry of a mapping."""
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


def load_parts(plugins: list[str]) -> None:
    """Import every module that registers classes: dtf's own, those of installed packages (entry points), and
    `plugins`.
    """
    modules = [f"dtf.{package}.{module}" for package, names in _PARTS.items() for module in names.split()]
    recipes = importlib.import_module("dtf.recipes")
    for family in pkgutil.iter_modules(recipes.__path__):
        files = {file.stem for path in recipes.__path__ for file in Path(path, family.name).glob("*recipe.py")}
        modules += [f"dtf.recipes.{family.name}.{module}" for module in sorted(files)]
    for name in modules:
        importlib.import_module(name)
    for name in entry_point_modules():
        load_plugin(name)
    for name in plugins:
        load_plugin(name)
        if not brings_parts(name):
            raise ConfigError(
                f"plugins=[{name}] names a module that registers nothing; name one whose classes carry @register"
            )
    for group in groups():
        if group not in GROUPS:
            part, cls = next(iter(registered(group).items()))
            raise ConfigError(
                f"{cls.__module__}: @register({group!r}, {part!r}): {group} is no config group; "
                f"{suggest(group, GROUPS)}"
            )


def _fit_observers(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise KeyProblem(
            "observer", f"observer={show(value)} is no group of keys; choose with observer=[console,jsonl]"
        )
    return {str(name): coerce_option("observer", part, f"observer.{name}") for name, part in value.items()}


def _check_steps(settings: Settings) -> None:
    """Raise KeyProblem for a run without a length, and for an optimizer step that does not fit the recipe."""
    step, train = settings.step, settings.train
    if settings.job.trains and train.steps is None and train.epochs is None:
        raise KeyProblem(
            "train.steps",
            "train.steps=null and train.epochs=null leave the run without a length; give train.steps=N or "
            "train.epochs=N",
        )
    if step.micro_batch_rows > step.batch_size:
        raise KeyProblem(
            "step.micro_batch_rows",
            f"step.micro_batch_rows={step.micro_batch_rows} must be 0 to step.batch_size={step.batch_size}",
        )
    if settings.job.trains and settings.recipe.pairs and step.parts_pairs(step.micro_batch_rows):
        raise KeyProblem(
            "step.micro_batch_rows",
            f"step.micro_batch_rows={step.micro_batch_rows} parts the pairs of rows that the recipe mixes; use an even "
            f"number, or the whole batch of {step.batch_size} rows",
        )
    rows = settings.recipe.training_rows()
    if rows and rows < step.batch_size and settings.sampler.tail is Tail.drop:
        raise KeyProblem(
            "step.batch_size",
            f"step.batch_size={step.batch_size} must be at most the {rows} training rows: sampler.tail=drop leaves no "
            "batch of them",
        )


def _check_evaluations(settings: Settings) -> None:
    """Raise KeyProblem for options that need evaluations where there are none."""
    train = settings.train
    if train.early_stop and train.eval_every == 0:
        raise KeyProblem(
            "train.early_stop",
            f"train.early_stop={train.early_stop} needs evaluations, train.eval_every=0 turns them off; use null or a "
            "number of steps",
        )
    if type(settings.lr).fall is not Schedule.fall and train.eval_every == 0:
        raise KeyProblem(
            "lr",
            "lr=plateau falls when evaluations find no new best, train.eval_every=0 turns them off; use null or a "
            "number of steps",
        )


def _check_run(settings: Settings) -> None:
    """Raise KeyProblem for a budget, a name or an objective that cannot be, and for options of a sweep. Trials of one
    have none: what runs them has taken these.
    """
    budget, run, metrics = settings.budget, settings.run, settings.recipe.metrics
    if given := settings.sweep.given:
        key = given[0].partition("=")[0]
        raise KeyProblem(key, f"{given[0]} is of a sweep, and this is one run; add -m, or leave {key} out")
    if budget.cost is not None and budget.cost_per_hour is None:
        raise KeyProblem(
            "budget.cost",
            f"budget.cost={budget.cost:g} buys hours of a known price only; give budget.cost_per_hour=PRICE",
        )
    if not _FOLDER.fullmatch(run.name) or run.name in (".", ".."):
        raise KeyProblem(
            "run.name", f"run.name={show(run.name)} is no folder name; at most 128 letters, digits, '.', '_' and '-'"
        )
    if run.objective and run.objective not in metrics:
        raise KeyProblem(
            "run.objective",
            f"run.objective={show(run.objective)} is no metric of the recipe; {suggest(run.objective, metrics)}",
        )
    if run.objective:
        try:
            settings.recipe.direction(run.objective)
        except ConfigError as error:
            raise KeyProblem("run.objective", str(error)) from error
