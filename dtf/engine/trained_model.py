"""A trained model as its recipe's module, for whoever uses it in a program of their own. Not collective."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from dtf.api.sparse_table import Placement
from dtf.api.task import Source, Task
from dtf.config.settings import Settings
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.engine.inference import weights_of
from dtf.model.init import cast, init_model
from dtf.model.pretrained import Weights
from dtf.sparse.life import SCORE
from dtf.sparse.make_tables import tables_of
from dtf.sparse.stored_table import frozen
from dtf.sparse.table_checkpoints import BYTES

if TYPE_CHECKING:
    from dtf.sparse.pruning import Pruning
    from dtf.sparse.sharded_tables import ShardedTables


def load_trained(settings: Settings, model: str) -> nn.Module:
    """`trained_model` with the weights at the place that `job.model` names, else recipe.model.weights.

    DataError where there are none, ConfigError where they do not fit.
    """
    return trained_model(settings, weights_of(settings, model))


def trained_model(settings: Settings, weights: Weights, pruning: Pruning | None = None) -> nn.Module:
    """The recipe's model with these weights, on the CPU, in the format of precision.param and in evaluation mode, with
    its sparse tables inside: all rows, or those that `pruning` keeps.
    """
    model, tables, source = _parts(settings, weights, scored=bool(pruning))
    if tables is not None:
        from dtf.sparse.inference_module import InferenceModule

        kept = partial(pruning.kept, source=source) if pruning else None
        model = InferenceModule.of(model, tables, kept)
    return model.eval()


def whole_model(settings: Settings, weights: Weights) -> nn.Module:
    """`trained_model` with all rows of its tables, which stay where they are, however many there are."""
    from dtf.sparse.inference_module import LookupModule

    model, tables, _ = _parts(settings, weights)
    assert tables is not None
    return LookupModule(model, tables).eval()


def _parts(
    settings: Settings, weights: Weights, scored: bool = False
) -> tuple[nn.Module, ShardedTables | None, Source | None]:
    """The model and its tables. With `scored` the checkpoint too, if it keeps scores: the tables have them then."""
    recipe = settings.recipe
    model = init_model(recipe, settings.seed, weights)
    cast(model, settings.precision, torch.device("cpu"))
    source, rule = weights.source() if scored else None, settings.sparse
    scores = [] if source is None else [name for name in source.names() if name.endswith(f"/{SCORE}")]
    # scores of a table that lay on disk are read beside its rows; others need a table that goes on as it was trained
    beside_rows = any(f"/{BYTES}/" in name for name in scores)
    as_trained = bool(scores) and (bool(rule.disk) or not beside_rows)
    task = Task(
        recipe,
        settings.optimizer,
        settings.precision,
        settings.step,
        settings.seed,
        None,
        None if as_trained else weights,
        rule if as_trained else frozen(rule, weights),
    )
    tables = tables_of(task, World(Place()), Placement.replicated)
    if tables is not None and as_trained and source is not None:
        tables.load(source)
    return model, tables, source if scores else None
