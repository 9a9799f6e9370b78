"""The optimizer, the schedule and the sampler of a LightningModule as parts of a run: each knows its numbers once the
module is built. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dtf.api.lr import Schedule
from dtf.api.optimizer import Group, Optimizer
from dtf.api.options import FineTuning
from dtf.api.sampler import Sampler, Tail
from dtf.core.errors import ConfigError
from dtf.data.samplers import Sequential, Shuffle

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

BATCH_SIZE = "batch_size"
"""The argument that gets `step.batch_size`: one key says how many rows a batch has."""


class Described(Protocol):
    """What a plugin's line says of a module and its data."""

    module_target: ClassVar[Any]
    data_target: ClassVar[Any]
    takes_batch_size: ClassVar[tuple[bool, bool]]
    """Whether the module, and the data, have an argument BATCH_SIZE."""
    shapes_vary: ClassVar[bool | None]
    """Of the rows that its loaders collate, see `LoaderRows`."""

    @property
    def fine_tuning(self) -> FineTuning: ...


class ModuleOptimizer(Optimizer):
    """The optimizer that `configure_optimizers` makes, with its parameter groups."""

    recipe_name: ClassVar[str]
    inner: Optimizer | None = None
    """Of dtf, with the same numbers; known once the model is built."""

    momenta: Callable[[int], Mapping[str, float]] | None = None
    """Options of `inner` that the scheduler changes from step to step."""

    recipe: Any = None

    def check(self) -> None:
        for key in ("lr_factors", "weight_decays"):
            if getattr(self, key):
                raise ConfigError(
                    f"optimizer.{key} and the parameter groups of configure_optimizers would both decide; choose an "
                    "optimizer of dtf: optimizer=adamw lr=cosine lr.peak=NUMBER"
                )

    def _known(self) -> Optimizer:
        if self.inner is None:
            self.recipe.run.build(configure=True)  # in a process that had no use for the model so far
        assert self.inner is not None
        return self.inner

    def begin(self, step: int) -> None:
        if self.momenta is not None:
            for key, value in self.momenta(step).items():
                setattr(self.inner, key, value)

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        return self._known().init(parameter)

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        self._known().step(group, gradients, lr, skip)

    def decay_of(self, name: str, shape: Sequence[int]) -> float | None:
        return self._known().decay_of(name, shape)


class ModuleSchedule(Schedule):
    """The learning rate that the scheduler of `configure_optimizers` gives, step by step."""

    recipe_name: ClassVar[str]
    recipe: Any = None

    def __call__(self, step: int, total: int) -> float:
        return self.recipe.run.rate(step, total)


class LoaderOrder(Sampler):
    """The order of the train dataloader: as its data set has them, or shuffled, by dtf's own permutation."""

    recipe_name: ClassVar[str]
    recipe: Any = None

    @property
    def tail(self) -> Tail:  # type: ignore[override]
        return Tail.drop if self.recipe.run.train.drop_last else Tail.partial

    def fingerprint(self) -> str:
        return f", {'shuffled' if self.recipe.run.train.shuffles else 'in order'}, tail={self.tail.name}"

    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        chosen = Shuffle() if self.recipe.run.train.shuffles else Sequential()
        return chosen.order(rows, seed, epoch, groups)
