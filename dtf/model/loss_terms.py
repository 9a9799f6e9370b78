"""What a recipe's loss may return, as a sum and what the sum over the global batch is divided by.

A loss of each row, (B,). Sums and counts, with one denominator for the global batch. Or a scalar that is proved a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.distributed.sharding import is_dtensor, local
from dtf.host import devices
from dtf.model.communication import Communication
from dtf.model.mean_proof import Mean, labels, proved, tensors

_WATCHED = 3
"""The call of a loss in which it is seen to talk to other ranks. The memory of the passes before is measured, and
watching takes some.
"""


class LossTerms(NamedTuple):
    """The loss of one micro-batch."""

    value: Tensor
    """(B,), for `Recipe.measure`: the loss of each row, its sum where there are counts; a mean once for each row."""

    total: Tensor
    """(), to be summed over the global batch."""

    counts: Tensor | None
    """(), what the sum of totals is divided by, summed over the global batch. None: its rows."""


def per_count(rows: Tensor | float, counts: Tensor) -> Tensor:
    """By what gradients that are divided by the `rows` of a global batch are multiplied, so that they are divided by
    its counts, (). Both are sums over all of it. 0 where the counts are all 0: nothing is there to learn from.
    """
    return torch.where(counts == 0, 0.0, rows / counts)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], others: Iterable[Tensor], ratio: Tensor) -> None:
    """Multiply the gradients of `parameters`, and the gradients `others`, by `ratio` (), in place."""
    for gradient in (*(local(p.grad) for p in parameters if p.grad is not None), *others):
        gradient.mul_(ratio.to(gradient))


class Losses:
    """The loss of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.undivided = False
        """Whether each global batch is one micro-batch, so that any scalar will do."""
        self._who = f"{type(recipe).__name__}.loss"
        self._mean: Mean | None = None  # of a scalar loss, where that is proved
        self._tried, self._calls, self._form = False, 0, ""

    def __call__(self, outputs: Any, batch: Batch) -> LossTerms:
        """The loss of a micro-batch. Without host synchronisation, but for the first scalar.

        ConfigError for what is none of the forms, or has no gradient.
        """
        self._calls += 1
        if self._calls == _WATCHED:
            with Communication() as talks:
                loss = self._recipe.loss(outputs, batch.targets)
            if not any(map(is_dtensor, tensors(outputs))):  # else dtf's own
                talks.refuse(self._who)
        else:
            loss = self._recipe.loss(outputs, batch.targets)
        self._refuse_several(loss)
        terms = self._terms(loss, outputs, batch)
        if torch.is_grad_enabled() and not terms.total.requires_grad and any(t.requires_grad for t in tensors(outputs)):
            raise ConfigError(
                f"{self._who} returned a loss without a gradient, and the model's outputs have one; compute it from "
                "the outputs by functions that have a derivative: no detach(), item(), no_grad() or argmax(); rows "
                "that have nothing to learn from have zeros that depend on the outputs"
            )
        return terms

    def _terms(self, loss: Any, outputs: Any, batch: Batch) -> LossTerms:
        self._refuse_another_form(loss)
        if isinstance(loss, tuple | list) and len(loss) == 2:
            return self._counted(loss[0], loss[1], batch)
        if not isinstance(loss, Tensor):
            number = ": a plain number has no gradient" if isinstance(loss, int | float) else ""
            raise ConfigError(
                f"{self._who} returned {type(loss).__name__}{number}; return the loss of each row as a tensor (B,), "
                "or two tensors, sums and counts"
            )
        if loss.is_complex():
            raise ConfigError(f"{self._who} returned complex numbers; a loss is real, such as their abs() or real part")
        if loss.shape == batch.weight.shape:
            return LossTerms(loss, (loss * batch.weight).sum(), None)
        if not loss.shape:
            return self._scalar(loss, outputs, batch)
        raise ConfigError(
            f"{self._who} returned shape {tuple(loss.shape)}; it must return a loss per row, "
            f"{tuple(batch.weight.shape)}, or sums and counts"
        )

    def _refuse_another_form(self, loss: Any) -> None:
        """Raise ConfigError for a loss of another form than the first one."""
        form = f"a tensor of {loss.dim()} axes" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        if self._form not in ("", form):
            raise ConfigError(
                f"{self._who} returned {form}, and {self._form} before; return one form always, for rows that have "
                "nothing to learn from too: zeros that depend on the outputs, such as (outputs * 0).flatten(1).sum(1) "
                "for the loss of each row"
            )
        self._form = form

    def _refuse_several(self, loss: Any) -> None:
        """Raise ConfigError for several losses to differentiate."""
        values = loss.values() if isinstance(loss, Mapping) else loss if isinstance(loss, tuple | list) else ()
        learning = sum(isinstance(value, Tensor) and value.requires_grad for value in values)
        if learning > 1:
            count = "two" if learning == 2 else str(learning)
            raise ConfigError(
                f"{self._who} returned {count} losses that {'both' if learning == 2 else 'all'} need a gradient, as "
                f"for {count} optimizers. A recipe has one optimizer: return one loss, their sum, with a layer between "
                "the models that reverses the gradient (docs/own-recipe.md, 'Two losses'); or sums and counts, where "
                "counts need no gradient"
            )

    def _counted(self, sums: Any, counts: Any, batch: Batch) -> LossTerms:
        shapes = ((), tuple(batch.weight.shape))
        if not isinstance(sums, Tensor) or not isinstance(counts, Tensor):
            raise ConfigError(f"{self._who} returned two values that are not both tensors; sums and counts are tensors")
        if tuple(sums.shape) not in shapes or sums.shape != counts.shape:
            raise ConfigError(
                f"{self._who} returned sums of shape {tuple(sums.shape)} and counts of shape {tuple(counts.shape)}; "
                f"both are {shapes[1]}, one for each row, or both ()"
            )
        weight = batch.weight if sums.shape else self._of_all(batch.weight)
        value = sums if sums.shape else (sums / len(batch.weight)).expand(len(batch.weight))
        return LossTerms(value, (sums * weight).sum(), (counts.to(weight) * weight).sum())

    def _scalar(self, loss: Tensor, outputs: Any, batch: Batch) -> LossTerms:
        rows = len(batch.weight)
        if not self._tried and torch.is_grad_enabled():
            known = self._recipe.loss_mean(not self.undivided)
            if known is None and any(map(is_dtensor, tensors(outputs))):
                raise ConfigError(
                    f"{self._who} returned a scalar, of outputs that ranks divide, so that what it is the mean of "
                    "cannot be tried; return the loss of each row, (B,), or sums and counts"
                )
            found = (
                proved(self._recipe.loss, outputs, batch.targets) if known is None else Mean(known) if known else None
            )
            self._mean, self._tried = found, True
        mean = self._mean
        if mean is None and (self.undivided or not torch.is_grad_enabled()):  # an evaluation divides nothing
            mean = Mean.rows
        if mean is None:
            raise self._refused()
        if mean is Mean.rows:
            return LossTerms(loss.expand(rows), loss * rows * self._of_all(batch.weight), None)
        counts = labels(batch.targets).to(batch.weight)
        mean = torch.where(counts > 0, loss, torch.zeros_like(loss))  # that over no label is NaN
        if loss.requires_grad and (not devices.host_reads(counts.device.type) or not counts):  # and so is its gradient
            for tensor in tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: torch.where(counts > 0, gradient, 0.0))
        total = counts * self._of_all(batch.weight)
        return LossTerms(mean.expand(rows), mean * total, total)

    def _of_all(self, weight: Tensor) -> Tensor:
        """The weight that all rows have, (). NaN where they differ, because some cannot be read: one number for all
        rows cannot leave out some. On a CPU that is a ConfigError.
        """
        least, most = weight.amin(), weight.amax()
        if devices.host_reads(weight.device.type) and bool(least != most):
            raise ConfigError(
                f"{self._who} returns one number for all rows of a micro-batch, and some of its rows cannot be read; "
                "return the loss of each row, or repair the data"
            )
        return torch.where(least == most, most, torch.full_like(most, torch.nan))

    def _refused(self) -> ConfigError:
        return ConfigError(
            f"{self._who} returned a scalar that is no mean over rows: the losses of two parts of a micro-batch do not "
            "make that of the whole, so that gradients cannot be added up over ranks. Return the loss of each row, of "
            "shape (B,): `return F.cross_entropy(outputs, targets, reduction='none')`. Or return two values of shape "
            "(B,), the sum of a row's losses and its count, which are added up over the global batch: `return "
            "losses.sum(1), (targets != -100).sum(1)` for labels that are not ignored, `return "
            "F.cross_entropy(outputs, targets, weight=w, reduction='none'), w[targets]` for weighted classes"
        )

    def follow(self, other: Losses) -> None:
        """Take over what another one has found."""
        self.undivided, self._mean, self._tried = other.undivided, other._mean, other._tried
