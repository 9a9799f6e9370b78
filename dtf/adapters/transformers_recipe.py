"""A model of Hugging Face's transformers with rows of text, as a recipe, by one line of a plugin. Imports neither torch
nor transformers: the command line reads the line.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.adapters.foreign_recipe import ForeignRecipe
from dtf.api.argument_keys import add_argument_keys, title_of
from dtf.api.options import FineTuning
from dtf.api.recipe import Split
from dtf.api.registry import register
from dtf.core.arguments import Target, module_of
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from dtf.adapters.transformers_run import TransformersRun

EXTRA = "pip install transformers"


def transformers_recipe(
    name: str,
    model: Target,
    data: Target,
    *,
    collator: Target | None = None,
    objective: tuple[str, str] = ("loss", "min"),
    shapes_vary: bool | None = None,
) -> None:
    """Register the recipe `name`: a model of transformers, trained on rows with labels.

    `model`: a function that returns a PreTrainedModel, made of a config or by `from_pretrained`: a classifier of rows
    or of tokens, a regression, a causal or masked language model. What it returns is what every strategy starts from.
    `data`: a function that returns the rows to train on and those to evaluate on, each a `datasets.Dataset`, a list of
    dicts or another map-style data set: as a pair, or as a dict of `train`, `validation` and perhaps `test`, such as a
    DatasetDict. `collator`: a function without arguments that returns what makes a batch of a list of rows, with the
    key `labels`, such as a DataCollatorWithPadding; None: `transformers.default_data_collator`.

    Each is given itself or as "module:name", which ranks import; then the command line stays without torch. The
    arguments of `model` and `data` become the keys `recipe.model.*` and `recipe.data.*`.

    `objective`: the metric by which evaluations are ranked, and `max` or `min`: `loss`; `top1` of classifiers;
    `perplexity` of language models. `shapes_vary`: of rows that are collated together, see `Dataset.shapes_vary`; by
    default True of a `collator`.

    ConfigError for a name that is taken, and where the module, the function or an argument's type cannot be found.
    """
    plugin = sys._getframe(1).f_globals["__name__"]
    title = title_of(model)
    body: dict[str, Any] = {
        "__module__": plugin,
        "__doc__": f"The model that {module_of(model)}:{title} makes, of Hugging Face's transformers.",
        "presets": {"optimizer": "adamw"},
        "recipe_name": name,
        "chosen_objective": objective,
        "shapes_vary": shapes_vary,
    }
    for key, target in (("model", model), ("data", data), ("collator", collator)):
        body[f"{key}_target"] = staticmethod(target) if callable(target) else target
    add_argument_keys(body, "model", model, (FineTuning,))
    add_argument_keys(body, "data", data)
    register("recipe", name)(type(title, (TransformersRecipe,), body))


class TransformersRecipe(ForeignRecipe):
    """A model of transformers, and its data. Made by `transformers_recipe`, which sets what follows."""

    model_target: ClassVar[Any]
    data_target: ClassVar[Any]
    collator_target: ClassVar[Any]

    splits = (Split.train, Split.eval, Split.test)

    def open_run(self) -> TransformersRun:
        from dtf.adapters.transformers_run import TransformersRun

        return TransformersRun(self, self._settings)

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return self.run.head.sums

    def direction(self, metric: str) -> str:
        return "min" if metric == "perplexity" else super().direction(metric)

    def check(self) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(f"recipe={self.recipe_name} is a model of transformers, which is not installed: {EXTRA}")

    def prepare(self) -> None:
        self.run.rows("train")  # may download them, or make them

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        return self.run.head.loss(outputs, targets)

    def measure(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        return self.run.head.measure(outputs, batch, loss)

    def summarise(self, sums: list[float]) -> dict[str, float]:
        return self.run.head.summarise(sums)

    def probabilities(self, outputs: Any) -> Tensor | None:
        return self.run.head.probabilities(outputs)

    def class_names(self) -> tuple[str, ...]:
        return self.run.head.class_names
