"""A LightningModule and its data in a rank: opened, tried on a few rows, and read for what the recipe tells."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dtf.adapters.lightning_checks import (
    HOOKS,
    check_stepping,
    first_change,
    keep_modes,
    kept,
    own_numbers,
    path_of,
    refuse_hidden,
    unchanged,
)
from dtf.adapters.lightning_data import LoaderRows, batch_of, check_loader, label_of
from dtf.adapters.lightning_metrics import MetricSums, prepare_metrics
from dtf.adapters.lightning_module import (
    Records,
    check_module,
    is_lightning,
    metrics_of,
    overrides,
    refuse_hooks,
    run_step,
    stepped,
)
from dtf.adapters.lightning_optimizer import Configured
from dtf.adapters.lightning_parts import BATCH_SIZE, Described, ModuleOptimizer
from dtf.adapters.made_parts import MadeParts
from dtf.adapters.row_proof import Observe, fixed_draws, in_order, loss_mean, no_means
from dtf.adapters.trainer_view import TrainerView
from dtf.api.name_patterns import covered
from dtf.api.options import FineTuning
from dtf.api.sampler import Tail
from dtf.core.arguments import load, name_in_module
from dtf.core.errors import ConfigError
from dtf.model.init import seeded

if TYPE_CHECKING:
    from dtf.config.settings import Settings

_TRIED_ROWS = 16
_OWN_KEYS = frozenset(field.name for field in fields(FineTuning))
_DATA_HOOKS = frozenset(
    [
        "prepare_data",
        "setup",
        "teardown",
        "train_dataloader",
        "val_dataloader",
        "test_dataloader",
        "predict_dataloader",
        "load_from_checkpoint",
        "from_datasets",
    ]
)


class LightningRun:
    """The module of a recipe and its data, opened when they are first asked for. `settings`: of the run."""

    def __init__(self, recipe: Described, settings: Settings) -> None:
        self._recipe, self._settings = recipe, settings
        self._view = TrainerView(0, 0, 0)
        self._data: Any = None
        self._module: nn.Module | None = None  # for data that the module has itself, and for trials
        self._rows: dict[str, LoaderRows] = {}
        self._sums: MetricSums | None = None
        self._configured: Configured | None = None
        self._parts = MadeParts()

    # -------------------------------------------------------- data

    def prepare_data(self) -> None:
        """Call the hook that downloads. Once on each host."""
        target = load(self._recipe.module_target)
        has_own = not isinstance(target, type) or overrides(target, "prepare_data")
        for part in (self._opened_data(), *([self._spare()] if has_own else [])):
            if overrides(type(part), "prepare_data"):
                part.prepare_data()

    def rows(self, split: str) -> LoaderRows:
        """The rows of `train` or `eval`. Where there is no validation loader, those of an evaluation are the training
        rows.
        """
        if not self._rows:
            with self._seeded():
                self._open_rows()
        return self._rows["train" if split == "train" else "eval"]

    @property
    def train(self) -> LoaderRows:
        return self.rows("train")

    def _opened_data(self) -> Any:
        """The DataModule; the loaders; None where the module has them."""
        if self._data is None and self._recipe.data_target is not None:
            node = getattr(self._recipe, "data", None)
            given = vars(node) if node is not None else {}
            with self._seeded():
                self._data = self._made(self._recipe.data_target, given, self._recipe.takes_batch_size[1])
            if is_lightning(self._data, "LightningDataModule"):
                refuse_hooks(self._data, _DATA_HOOKS)
                self._view.datamodule, self._data.trainer = self._data, self._view
        return self._data

    def _open_rows(self) -> None:
        data = self._opened_data()
        if data is not None and not is_lightning(data, "LightningDataModule"):
            if not isinstance(data, list | tuple) or len(data) != 2:
                raise ConfigError(
                    f"{self._recipe.data_target} returned {type(data).__name__}; it must return two loaders, of "
                    "training and of validation"
                )
            loaders, names = list(data), ["the training loader", "the validation loader"]
        else:
            source = data if data is not None else self._spare()
            if data is not None and overrides(type(data), "setup"):
                data.setup("fit")
            who = type(source).__name__
            if not overrides(type(source), "train_dataloader"):
                raise ConfigError(
                    f"{who} has no train_dataloader(); name a LightningDataModule: dtf.lightning_recipe(..., data=...)"
                )
            loaders = [source.train_dataloader()]
            loaders += [source.val_dataloader()] if overrides(type(source), "val_dataloader") else [None]
            names = [f"{who}.train_dataloader()", f"{who}.val_dataloader()"]
        seed = self._settings.seed
        train, last = (
            LoaderRows(check_loader(loader, name), name, seed, self._recipe.shapes_vary) if loader is not None else None
            for loader, name in zip(loaders, names, strict=True)
        )
        if train is None:
            raise ConfigError(f"{names[0]} gives None; give a torch.utils.data.DataLoader")
        self._check_batch(train, last)
        self._rows = {"train": train, "eval": last or train}
        for rows in self._rows.values():
            rows.fetch(np.arange(min(2, len(rows))), 0)  # tells how tensors lie in a batch
        self._tell_length(train)

    def _check_batch(self, train: LoaderRows, last: LoaderRows | None) -> None:
        if train.batch_size != self._settings.step.batch_size and self._settings.job.trains:
            raise ConfigError(
                f"{train.name} has batches of {train.batch_size} rows, and step.batch_size is "
                f"{self._settings.step.batch_size}; set step.batch_size={train.batch_size} (with job=verify "
                f"job.batch_size={train.batch_size}), or let its class take an argument batch_size, which gets it"
            )
        if last is not None and last.drop_last:
            raise ConfigError(f"{last.name} has drop_last=True, and an evaluation counts each row; leave it out")

    def _tell_length(self, train: LoaderRows) -> None:
        options, batch = self._settings.train, self._settings.step.batch_size
        drops = self._settings.sampler.tail is Tail.drop
        per_epoch = max(1, len(train) // batch if drops else -(-len(train) // batch))
        total = options.steps if options.steps is not None else max(1, round((options.epochs or 0) * per_epoch))
        view = self._view
        view.max_epochs, view.max_steps, view.estimated_stepping_batches = -(-total // per_epoch), total, total
        view.num_training_batches = per_epoch

    # -------------------------------------------------------- the module

    def build(self, configure: bool = False) -> nn.Module:
        """A new module as its constructor makes it, whose forward pass is its step. Its optimizer becomes known where
        the job trains, or with `configure`.
        """
        with self._seeded():
            self.rows("train")  # hooks may ask for them; the module draws as if they had not
        module = self._module_made()
        part = self._settings.optimizer
        if isinstance(part, ModuleOptimizer) and (self._settings.job.trains or configure):
            cls = type(module).__mro__[2]
            if not overrides(cls, "configure_optimizers"):
                raise ConfigError(f"{cls.__name__} has no configure_optimizers(); choose: optimizer=adamw lr=cosine")
            configured = Configured(cls.configure_optimizers(module), module, self._view.num_training_batches)  # type: ignore[attr-defined]
            self._configured, part.inner = configured, configured.inner
            frozen = self._recipe.fine_tuning.freeze
            part.lr_factors = {
                name: factor for name, factor in configured.lr_factors.items() if not covered(frozen, name)
            }
            part.averages_squares = configured.inner.averages_squares
            part.momenta = configured.momenta if configured.cycles else None
            stepped_names = {name for group in configured.groups for name in group}
            for name, parameter in module.named_parameters():
                if name not in stepped_names:
                    parameter.requires_grad_(False)  # it is in no group, so that nothing steps it
        keep_modes(module)
        return module

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step."""
        if self._configured is None:
            self.build(configure=True)
        assert self._configured is not None
        return self._configured.rate(step)

    def _module_made(self) -> nn.Module:
        node: Any = vars(self._recipe)["model"]
        given = {key: value for key, value in vars(node).items() if key not in _OWN_KEYS}
        module = self._made(self._recipe.module_target, given, self._recipe.takes_batch_size[0])
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self._recipe.module_target} made a {type(module).__name__}; it must be a LightningModule"
            )
        self._parts.add(module, name_in_module(self._recipe.module_target))
        check_module(module)
        prepare_metrics(module)
        cls = type(module)
        stepped(module, self._packed, self._batch, self._view)
        for name, arguments in (("setup", ("fit",)), ("configure_model", ())):
            if overrides(cls, name):
                getattr(cls, name)(module, *arguments)
        check_stepping(module)
        return module

    def _made(self, target: Any, given: Mapping[str, Any], takes_batch_size: bool) -> Any:
        more = {BATCH_SIZE: self._settings.step.batch_size} if takes_batch_size else {}
        try:
            return load(target)(**given, **more)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("lightning", "pytorch_lightning", "torchmetrics"):
                raise ConfigError(f"{target} needs {error.name}: pip install lightning torchmetrics") from error
            raise

    def _spare(self) -> Any:
        """A module that trains nothing."""
        if self._module is None:
            with self._seeded():
                self._module = self._module_made().eval()
            self._new_numbers = own_numbers(metrics_of(self._module))
        return self._module

    def _seeded(self) -> AbstractContextManager[None]:
        """As the engine seeds constructors; generators are as before at its end."""
        return seeded(self._settings.seed)

    def _batch(self, inputs: Mapping[str, Tensor], trains: bool) -> Any:
        return batch_of(self.rows("train" if trains else "eval").form, inputs)

    def _packed(self, records: Records, rows: int) -> dict[str, Tensor]:
        return self.sums.pack(records, rows)

    # -------------------------------------------------------- trials

    @property
    def sums(self) -> MetricSums:
        """What the module logs; found by a trial of both steps."""
        if self._sums is None:
            self._sums = self._tried()
        return self._sums

    def _tried(self) -> MetricSums:
        self.rows("train")
        module = self._spare()
        cls = type(module).__mro__[2]
        found = {trains: self._records(module, cls, trains) for trains in (True, False)}
        self._refuse_kept(module, cls)
        names = dict.fromkeys(name for records in found.values() for name in records.values)
        shown = {name: path_of(name, metric, module) for r in found.values() for name, metric in r.metrics.items()}
        sums = MetricSums(module, cls, tuple(names), shown)
        for trains, records in found.items():
            outputs = sums.pack(records, 1)
            with unchanged(module, cls, HOOKS[trains]):
                sums.values([1.0, *outputs["sums"].tolist()])  # what hooks do at the end of an epoch is refused now
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        return sums

    def _records(self, module: nn.Module, cls: type, trains: bool, again: bool = False) -> Records:
        """What a step of a few rows logs. A training step's parameters without a gradient are looked at. `again`: the
        metrics count on.
        """
        inputs = self._few("train" if trains else "eval")
        with fixed_draws(), torch.enable_grad() if trains else torch.no_grad():
            batch = self._batch(inputs, trains)
            records = run_step(module, cls, batch, trains, _rows_of(inputs), again=again)
            if trains and isinstance(records.loss, Tensor) and records.loss.requires_grad:
                records.loss.backward()
                self._refuse_decayed(module)
        if records.loss is not None:
            records.loss = records.loss.detach()
        return records

    def _refuse_decayed(self, module: nn.Module) -> None:
        """Raise ConfigError for a parameter that torch would pass over, and dtf would decay."""
        if self._configured is None:
            return
        stepped_names = {name for group in self._configured.groups for name in group}
        for name, parameter in module.named_parameters():
            passed_over = name in stepped_names and parameter.requires_grad and parameter.grad is None
            if passed_over and self._configured.inner.decay_of(name, parameter.shape):
                raise ConfigError(
                    f"{name} gets no gradient from the first rows, and has weight decay: torch.optim would pass over "
                    "it, and here it would shrink; give it a group with weight_decay=0, or requires_grad_(False)"
                )

    def _refuse_kept(self, module: nn.Module, cls: type) -> None:
        """Raise ConfigError for what a step keeps for later: in the module, for a hook at the end of an epoch, or in a
        metric beside its sums.
        """
        for trains, hook in HOOKS.items():
            before = kept(module) if overrides(cls, hook) else None
            refuse_hidden(
                metrics_of(module),
                self._new_numbers,
                lambda again, trains=trains: self._records(module, cls, trains, again),
            )
            if before is not None and (name := first_change(before, kept(module))):
                raise ConfigError(
                    f"{cls.__name__} keeps what its steps compute in self.{name} for {hook}(): each rank has a "
                    "part of the rows; log a value, or a metric of torchmetrics, in the step"
                )

    def _few(self, split: str) -> dict[str, Tensor]:
        rows = self.rows(split)
        ids = np.unique(np.linspace(0, len(rows) - 1, min(_TRIED_ROWS, len(rows))).astype(np.int64))
        return rows.fetch(ids, 0)[0]

    def loss_mean(self, divided: bool) -> str:
        """Of what the loss of training_step is the mean, see `Recipe.loss_mean`. ConfigError where rows are divided,
        and it is no mean.
        """
        if not divided:
            return ""
        inputs = self._few("train")
        label = label_of(inputs)
        inputs = in_order(inputs, label)
        module = self._spare()
        cls = type(module).__mro__[2]
        sums = frozenset(f"{name}.{key}" for name, metric in metrics_of(module).items() for key in metric._defaults)
        with fixed_draws():
            observe, inputs = _in_double(module, lambda values: self._observed(module, cls, values), inputs)
            others = [name for name in no_means(observe, inputs, sums) if name != "loss"]
            mean = loss_mean(observe, inputs, label)
            module.float()
        if mean is None:
            raise ConfigError(
                f"{cls.__name__}.training_step returns a loss that is no mean over rows (a sum, class weights, a loss "
                "between rows): those of two parts of a batch do not make that of the whole, so that gradients cannot "
                "be added up over ranks; return a mean over rows, or use launcher.processes=1 step.micro_batch_rows=0"
            )
        if others:
            raise ConfigError(
                f"{cls.__name__}.training_step logs {others[0]!r}, which is no mean over rows, so that parts of a "
                "batch do not make its value; log the metric of torchmetrics itself, self.log(name, self.metric), "
                "leave it out, or use launcher.processes=1 step.micro_batch_rows=0"
            )
        return mean.value

    def _observed(self, module: nn.Module, cls: type, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        records = run_step(module, cls, self._batch(inputs, True), True, _rows_of(inputs))
        values = {name: torch.as_tensor(value) for name, value in records.values.items()}
        for name, metric in metrics_of(module).items():
            values |= {f"{name}.{key}": getattr(metric, key) - start for key, start in metric._defaults.items()}
        return {**values, "loss": records.loss} if records.loss is not None else values


def _rows_of(inputs: Mapping[str, Tensor]) -> int:
    return len(next(iter(inputs.values())))


def _in_double(module: nn.Module, observe: Observe, inputs: dict[str, Tensor]) -> tuple[Observe, dict[str, Tensor]]:
    """The same in fp64, where the module computes in it."""
    wide = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    module.double()
    try:
        observe(wide)
        return observe, wide
    except RuntimeError:  # it makes tensors of one format
        module.float()
        return observe, inputs
