"""What a model of transformers is trained for, told by its class and config: loss and metrics of each kind.

B: rows; T: tokens of a row; C: classes, or words of the vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.model.losses import IGNORED, cross_entropy, target_rank
from dtf.model.metrics import weighted_sums

_TRIED_CLASSES = 8
"""More would take long in a large model."""


class Head(ABC):
    """A kind of model. `config`: the model's own."""

    sums: tuple[str, ...] = ("loss",)
    """Names of the sums of `measure`, see `Recipe.train_metrics`."""

    class_names: tuple[str, ...] = ()

    gives_classes = False
    """Whether a row gets one class of several."""

    tried_rows = 2
    """How many rows tell whether a model computes this loss."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        """As `Recipe.loss`: the loss of each row, or sums and counts."""

    def labels_to_try(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Labels that tell whether a model computes this loss: classes have different ones, rows different counts."""
        return targets

    def measure(self, logits: Tensor, batch: Batch, loss: Tensor) -> Tensor:
        """As `Recipe.measure`."""
        return weighted_sums(batch.weight, loss)

    def summarise(self, sums: list[float]) -> dict[str, float]:
        """As `Recipe.summarise`."""
        return {"loss": sums[1] / sums[0] if sums[0] else math.nan}

    def probabilities(self, logits: Tensor) -> Tensor | None:
        """As `Recipe.probabilities`."""
        return logits.softmax(-1) if self.gives_classes else None


class _Labelled(Head):
    """One whose loss is a mean over labels other than -100."""

    sums = ("loss", "labels", "top1")

    def labels_to_try(self, targets: Tensor, logits: Tensor) -> Tensor:
        classes, known = torch.arange(targets.numel()).view(targets.shape) % logits.shape[-1], targets != IGNORED
        return classes.masked_fill(~known & known.any(), IGNORED)  # without one there would be no loss

    def summarise(self, sums: list[float]) -> dict[str, float]:
        labels = sums[2]
        return {name: sums[place] / labels if labels else math.nan for name, place in (("loss", 1), ("top1", 3))}


def _shaped(labels: Tensor, shape: torch.Size) -> Tensor:
    """ConfigError where there are more or fewer."""
    if labels.numel() != shape.numel():
        raise ConfigError(
            f"labels of {shape[0]} rows are {tuple(labels.shape)}, and the model's outputs need {tuple(shape)}; give "
            "rows such labels, or its config other num_labels or problem_type"
        )
    return labels.reshape(shape)


class Numbers(Head):
    """One or several numbers for each row, or a set of classes: logits and labels (B, C). The loss of a row is the mean
    over its numbers.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.are_classes = getattr(config, "problem_type", None) == "multi_label_classification"

    def labels_to_try(self, targets: Tensor, logits: Tensor) -> Tensor:
        return (torch.arange(targets.numel()) % 2).view(targets.shape).to(targets) if self.are_classes else targets

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        wanted = _shaped(targets, logits.shape).to(logits.dtype)
        if self.are_classes:
            return functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").flatten(1).mean(1)
        return (logits - wanted).square().flatten(1).mean(1)


class Classes(_Labelled):
    """A class for each row: logits (B, C), labels (B,)."""

    gives_classes = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tried_rows = max(2, min(config.num_labels, _TRIED_CLASSES))
        names = tuple((getattr(config, "id2label", None) or {}).values())
        if names != tuple(f"LABEL_{number}" for number in range(len(names))):
            self.class_names = tuple(map(str, names))

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        if targets.is_floating_point():
            raise ConfigError(
                "labels are numbers with a fraction, and the model has several outputs: is each label a set of "
                'classes? Make its config with problem_type="multi_label_classification", or "regression"'
            )
        labels = _shaped(targets, logits.shape[:1])
        return cross_entropy(logits, labels), labels != IGNORED

    def measure(self, logits: Tensor, batch: Batch, loss: Tensor) -> Tensor:
        labels = batch.targets.reshape(len(loss))
        right = (target_rank(logits, labels) == 1) & (labels != IGNORED)
        return weighted_sums(batch.weight, loss, labels != IGNORED, right)


def _of_rows(config: Any) -> Head:
    """What transformers takes for the problem of a model with outputs for each row."""
    plain = getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else "")
    return Numbers(config) if plain in ("regression", "multi_label_classification") else Classes(config)


class Tokens(_Labelled):
    """A class for each token: logits (B, T, C), labels (B, T), -100 for a token without one."""

    def labels(self, targets: Tensor) -> Tensor:
        """The label of each place of the logits."""
        return targets

    def labels_to_try(self, targets: Tensor, logits: Tensor) -> Tensor:
        labels = super().labels_to_try(targets, logits)
        labels[:1, 1::2] = IGNORED
        return labels

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        labels = self.labels(targets)
        if labels.shape != logits.shape[:2]:
            raise ConfigError(
                f"the model gives scores for {tuple(logits.shape[:2])} tokens, and labels are {tuple(labels.shape)}; "
                "give each token a label, -100 where it has none"
            )
        return cross_entropy(logits, labels).sum(1), (labels != IGNORED).sum(1)

    def measure(self, logits: Tensor, batch: Batch, loss: Tensor) -> Tensor:
        labels = self.labels(batch.targets)
        right = (target_rank(logits, labels) == 1) & (labels != IGNORED)
        counts = (labels != IGNORED).sum(1)
        return weighted_sums(batch.weight, loss, counts, right.sum(1))


class Words(Tokens):
    """The word at each place, as of a masked language model: logits (B, T, C), labels (B, T)."""

    sums = ("loss", "labels")

    def measure(self, logits: Tensor, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, (self.labels(batch.targets) != IGNORED).sum(1))

    def summarise(self, sums: list[float]) -> dict[str, float]:
        loss = sums[1] / sums[2] if sums[2] else math.nan
        return {"loss": loss, "perplexity": math.exp(loss) if loss < math.log(1e300) else math.inf}


class NextWords(Words):
    """The word after each place: labels are the row's own words, and are moved by one, as transformers does."""

    def labels(self, targets: Tensor) -> Tensor:
        return functional.pad(targets, (0, 1), value=IGNORED)[:, 1:]


_KINDS: tuple[tuple[str, Callable[[Any], Head]], ...] = (
    ("ForSequenceClassification", _of_rows),
    ("ForImageClassification", _of_rows),
    ("ForAudioClassification", _of_rows),
    ("ForVideoClassification", _of_rows),
    ("ForMultipleChoice", Classes),
    ("ForTokenClassification", Tokens),
    ("ForMaskedLM", Words),
    ("ForCausalLM", NextWords),
    ("LMHeadModel", NextWords),
)


def head_of(model: Any) -> Head:
    """What a model is trained for. ConfigError for a kind that is not known."""
    kind = type(model)
    names = [base.__name__ for base in kind.__mro__]
    found = next((head for name in names for ending, head in _KINDS if name.endswith(ending)), None)
    if found is None or getattr(model.config, "is_encoder_decoder", False):
        known = ", ".join(f"*{ending}" for ending, _ in _KINDS)
        why = "is an encoder with a decoder" if found is not None else "is none of them"
        raise ConfigError(
            f"a recipe of transformers has the losses of {known}, and {kind.__name__} {why}; for others write a recipe "
            "(docs/own-recipe.md)"
        )
    return found(model.config)
