"""What a model's outputs say of classes: what the recipe says, else a softmax where outputs are plainly scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.core.nest import count


def class_probabilities(recipe: Recipe, outputs: Any, targets: Any) -> Tensor | None:
    """The probability of each class (B, C), or of the one event (B,). None where the recipe's
    `probabilities` gives None, or where it does not define them and outputs are no scores (B, C) of C > 1 classes whose
    targets are labels (B,).

    ConfigError where `probabilities` returns something else.
    """
    if type(recipe).probabilities is Recipe.probabilities:
        scores = isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1
        labels = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.dtype.is_floating_point
        return recipe.probabilities(outputs) if scores and labels else None
    found = recipe.probabilities(outputs)
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.dim() not in (1, 2) or len(found) != count(targets):
        form = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"{type(recipe).__name__}.probabilities() returned {form} for {count(targets)} rows; it must return the "
            "probability of each class, (B, C), or of one event, (B,)"
        )
    return found
