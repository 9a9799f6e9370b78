"""What `configure_optimizers` returns, as an optimizer of dtf and a learning rate for each step.

Nothing of it steps the model: the optimizer is read, and its scheduler is asked how it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dtf.api.optimizer import Optimizer
from dtf.api.registry import lookup, registered
from dtf.core.errors import ConfigError

_PER_GROUP = (
    *("params", "param_names", "lr", "initial_lr", "weight_decay", "max_lr", "min_lr", "max_momentum", "base_momentum"),
    *("foreach", "fused", "capturable"),
)
"""What may differ between groups: it changes no number, or becomes a factor of the learning rate or a weight decay."""
_CLOSE = 1e-9
_OTHER_OPTIMIZER = "or choose one of dtf: optimizer=adamw lr=cosine lr.peak=NUMBER"


class Configured:
    """An optimizer with its scheduler, read. `names`: of the parameters that learn, by id."""

    def __init__(self, returned: Any, module: nn.Module, steps_per_epoch: int) -> None:
        self._who = f"{type(module).__name__}.configure_optimizers"
        optimizer, scheduler = self._parts(returned)
        names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self.groups = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
        self.inner = self._inner(optimizer)
        rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._base = max(range(len(rates)), key=lambda index: rates[index])
        if not rates[self._base]:
            raise ConfigError(f"{self._who}: all learning rates are 0")
        self._ratios = [float(rate) / float(rates[self._base]) for rate in rates]
        self.lr_factors = {
            name: ratio for ratio, group in zip(self._ratios, self.groups, strict=True) if ratio != 1 for name in group
        }
        for group in optimizer.param_groups:  # the model's own are not to be kept here
            group["params"] = [nn.Parameter(torch.zeros(()))]
        optimizer.state.clear()
        self._optimizer, self._scheduler, self._steps_per_epoch = optimizer, scheduler, steps_per_epoch
        self._rates: list[float] = []
        self._options: list[dict[str, float]] = []
        self.cycles = _cycles(scheduler.get("scheduler"))

    def rate(self, step: int) -> float:
        """The learning rate of a step; those of other groups are multiples of it, see `lr_factors`."""
        self._go_to(step)
        return self._rates[step]

    def momenta(self, step: int) -> Mapping[str, float]:
        """The options of the optimizer that the scheduler changes too, at a step."""
        self._go_to(step)
        return self._options[step]

    def _go_to(self, step: int) -> None:
        while len(self._rates) <= step:
            if self._rates:
                self._advance(len(self._rates) - 1)
            groups = self._optimizer.param_groups
            rates = [float(group["lr"]) for group in groups]
            base = rates[self._base]
            if any(
                abs(rate - ratio * base) > _CLOSE * max(rates) for rate, ratio in zip(rates, self._ratios, strict=True)
            ):
                raise ConfigError(
                    f"{self._who}: from step {len(self._rates)} on the learning rates of parameter groups are no "
                    f"longer multiples of each other ({', '.join(f'{rate:g}' for rate in rates)}); use one "
                    "scheduler for all groups"
                )
            self._rates.append(base)
            self._options.append(self._momentum(groups) if self.cycles else {})

    def _advance(self, step: int) -> None:
        """What Lightning does after a step: the scheduler steps each `frequency` steps of an epoch, or epochs."""
        scheduler = self._scheduler.get("scheduler")
        if scheduler is None:
            return
        self._optimizer.step()
        in_epoch, frequency = step % self._steps_per_epoch + 1, int(self._scheduler.get("frequency") or 1)
        if self._scheduler["interval"] == "step":
            due = in_epoch % frequency == 0
        else:
            due = in_epoch == self._steps_per_epoch and (step // self._steps_per_epoch + 1) % frequency == 0
        if due:
            scheduler.step()

    def _momentum(self, groups: list[dict[str, Any]]) -> dict[str, float]:
        values = [group["betas"][0] if "betas" in group else group["momentum"] for group in groups]
        if any(value != values[0] for value in values):
            raise ConfigError(f"{self._who}: the scheduler gives parameter groups different momenta; use one for all")
        return {"beta1" if "betas" in groups[0] else "momentum": float(values[0])}

    # -------------------------------------------------------- what it returned

    def _parts(self, returned: Any) -> tuple[Any, dict[str, Any]]:
        """The one optimizer, and its scheduler as Lightning describes it."""
        optimizers, schedulers = returned, []
        if isinstance(returned, Mapping):
            optimizers = returned["optimizer"]
            schedulers = [returned["lr_scheduler"]] if returned.get("lr_scheduler") is not None else []
        elif isinstance(returned, list | tuple) and len(returned) == 2 and isinstance(returned[0], list | tuple):
            optimizers, schedulers = returned
            schedulers = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
        elif isinstance(returned, list | tuple) and len(returned) == 1:
            return self._parts(returned[0])
        optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
            return self._parts(optimizers[0])
        if len(optimizers) != 1 or len(schedulers) > 1:
            parts = f"{len(optimizers)} optimizers" if len(optimizers) != 1 else f"{len(schedulers)} schedulers"
            raise ConfigError(
                f"{self._who} returned {parts}, as a GAN has, and a run has one; train it with one loss "
                "(docs/own-recipe.md, 'Two losses')"
            )
        if not isinstance(optimizers[0], torch.optim.Optimizer):
            raise ConfigError(
                f"{self._who} returned {type(optimizers[0]).__name__}; return an optimizer of torch.optim"
            )
        if optimizers[0]._optimizer_step_pre_hooks or optimizers[0]._optimizer_step_post_hooks:
            raise ConfigError(
                f"{self._who} returned an optimizer with step hooks, which are not called here; leave them out"
            )
        return optimizers[0], self._scheduler_of(schedulers[0] if schedulers else None)

    def _scheduler_of(self, given: Any) -> dict[str, Any]:
        if given is None:
            return {}
        found = {"interval": "epoch", "frequency": 1, **(given if isinstance(given, Mapping) else {"scheduler": given})}
        scheduler = found["scheduler"]
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or found.get("reduce_on_plateau"):
            raise ConfigError(
                f"{self._who} returned ReduceLROnPlateau, whose rates follow evaluations; use a scheduler that follows "
                "steps, or optimizer=adamw lr=plateau lr.peak=NUMBER"
            )
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigError(
                f"{self._who} returned the scheduler {type(scheduler).__name__}; return one of torch.optim.lr_scheduler"
            )
        if found["interval"] not in ("step", "epoch"):
            raise ConfigError(f"{self._who}: interval={found['interval']!r} must be 'step' or 'epoch'")
        return found

    def _inner(self, optimizer: torch.optim.Optimizer) -> Optimizer:
        """The optimizer of dtf with the same numbers. ConfigError where there is none."""
        first, *others = optimizer.param_groups
        for key in first:
            if key not in _PER_GROUP and any(group.get(key) != first[key] for group in others):
                raise ConfigError(
                    f"{self._who}: parameter groups have different {key}; they may differ in lr and weight_decay, "
                    f"{_OTHER_OPTIMIZER}"
                )
        inner = _same(optimizer, first, self._who)
        inner.weight_decay = float(first.get("weight_decay", 0.0))
        for group, listed in zip(others, self.groups[1:], strict=True):
            if group.get("weight_decay", 0.0) != first.get("weight_decay", 0.0):
                inner.weight_decays |= {name: float(group["weight_decay"]) for name in listed}
        return inner


def _cycles(scheduler: Any) -> bool:
    """Whether a scheduler changes momenta too, as OneCycleLR does."""
    inside: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(map(_cycles, inside))


def _same(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], who: str) -> Optimizer:
    kind, given = type(optimizer), {}
    off: tuple[str, ...] = ("maximize", "differentiable")
    if kind is torch.optim.SGD:
        name, off = "sgd", (*off, "dampening")
        given = {"momentum": float(options["momentum"]), "nesterov": bool(options["nesterov"])}
    elif kind in (torch.optim.Adam, torch.optim.AdamW):
        name, off = (
            "adamw" if options.get("decoupled_weight_decay", kind is torch.optim.AdamW) else "adam",
            (*off, "amsgrad"),
        )
        given = {"beta1": float(options["betas"][0]), "beta2": float(options["betas"][1]), "eps": float(options["eps"])}
    elif kind is torch.optim.Adagrad:
        name = "adagrad"
        given = {
            "initial_accumulator": float(options["initial_accumulator_value"]),
            "eps": float(options["eps"]),
            "lr_decay": float(options["lr_decay"]),
        }
    else:
        known = kind.__name__.lower() in registered("optimizer") and kind.__module__.startswith("torch.optim")
        other = f"optimizer={kind.__name__.lower()}" if known else "one that dtf.torch_optimizer registers"
        raise ConfigError(
            f"{who} returned {kind.__module__}.{kind.__name__}; those that are taken from there are SGD, Adam, AdamW "
            f"and Adagrad of torch.optim: use one of them, or choose {other} in its place, and lr=cosine lr.peak=NUMBER"
        )
    for key in off:
        if options.get(key):
            raise ConfigError(
                f"{who} returned {kind.__name__}({key}={options[key]}), which dtf's {name} does not have; leave it "
                f"out, {_OTHER_OPTIMIZER}"
            )
    made: Optimizer = lookup("optimizer", name)(**given)
    return made
