"""What a LightningModule and its data see as their trainer: what is the same on every rank and in every step."""

from __future__ import annotations

from typing import Any

from dtf.core.errors import ConfigError


def withheld(what: str) -> Any:
    """Raise ConfigError for what depends on the step or the rank."""
    raise ConfigError(
        f"{what} is not known in a step here: rows are computed on any rank, in micro-batches, and again after a "
        "restart; leave it out, or let a scheduler of configure_optimizers depend on the step"
    )


class TrainerView:
    """Attributes of Lightning's Trainer that have one value for the whole run. Others are refused by name."""

    sanity_checking = testing = predicting = fast_dev_run = barebones = False
    accumulate_grad_batches = world_size = num_devices = num_nodes = 1
    is_global_zero = True
    logger = None

    def __init__(self, epochs: int, steps: int, steps_per_epoch: int) -> None:
        self.max_epochs, self.max_steps, self.estimated_stepping_batches = epochs, steps, steps
        self.num_training_batches = steps_per_epoch
        self.loggers: list[Any] = []
        self.datamodule: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return withheld(f"self.trainer.{name}")
