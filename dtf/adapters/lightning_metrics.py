"""What a LightningModule logs, as sums over rows: means of batches, weighted by their rows, and states of metrics.

A vector of sums means the same however rows were divided. It holds, after the sum of weights: the mean of each name
times its rows, the states of all metrics, the rows of each name, how often each metric was updated, and the rows of
evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtf.adapters.lightning_checks import HOOKS
from dtf.adapters.lightning_module import Records, metrics_of, overrides, recording, take_metrics_out
from dtf.core.errors import ConfigError
from dtf.core.text import suggest


class _State(NamedTuple):
    """A state of a metric."""

    metric: str
    name: str
    default: Tensor


class MetricSums:
    """The sums of a module. `names`: what it logs in training and in evaluations; `shown`: name under which a metric is
    logged -> the metric. `module`: a copy of the module, whose metrics compute values of sums.
    """

    def __init__(self, module: nn.Module, cls: type, names: Sequence[str], shown: Mapping[str, str]) -> None:
        self._module, self._cls, self._shown = module, cls, dict(shown)
        self._keys = ("loss", *(name for name in names if name != "loss"))
        self._metrics = list(metrics_of(module))
        self._states = [state for name in self._metrics for state in states_of(name, metrics_of(module)[name])]
        self._known = frozenset((*self._keys, *self._shown))
        self._defaults = torch.cat(
            [torch.zeros(0, dtype=torch.float64), *(s.default.reshape(-1) for s in self._states)]
        )
        self.names: tuple[str, ...] = (
            *self._keys,
            *(f"{s.metric}.{s.name}[{i}]" for s in self._states for i in range(s.default.numel())),
            *(f"{key} rows" for key in self._keys),
            *(f"{name} updates" for name in self._metrics),
            "evaluated rows",
        )

    def pack(self, records: Records, rows: int) -> dict[str, Tensor]:
        """The outputs of a step of `rows` rows. ConfigError for a name that the first rows did not have."""
        values, loss = records.values, records.loss
        new = [name for name in (*values, *records.metrics) if name not in self._known]
        if new:
            raise ConfigError(
                f"the module logs {new[0]!r}, which it did not log for the first rows; log the same names in every "
                f"step, whatever the rows are; {suggest(new[0], self._known)}"
            )
        device = loss.device if loss is not None else next(records.module.parameters()).device
        logged = [loss, *(values.get(key) for key in self._keys[1:])]
        metrics = metrics_of(records.module)
        counts = [0.0 if value is None else float(rows) for value in logged]
        counts += [float(metrics[name]._update_count) for name in self._metrics]
        counts.append(0.0 if records.trains else float(rows))
        parts = [torch.stack([_number(value, device) for value in logged]) * rows]
        if self._states:
            states = [getattr(metrics[s.metric], s.name).detach().reshape(-1).to(device) for s in self._states]
            parts.append(torch.cat([state.double() for state in states]) - self._defaults.to(device))
        sums = [*parts, torch.tensor(counts, dtype=torch.float64, device=device)]
        for metric in metrics.values():
            metric.reset()  # a pass leaves nothing behind
        outputs = {"loss": loss if loss is not None else torch.zeros((), device=device), "sums": torch.cat(sums)}
        scores = records.scores
        if isinstance(scores, Tensor) and scores.dim() == 2 and scores.shape[1] > 1 and records.labelled:
            outputs["scores"] = scores.detach()
        return outputs

    @staticmethod
    def of_batch(outputs: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        """Metric sums (M,) as of `Recipe.measure`; zeros for padding."""
        sums = outputs["sums"]
        return torch.cat([weight.sum(dtype=torch.float64)[None], torch.where(weight.amax() > 0, sums, 0.0)])

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics of summed sums (M,), by name."""
        keys, states = len(self._keys), self._defaults.numel()
        means, rest, counts = sums[1 : 1 + keys], sums[1 + keys : 1 + keys + states], sums[1 + keys + states :]
        found = {key: value / n for key, value, n in zip(self._keys, means, counts[:keys], strict=True) if n}
        evaluates = bool(counts[-1])
        updates = dict(zip(self._metrics, counts[keys:-1], strict=True))
        metrics, at = metrics_of(self._module), 0
        for state in self._states:
            part = torch.tensor(rest[at : at + state.default.numel()], dtype=torch.float64)
            at += state.default.numel()
            total = part.view(state.default.shape) + state.default
            setattr(metrics[state.metric], state.name, total.to(getattr(metrics[state.metric], state.name).dtype))
        for name, metric in metrics.items():
            metric._update_count, metric._computed = int(updates[name]), None
        for name, metric in self._shown.items():
            if updates[metric]:
                found[name] = _computed(name, metrics[metric])
        if sums[0]:
            found |= self._at_the_end(not evaluates)
        for metric in metrics.values():
            metric.reset()
        return found

    def _at_the_end(self, trains: bool) -> dict[str, float]:
        """What the hook at the end of an epoch logs."""
        name = HOOKS[trains]
        if not overrides(self._cls, name):
            return {}
        with recording(Records(self._module, trains)) as records:
            getattr(self._cls, name)(self._module)
        return {key: float(value) for key, value in records.values.items()} | {
            key: _computed(key, metric) for key, metric in records.metrics.items()
        }


def _number(value: Any, device: torch.device) -> Tensor:
    """() float64 on the device; 0 for None."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.tensor(0.0 if value is None else float(value), dtype=torch.float64, device=device)


def _computed(name: str, metric: Any) -> float:
    value = metric.compute()
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"the metric {name} ({type(metric).__name__}) has no single value; log its parts, or choose an average"
        )
    return float(value) if not math.isnan(float(value)) else math.nan


def states_of(name: str, metric: Any) -> list[_State]:
    """The states of a metric. ConfigError unless each is a tensor that is added up."""
    states = []
    if any(base.__name__ == "WrapperMetric" for base in type(metric).__mro__):
        raise ConfigError(
            f"the metric {name} ({type(metric).__name__}) is made of others, and has no sums of its own; log those "
            "that it is made of"
        )
    for key, default in metric._defaults.items():
        reduction = metric._reductions[key]
        if not isinstance(default, Tensor) or getattr(reduction, "__name__", "") != "dim_zero_sum":
            kept = "keeps all rows" if isinstance(default, list) else "has no sum"
            more = "; give it thresholds=100" if "thresholds" in vars(metric) else ""
            raise ConfigError(
                f"the metric {name} ({type(metric).__name__}) {kept} in its state {key}, and only sums are added up "
                f"over ranks and steps: choose a metric with sums{more}, or write a recipe with an evaluator "
                "(docs/own-recipe.md)"
            )
        states.append(_State(name, key, default.detach().cpu().double()))
    return states


def prepare_metrics(module: nn.Module) -> None:
    """Let each metric of a module count its own rows: none talks to other ranks, and none shares states with another.
    ConfigError for a metric that cannot be added up.
    """
    part: Any
    for part in module.modules():
        if type(part).__name__ == "MetricCollection" and hasattr(part, "_enable_compute_groups"):
            part._enable_compute_groups = False
    take_metrics_out(module)
    for name, metric in metrics_of(module).items():
        states_of(name, metric)
        metric.sync_on_compute = metric.dist_sync_on_step = metric._to_sync = False
        metric.distributed_available_fn = _alone


def _alone() -> bool:
    return False
