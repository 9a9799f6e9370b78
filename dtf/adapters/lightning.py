"""An unmodified LightningModule with its data as a recipe, by one line of a plugin. Imports neither torch nor
Lightning: the command line reads the line.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.adapters.foreign_recipe import ForeignRecipe
from dtf.adapters.lightning_parts import BATCH_SIZE, LoaderOrder, ModuleOptimizer, ModuleSchedule
from dtf.api.argument_keys import add_argument_keys, title_of
from dtf.api.options import FineTuning
from dtf.api.registry import register
from dtf.core.arguments import Target, arguments_of, module_of, named
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from dtf.adapters.lightning_run import LightningRun

_NAMES = ("lightning", "pytorch_lightning")
_EXTRA = "pip install lightning torchmetrics"


def lightning_recipe(
    name: str,
    module: Target,
    data: Target | None = None,
    *,
    objective: tuple[str, str] = ("loss", "min"),
    shapes_vary: bool | None = None,
) -> None:
    """Register the recipe `name`: a LightningModule, and an optimizer, a schedule and a sampler of the same name, which
    are those that `configure_optimizers` and the train dataloader make.

    `module`: a LightningModule class, or a function that makes one. `data`: a LightningDataModule class, or a function
    that returns a train and a validation DataLoader; None: the module has `train_dataloader()`. Each is given itself or
    as "module:name", which ranks import; then the command line stays without torch. Their arguments become the keys
    `recipe.model.*` and `recipe.data.*`; an argument `batch_size` gets `step.batch_size`.

    `objective`: the metric by which evaluations are ranked, and `max` or `min`. Its name is one that the module logs in
    an evaluation, or `loss`: what `validation_step` logs as `loss`, `val_loss` or the like, or returns. `shapes_vary`:
    of rows that are collated together, see `Dataset.shapes_vary`; by default True of a loader with a `collate_fn`.

    ConfigError for a name that is taken, and where the module, the class or an argument's type cannot be found.
    """
    plugin = sys._getframe(1).f_globals["__name__"]
    if hasattr(module, "training_step") and not isinstance(module, type):
        raise ConfigError(
            f"module is an object, of {type(module).__name__}; give its class, or a function that makes one: each rank "
            "makes its own, and again after a restart"
        )
    arguments = [named(arguments_of(part)) if part is not None else {} for part in (module, data)]
    batch_sizes = [own[BATCH_SIZE].default for own in reversed(arguments) if BATCH_SIZE in own]
    presets: dict[str, Any] = dict.fromkeys(("optimizer", "lr", "sampler"), name)
    if batch_sizes and type(batch_sizes[0]) is int:
        presets["step"] = {BATCH_SIZE: batch_sizes[0]}
    title = title_of(module)
    body: dict[str, Any] = {
        "__module__": plugin,
        "__doc__": f"The LightningModule {module_of(module)}:{title}, as it is.",
        "presets": presets,
        "module_target": staticmethod(module) if callable(module) else module,
        "data_target": staticmethod(data) if callable(data) else data,
        "takes_batch_size": tuple(BATCH_SIZE in own for own in arguments),
        "shapes_vary": shapes_vary,
        "chosen_objective": objective,
        "recipe_name": name,
    }
    add_argument_keys(body, "model", module, (FineTuning,), without=[BATCH_SIZE])
    if data is not None:
        add_argument_keys(body, "data", data, without=[BATCH_SIZE])
    register("recipe", name)(type(title, (LightningRecipe,), body))
    for group, part in (("optimizer", ModuleOptimizer), ("lr", ModuleSchedule), ("sampler", LoaderOrder)):
        own = {"__module__": plugin, "__doc__": part.__doc__, "recipe_name": name}
        register(group, name)(type(f"{title}{part.__name__}", (part,), own))


class LightningRecipe(ForeignRecipe):
    """A LightningModule, and its data. Made by `lightning_recipe`, which sets what follows."""

    module_target: ClassVar[Any]
    data_target: ClassVar[Any]
    takes_batch_size: ClassVar[tuple[bool, bool]]
    without_probabilities = "it predicts where validation_step calls self(x) for such scores"

    def join(self, settings: Any) -> None:
        """Bring the parts of a run together that need each other. Torch-free."""
        super().join(settings)
        for part in (settings.optimizer, settings.lr, settings.sampler):
            if isinstance(part, ModuleOptimizer | ModuleSchedule | LoaderOrder):
                if part.recipe_name != self.recipe_name:
                    raise ConfigError(
                        f"{part.recipe_name} is the optimizer, schedule or sampler of recipe={part.recipe_name}; "
                        f"recipe={self.recipe_name} has its own, and takes those of dtf: optimizer=adamw lr=cosine "
                        "sampler=shuffle"
                    )
                part.recipe = self

    def open_run(self) -> LightningRun:
        from dtf.adapters.lightning_run import LightningRun

        return LightningRun(self, self._settings)

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return self.run.sums.names

    def check(self) -> None:
        if not any(importlib.util.find_spec(name) for name in _NAMES):
            raise ConfigError(f"recipe={self.recipe_name} is a LightningModule, which needs Lightning: {_EXTRA}")
        parts = self._settings.optimizer, self._settings.lr
        own = [isinstance(part, ModuleOptimizer | ModuleSchedule) for part in parts]
        if own[1] and not own[0]:
            raise ConfigError(
                f"lr={self.recipe_name} is the learning rate of the optimizer that configure_optimizers makes, and "
                "another one is chosen; choose a schedule too: lr=constant lr.peak=NUMBER"
            )

    def prepare(self) -> None:
        self.run.prepare_data()

    def loss_mean(self, divided: bool) -> str | None:
        return self.run.loss_mean(divided)

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        return outputs["loss"]

    def measure(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        return self.run.sums.of_batch(outputs, batch.weight)

    def summarise(self, sums: list[float]) -> dict[str, float]:
        return self.run.sums.values(sums)

    def probabilities(self, outputs: Any) -> Tensor | None:
        return outputs["scores"].softmax(-1) if "scores" in outputs else None
