"""What the rank of `job=export` does: write a trained model for use without dtf, and check that the files give its
outputs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from dtf.api.precision import set_switches
from dtf.api.recipe import Dataset, Recipe
from dtf.config.settings import Settings
from dtf.core import nest
from dtf.core.errors import ConfigError, DataError, DtfError
from dtf.core.files import replace_text
from dtf.core.types import Event, Place
from dtf.core.version import __version__
from dtf.engine.inference import names_of, open_model, weights_of
from dtf.engine.rank import Rank, run_rank
from dtf.engine.trained_model import trained_model, whole_model
from dtf.host.memory import available_bytes
from dtf.jobs.export import ExportJob, Form
from dtf.jobs.split_metrics import split_metrics
from dtf.model.class_probabilities import class_probabilities
from dtf.model.forward import cast_floating
from dtf.model.init import init_model
from dtf.model.pretrained import Weights
from dtf.sparse.table_checkpoints import COUNT

ROWS = 5
"""Rows to try an exported model on, beside a single one."""

BOUND = 1e-4
"""Largest difference of outputs that is rounding, relative to the largest output."""

MOST_TABLE_BYTES = 1 << 30
"""Of the rows of a sparse table that a program holds where nobody said how many it may have."""

COPIES = 3
"""Of all rows, that are in memory while they are put into files."""

ARRAYS = "preprocessing.safetensors"
"""Name of the file of the arrays that the preprocessing needs, where it needs some."""

METADATA = "dtf.json"
"""Name of the metadata in both files."""


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """An entry, see `rank_process.Entry`."""
    return run_rank(_export, config, folder, run_id, place, send)


def _export(rank: Rank) -> None:
    """Write the files into the run folder.

    DtfError when a file that is read back gives other outputs than the model.
    """
    settings, folder = rank.settings, rank.folder
    job: ExportJob = settings.job  # type: ignore[assignment]
    torch.set_num_threads(rank.place.threads)
    set_switches(settings.precision)
    stored = open_model(settings, job.model)
    rows = _trial_rows(settings, job)
    weights = weights_of(settings, job.model, stored)
    pruned: dict[str, Any] = {}
    if settings.recipe.tables():
        model, pruned = _with_tables(rank, job, weights, rows)
    else:
        model = trained_model(settings, weights)
    inputs, targets = _trial_batch(settings.recipe, rows, model)
    with torch.no_grad():
        expected = model(_plain(inputs))
    metadata = _metadata(settings.recipe, weights, inputs, expected, targets) | pruned
    if arrays := settings.recipe.preprocessing_arrays():
        from safetensors.numpy import save_file

        save_file(arrays, folder / ARRAYS)
        metadata["arrays"] = {"file": ARRAYS, "sha256": hashlib.sha256((folder / ARRAYS).read_bytes()).hexdigest()}
    text = json.dumps(metadata, indent=1)
    differences = {}
    for form in job.forms:
        rank.beat("start", 0)
        name = f"model.{form.value}"
        path = folder / f".{name}.new"
        match form:
            case Form.pt2:
                reread = _write_pt2(path, _program(model, inputs), text)
            case Form.safetensors:
                reread = _write_safetensors(path, model, text, _bare(settings, model))
            case Form.onnx:
                from dtf.jobs.onnx_form import write_onnx

                program, told = _program(model, inputs), {METADATA: text}
                reread = write_onnx(path, program, inputs, expected, told, rank.place.threads)
        differences[name] = max(
            _difference(expected, reread(_plain(inputs))),
            _difference(_first(expected), reread(_plain(nest.rows(inputs, 0, 1)))),
        )
        if not differences[name] <= BOUND:
            raise DtfError(
                f"{name} says something else than the model, by {differences[name]:.1e} relative to the largest "
                "output; please report this"
            )
        os.replace(folder / f".{name}.new", folder / name)
    metadata |= {"largest_difference": differences, "tolerance": BOUND, "tried_rows": ROWS}
    replace_text(folder / "model.json", json.dumps(metadata, indent=1) + "\n")


def _with_tables(rank: Rank, job: ExportJob, weights: Weights, rows: Dataset) -> tuple[nn.Module, dict[str, Any]]:
    """The model with the rows of its sparse tables that are asked for, and what model.json says of them: how many went
    along, and what those that stayed out cost.

    ConfigError for rows that are too many for a program, where nobody said how many it may have.
    """
    from dtf.sparse.pruning import Pruning

    settings, pruning = rank.settings, Pruning(job.min_score, job.max_rows)
    if not pruning:
        _refuse_large(weights, job.forms, settings.recipe)
        return trained_model(settings, weights), {}

    def judged(model: nn.Module) -> dict[str, float]:
        return split_metrics(settings, model, rows, lambda: rank.beat("evaluate", 0))

    evaluation = {} if job.input else {"all_rows": judged(whole_model(settings, weights))}
    model, source = trained_model(settings, weights, pruning), weights.source()
    assert source is not None
    tables: Any = model.tables
    told: dict[str, Any] = {"rows": {}}
    for name, table in zip(settings.recipe.tables(), tables.values(), strict=True):
        kept, count = table.count, int(source.read(f"table/{name}/{COUNT}"))
        told["rows"][name] = {"kept": kept, "left_out": count - kept}
    if evaluation:
        told["evaluation"] = evaluation | {"kept_rows": judged(model)}
    return model, told


def _refuse_large(weights: Weights, forms: list[Form], recipe: Recipe) -> None:
    source, free = weights.source(), available_bytes()
    if source is None:
        return
    for table, spec in recipe.tables().items():
        count = int(source.read(f"table/{table}/{COUNT}"))
        size = count * spec.width * 4
        if free is not None and COPIES * size > free:
            raise ConfigError(
                f"table {table} has {count:,} rows ({size / 1e9:.1f} GB), an export holds them {COPIES} times, and "
                f"{free / 1e9:.1f} GB of this host's memory are left; use job.max_rows=N or job.min_score=S for fewer"
            )
        if Form.pt2 in forms and size > MOST_TABLE_BYTES:
            raise ConfigError(
                f"table {table} has {count:,} rows ({size / 1e9:.1f} GB), and a program gets more than 1 GiB only "
                f"where job.max_rows says so; use job.max_rows=N or job.min_score=S for fewer, job.max_rows={count} "
                "for all, or job.forms=[safetensors]"
            )


def _trial_rows(settings: Settings, job: ExportJob) -> Dataset:
    """The rows to try the model on: those of `job.input`, else the evaluation split. DataError when there are none."""
    recipe = settings.recipe
    rows = recipe.open_inputs(Path(job.input).expanduser())[1] if job.input else recipe.open_data("eval", settings.seed)
    if not len(rows):
        raise DataError("there are no rows to try the exported model on")
    return rows


def _trial_batch(recipe: Recipe, rows: Dataset, model: nn.Module) -> tuple[Any, Tensor]:
    """Inputs, in the number format of the model, and targets of ROWS rows. DataError when one of them is bad."""
    dtype = next(t.dtype for t in model.parameters() if t.dtype.is_floating_point)
    inputs, targets = rows.fetch(np.arange(ROWS) % len(rows), 0)
    inputs = cast_floating(recipe.receive(inputs), dtype)
    if rows.bad:
        raise DataError(
            f"no trial without all of its rows: {next(iter(rows.bad.values()))}; repair it, or give others with "
            "job.input"
        )
    return nest.map_leaves(Tensor.contiguous, inputs), targets


def _metadata(recipe: Recipe, weights: Weights, inputs: Any, outputs: Any, targets: Tensor) -> dict[str, Any]:
    """What model.json says of a model and of how it is called."""
    described = _described(outputs)
    if isinstance(outputs, Tensor) and class_probabilities(recipe, outputs, targets) is not None:
        described |= _meaning(recipe, outputs)
    return {
        "recipe": type(recipe).__name__,
        "classes": list(names_of(recipe, weights)),
        "preprocessing": recipe.preprocessing(),
        "call": _call(inputs),
        "inputs": _described(inputs),
        "outputs": described,
        "weights": {"from": weights.about, "digest": weights.digest()},
        "versions": {"dtf": __version__, "torch": torch.__version__},
    }


Call = Callable[[Any], Any]


def _program(model: nn.Module, inputs: Any) -> ExportedProgram:
    """What torch.export makes of a model, for any batch size."""
    batch, inputs = torch.export.Dim("batch"), nest.map_leaves(lambda t: t, inputs, _with_ids)
    ids = (torch.export.Dim(f"ids{number}") for number in itertools.count())  # of each input of bags
    shapes = nest.map_leaves(lambda _: {0: batch}, inputs, lambda _: {"values": {0: next(ids)}, "lengths": {0: batch}})
    try:
        return torch.export.export(model, (_plain(inputs),), dynamic_shapes=(shapes,))
    except Exception as error:  # whatever the compiler makes of a model
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise ConfigError(f"torch.export cannot follow this model: {reason}; use job.forms=[safetensors]") from error


def _write_pt2(path: Path, program: ExportedProgram, metadata: str) -> Call:
    """Write a program; returns it as it is read back."""
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={METADATA: metadata})
    with path.open("rb") as file:
        return _quiet(torch.export.load(file).module())


def _write_safetensors(path: Path, model: nn.Module, metadata: str, bare: nn.Module) -> Call:
    """Write the tensors; returns `bare`, another model, with these."""
    from safetensors.torch import load_file, save_file

    tensors = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt", METADATA: metadata})
    bare.load_state_dict(load_file(path), assign=True)
    return _quiet(bare.eval())


def _bare(settings: Settings, model: nn.Module) -> nn.Module:
    """A model like `model` with other numbers. What no file holds is that of `model`."""
    other = init_model(settings.recipe, settings.seed + 1)
    return model.bare(other) if hasattr(model, "bare") else other  # type: ignore[operator]


def _quiet(model: Call) -> Call:
    def call(inputs: Any) -> Any:
        with torch.no_grad():
            return model(inputs)

    return call


def _plain(inputs: Any) -> Any:
    """Inputs as programs take them that know nothing of dtf: Bags as a dict."""
    return nest.map_leaves(lambda tensor: tensor, inputs, lambda bags: bags._asdict())


def _with_ids(bags: nest.Bags) -> nest.Bags:
    """Bags with two ids more in the first: torch.export makes no program for any number of ids of none or one."""
    more = torch.zeros_like(bags.lengths)
    more.view(-1)[0] = 2
    return nest.Bags(torch.cat([bags.values.new_zeros(2), bags.values]), bags.lengths + more)


def _first(values: Any) -> Any:
    return tree_map(lambda t: t[:1], values)


def _difference(a: Any, b: Any) -> float:
    """Largest difference of two outputs relative to the largest value; NaN stays NaN."""
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    scale = max(float(x.double().abs().max()) for x, _ in pairs)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs) / max(scale, 1e-30)


def _call(inputs: Any) -> str:
    """How the program is called: with one tensor, or one dict of them."""
    return (
        f"program({{{', '.join(f'{json.dumps(name)}: {name}' for name in inputs)}}})"
        if isinstance(inputs, dict)
        else "program(inputs)"
    )


def _meaning(recipe: Recipe, outputs: Tensor) -> dict[str, str]:
    """Which function makes probabilities of outputs, found by trying; empty where it is none of the usual ones."""
    usual = {"sigmoid": Tensor.sigmoid, "softmax over the last axis": lambda values: values.softmax(-1)}
    trial = torch.linspace(-2, 3, outputs.numel(), dtype=torch.float64).view(outputs.shape)
    probabilities = recipe.probabilities(trial)
    names = [
        name
        for name, function in usual.items()
        if probabilities is not None
        and probabilities.shape == trial.shape
        and torch.allclose(probabilities, function(trial))
    ]
    return {"are": "logits", "probabilities": names[0]} if names else {}


def _described(values: Any) -> Any:
    """Format and shape of tensors; the first axis is the batch's."""

    def one(tensor: Tensor, first: str = "batch") -> dict[str, Any]:
        return {"format": str(tensor.dtype).removeprefix("torch."), "shape": [first, *tensor.shape[1:]]}

    def leaf(value: Any) -> Any:
        is_bags = isinstance(value, nest.Bags)
        return {"values": one(value.values, "ids"), "lengths": one(value.lengths)} if is_bags else one(value)

    return tree_map(leaf, values, is_leaf=lambda value: isinstance(value, nest.Bags))
