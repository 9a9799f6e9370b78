"""A LightningModule whose forward pass is its step: what `training_step` and `validation_step` return and log.

Names what a module uses that has no meaning here. Knows no strategy.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from dtf.adapters.lightning_data import label_of
from dtf.adapters.trainer_view import TrainerView, withheld
from dtf.core.errors import ConfigError

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_CONTRACTS = ("LightningModule", "LightningDataModule")

CALLED = frozenset(
    {
        "forward",
        "training_step",
        "validation_step",
        "configure_optimizers",
        "configure_model",
        "prepare_data",
        "setup",
        "train_dataloader",
        "val_dataloader",
        "on_train_epoch_end",
        "on_validation_epoch_end",
    }
)
"""Hooks of a module that are called, each where Lightning does."""

OTHER_USES = frozenset(
    {"test_step", "predict_step", "test_dataloader", "predict_dataloader", "teardown", "load_from_checkpoint"}
) | {f"on_{use}_{when}" for use in ("test", "predict") for when in (
    "start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end", "model_eval", "model_train"
)}  # fmt: skip
"""Hooks of a module that have no part in training: they are not called."""

_records: ContextVar[Records | None] = ContextVar("records", default=None)


class Records:
    """What one step of a module returned and logged."""

    def __init__(self, module: nn.Module, trains: bool, rows: int = 0) -> None:
        self.module, self.trains, self.rows = module, trains, rows
        self.loss: Tensor | None = None
        self.values: dict[str, Any] = {}  # by name: numbers, and tensors ()
        self.metrics: dict[str, Any] = {}  # by name: metrics of torchmetrics
        self.scores: Any = None  # what the module's own forward() gave last
        self.labelled = False  # whether rows have a class each

    def log(self, name: str, value: Any) -> None:
        """Note what `self.log` was called with."""
        if is_metric(value):
            self.metrics[name] = value
        elif isinstance(value, Mapping):
            raise ConfigError(f"self.log({name!r}) got a dict; use self.log_dict")
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}; log single numbers")
        elif isinstance(value, Tensor):
            self.values[name] = value.detach().reshape(())
        elif isinstance(value, str) or not hasattr(value, "__float__"):
            raise ConfigError(f"self.log({name!r}) got a {type(value).__name__}; log single numbers")
        else:
            self.values[name] = float(value)

    def close(self, returned: Any) -> None:
        """Take what the step returned."""
        found = returned.get("loss", returned.get("val_loss")) if isinstance(returned, Mapping) else returned
        if self.trains:
            if returned is None:
                raise ConfigError(
                    "training_step returned None, which leaves a batch out; return a loss for every batch, one of "
                    "zeros that depend on the outputs where there is nothing to learn from"
                )
            if not isinstance(found, Tensor):
                raise ConfigError(
                    f"training_step returned {_kind(returned)}; return the loss, a tensor (), or a dict with 'loss'"
                )
            self.values.pop("loss", None)
        elif not isinstance(returned, Mapping) or found is None:
            whole = [returned] if isinstance(returned, Tensor) and returned.numel() == 1 else []
            parts = {name: words for name in self.values if "loss" in (words := _words(name))}
            main = [self.values[name] for name, words in parts.items() if words <= _WHOLE_LOSS]
            found = next(iter([*main, *whole, *(self.values[name] for name in parts)]), None)
        if isinstance(found, Tensor) and found.numel() != 1:
            raise ConfigError(
                f"training_step returned a loss of shape {tuple(found.shape)}; return one number, such as its mean()"
            )
        if found is not None:
            self.loss = found.reshape(()) if isinstance(found, Tensor) else torch.tensor(float(found))


_WHOLE_LOSS = {"loss", "val", "valid", "validation", "eval", "total", "mean", "avg", "epoch", ""}
"""Words in the name of a loss that is no part of another one."""


def _words(name: str) -> set[str]:
    return set(re.split("[^a-z]+", name.lower()))


def _kind(value: Any) -> str:
    return (
        f"a dict without 'loss' ({', '.join(map(str, value))})" if isinstance(value, Mapping) else type(value).__name__
    )


def is_metric(value: Any) -> bool:
    """Whether it is a metric of torchmetrics."""
    return isinstance(value, nn.Module) and any(
        _is_library(base, "Metric", "torchmetrics.") for base in type(value).__mro__
    )


def is_lightning(value: object, name: str) -> bool:
    """Whether an object is of the class `name` of Lightning, under either name of the package."""
    return any(_is_library(base, name, *_LIBRARIES) for base in type(value).__mro__)


def _is_library(cls: type, name: str, *packages: str) -> bool:
    return cls.__name__ == name and f"{cls.__module__}.".startswith(packages)


def _bases(cls: type) -> set[type]:
    """Lightning's own classes of a module or its data: that of the contract, and what it is made of."""
    found = [base for base in cls.__mro__ for name in _CONTRACTS if _is_library(base, name, *_LIBRARIES)]
    return {base for base in (found[0].__mro__ if found else ()) if f"{base.__module__}.".startswith(_LIBRARIES)}


def refuse_hooks(module: object, called: frozenset[str]) -> None:
    """Raise ConfigError for a method of Lightning that a class replaces, and that nothing calls here."""
    cls = type(module)
    theirs = {name: value for base in _bases(cls) for name, value in vars(base).items()}
    for name in theirs:
        if name.startswith("_") or name in called or not overrides(cls, name) or not callable(getattr(cls, name)):
            continue
        raise ConfigError(f"{cls.__name__} overrides {name}(), which is not called here, so that numbers would differ; "
                          f"{_REMEDIES.get(name, 'leave it out')}")  # fmt: skip


_REMEDIES = {
    "on_train_batch_end": "leave it out, or do its work in training_step",
    "on_train_batch_start": "leave it out, or do its work in training_step",
    "optimizer_step": "leave it out: learning rates come from the scheduler of configure_optimizers",
    "lr_scheduler_step": "leave it out, and let the scheduler be one of torch.optim.lr_scheduler",
    "configure_gradient_clipping": "leave it out, and set step.clip_norm",
    "on_before_optimizer_step": "leave it out, and set step.clip_norm if it clips gradients",
    "on_after_backward": "leave it out, and set step.clip_norm if it clips gradients",
    "configure_callbacks": "leave it out: train.early_stop, checkpoint.keep_best and observer do the work of callbacks",
    "on_validation_batch_end": "leave it out, and log a metric of torchmetrics in validation_step",
    "on_after_batch_transfer": "leave it out, and do its work in training_step and validation_step",
    "on_before_batch_transfer": "leave it out, and do its work in the data set",
    "transfer_batch_to_device": "leave it out: the strategy moves batches",
}


def check_module(module: nn.Module) -> None:
    """Raise ConfigError for what a LightningModule may do elsewhere, and not here."""
    name = type(module).__name__
    if not is_lightning(module, "LightningModule"):
        raise ConfigError(f"{name} is no LightningModule; write a recipe for it (docs/own-recipe.md)")
    refuse_hooks(module, CALLED | OTHER_USES)
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ConfigError(f"{name} has hooks on itself; register them on the modules in it")
    if "dataloader_iter" in inspect.signature(type(module).training_step).parameters:  # type: ignore[attr-defined]
        raise ConfigError(f"{name}.training_step takes dataloader_iter; take (batch, batch_idx)")


def stepped(
    module: nn.Module,
    pack: Callable[[Records, int], dict[str, Tensor]],
    batch_of: Callable[[Mapping[str, Tensor], bool], Any],
    view: TrainerView,
) -> None:
    """Give a LightningModule a forward pass that is its step, in place. Parameters, names and modules stay as they are.

    `pack(records, rows)`: the outputs of what a step returned and logged. `batch_of(inputs, trains)`: its batch.
    """
    cls = type(module)

    class Stepped(_Here, cls):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            records = _records.get()
            if records is None or records.module is not self:
                return nn.Module.__call__(self, *args, **kwargs)
            records.scores = cls.forward(self, *args, **kwargs)  # hooks of a strategy on the whole have run
            return records.scores

        def _step_or_forward(self, *args: Any, **kwargs: Any) -> Any:
            records = _records.get()
            if records is not None and records.module is self:
                return cls.forward(self, *args, **kwargs)
            (inputs,) = args
            trains, rows = self.training, len(next(iter(inputs.values())))
            label = inputs[label_of(inputs)]
            records = run_step(self, cls, batch_of(inputs, trains), trains, rows, label.device)
            records.labelled = label.dim() == 1 and not label.is_floating_point()
            return pack(records, rows)

        forward = _step_or_forward

        @property
        def trainer(self) -> Any:
            return view

    Stepped.__name__, Stepped.__qualname__, Stepped.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    module.__class__ = Stepped


class _Here:
    """What a module asks of Lightning in a step, answered here or refused by name."""

    current_epoch = property(lambda self: withheld("self.current_epoch"))
    global_step = property(lambda self: withheld("self.global_step"))
    global_rank = property(lambda self: withheld("self.global_rank"))
    local_rank = property(lambda self: withheld("self.local_rank"))
    logger = property(lambda self: None)
    loggers = property(lambda self: [])
    device = property(lambda self: next(self.parameters()).device)
    dtype = property(lambda self: next(p.dtype for p in self.parameters() if p.dtype.is_floating_point))

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: Any = None,
        on_step: Any = None,
        on_epoch: Any = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: Any = None,
        metric_attribute: Any = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Lightning's, with its arguments. Where and how often a value is shown is dtf's affair."""
        if reduce_fx not in ("mean", torch.mean) and not is_metric(value):
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): only means over rows are added up over ranks; log a "
                "metric of torchmetrics, such as SumMetric"
            )
        records = _records.get()
        if records is None:
            raise ConfigError(
                f"self.log({name!r}) outside of a step has no rows to count; log in training_step or validation_step"
            )
        if batch_size is not None and records.rows and int(batch_size) != records.rows:
            raise ConfigError(
                f"self.log({name!r}, batch_size={batch_size}) in a batch of {records.rows} rows: means are weighted by "
                "rows here; leave batch_size out, or log a metric of torchmetrics, such as MeanMetric with weights"
            )
        records.log(name, value)

    def log_dict(
        self,
        dictionary: Any,
        prog_bar: bool = False,
        logger: Any = None,
        on_step: Any = None,
        on_epoch: Any = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: Any = None,
        rank_zero_only: bool = False,
    ) -> None:
        """As `log`, for each value."""
        for name, value in dictionary.items():
            self.log(name, value, reduce_fx=reduce_fx, batch_size=batch_size)

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
        print(*values, sep=sep, end=end, file=file, flush=flush)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return withheld("self.optimizers()")

    def lr_schedulers(self) -> Any:
        return withheld("self.lr_schedulers()")

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return withheld("self.all_gather()")


@contextmanager
def recording(records: Records) -> Iterator[Records]:
    """A context in which the module's calls of `self.log` go to `records`."""
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def run_step(
    module: nn.Module, cls: type, batch: Any, trains: bool, rows: int, device: Any = None, again: bool = False
) -> Records:
    """One step on a batch of `rows` rows on `device`. States of metrics are of this batch alone, but for `again`."""
    step: Any = getattr(cls, "training_step" if trains or not overrides(cls, "validation_step") else "validation_step")
    for metric in metrics_of(module).values():
        if metric._update_count and not again:
            metric.reset()
        if device is not None and metric._device != device:
            metric.to(device)
    with recording(Records(module, trains, rows)) as records:
        records.close(step(module, batch, **_more_arguments(step)))
    return records


def overrides(cls: type, name: str) -> bool:
    """Whether a class defines a method that Lightning names."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is not None and owner not in _bases(cls) and owner is not nn.Module


_metrics: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """The metrics of torchmetrics in a module, by name."""
    known = _metrics.get(module)
    if known is None:
        known = dict(_found_metrics(module))
        _metrics[module] = known
    return known


def _found_metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Metrics among the modules, and in those that `take_metrics_out` has made plain attributes."""
    for prefix, part in module.named_modules():
        if is_metric(part):
            yield prefix, part
        for key, value in list(vars(part).items()):
            if isinstance(value, nn.Module):
                inside = f"{prefix}.{key}" if prefix else key
                yield from ((name, each) for name, each in value.named_modules(prefix=inside) if is_metric(each))


def take_metrics_out(module: nn.Module) -> None:
    """Make metrics, and containers of nothing else, plain attributes: they hold no parameter, and compare in a way of
    their own, by which strategies would look them up. Each step moves them to its device.
    """
    for part in list(module.modules()):
        if isinstance(part, nn.ModuleDict | nn.ModuleList):
            continue  # their items are no attributes
        for key, child in list(part._modules.items()):
            leaves = [each for each in (child.modules() if child is not None else ()) if not list(each.children())]
            if leaves and all(is_metric(each) for each in leaves):
                del part._modules[key]
                vars(part)[key] = child


_arguments: dict[Any, dict[str, Any]] = {}


def _more_arguments(step: Any) -> dict[str, Any]:
    """What a step takes beside a batch."""
    if step not in _arguments:
        names = list(inspect.signature(step).parameters)[2:]
        given = {"batch_idx": _BatchNumber(), "dataloader_idx": 0}
        _arguments[step] = {name: given.get(name, given["batch_idx"]) for name in names[:1]} | {
            name: value for name, value in given.items() if name in names
        }
    return _arguments[step]


class _BatchNumber:
    """The number of a batch, which a step may pass on and not use."""


def _refuse_use(self: _BatchNumber, *others: Any) -> Any:
    return withheld("batch_idx")


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "float", "index", "format"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "floordiv", "truediv"),
):
    setattr(_BatchNumber, f"__{_name}__", _refuse_use)
