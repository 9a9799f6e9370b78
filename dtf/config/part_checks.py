"""What every part of a config checks of its own settings before a run starts. Torch-free."""

from __future__ import annotations

import traceback

from dtf.api.recipe import Recipe
from dtf.api.strategy import check_guard, check_roles
from dtf.api.task import Task
from dtf.checkpoint.resolve_path import check_weights_path
from dtf.config.compile_check import check_compile
from dtf.config.importable import check_importable
from dtf.config.settings import Settings
from dtf.core.author_line import author_line
from dtf.core.errors import ConfigError, DataError, DtfError


def check_parts(settings: Settings, data: bool, sparse_is_default: bool) -> None:
    """Let every part check the settings. `data`: whether the recipe is checked too. `sparse_is_default`: nobody chose
    how rows of sparse tables learn.

    ConfigError or DataError.
    """
    settings.check()
    if data:
        _check_recipe(settings.recipe)
    check_weights_path(settings.recipe.fine_tuning.weights, "recipe.model.weights")
    for part in (settings.optimizer, settings.sparse, settings.lr):
        part.check()
    settings.check_tables(sparse_is_default)
    settings.checkpoint.check()
    for observer in settings.observer.values():
        observer.check()
    devices, processes = settings.launcher.devices_kind(), settings.launcher.count()
    settings.precision.check(devices)
    parts = settings.recipe, settings.optimizer, settings.precision, settings.step, settings.seed
    task = Task(*parts, rows=settings.sparse)
    check_roles(settings.strategy, processes)
    settings.strategy.check(task, processes, devices)
    check_compile(settings, devices, processes)
    check_guard(settings.strategy, settings.recipe, settings.train.guard_every * settings.job.trains, processes)
    check_importable(settings)


def _check_recipe(recipe: Recipe) -> None:
    """Have the recipe check itself. ConfigError, or DataError for a file, also where it raises another exception."""
    try:
        recipe.check()
    except DtfError:
        raise
    except Exception as error:
        line = author_line(list(traceback.walk_tb(error.__traceback__)))
        text = f"{type(recipe).__name__}.check() raised {type(error).__name__}: {error}{f', at {line}' if line else ''}"
        raise (DataError if isinstance(error, OSError) else ConfigError)(text) from error
