"""A recipe whose loss is a pair, or a scalar mean: token losses of which some are ignored. A plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums
from tests.support.toy import Toy

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

TOKENS, CLASSES = 5, 4


@register("recipe", "losses")
class LossForms(Toy):
    form: str = option(default="pair", doc="what loss() returns: pair, single, labels, masked, rows, sum, two")
    labelled: int = option(default=1, least=0, doc="every n-th row has labels; 0: none has")

    def build_model(self) -> nn.Module:
        from torch import nn

        last = nn.Linear(16, TOKENS * CLASSES), nn.Unflatten(1, (TOKENS, -1))
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), *last)

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0",), ("2",), ("4", "5")), {"0": Split.column, "2": Split.row})

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "tokens")

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def open_data(self, split: str, seed: int) -> Dataset:
        return Tokens(super().open_data(split, seed), self.labelled)

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        from torch.nn.functional import cross_entropy

        if self.form == "labels":
            return cross_entropy(outputs.flatten(0, 1), targets.flatten())
        if self.form == "sum":
            return cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
        losses = cross_entropy(outputs.mT, targets, reduction="none")
        if self.form == "masked":
            mask = (targets != -100).to(losses)
            return (losses * mask).sum() / mask.sum()
        if self.form == "constant":
            return losses.detach().mean(1)
        if self.form == "number":
            return losses.mean().item()
        counts = (targets != -100).sum(1)
        match self.form:
            case "pair":
                return losses.sum(1), counts
            case "single":
                return losses.sum(), counts.sum()
            case "two":
                return losses.mean(), losses.square().mean()
            case "named":
                return {"generator": losses.mean(), "critic": -losses.mean(), "penalty": losses.square().mean()}
        return losses.mean(1).mean()

    def measure(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, (batch.targets != -100).sum(1))

    def summarise(self, sums: list[float]) -> dict[str, float]:
        rows, loss, tokens = sums
        return {"loss": loss / (max(1.0, tokens) if self.form in ("pair", "single") else rows), "tokens": tokens / rows}


class Tokens(Dataset):
    """Labels of five tokens a row, of which a number that differs by row is ignored."""

    prefetch = 0

    def __init__(self, rows: Dataset, labelled: int) -> None:
        self._rows, self._labelled = rows, labelled

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        inputs, targets = self._rows.fetch(ids, epoch)
        labels = (targets[:, None] + torch.arange(TOKENS)) % CLASSES
        labels[torch.arange(TOKENS)[None] < torch.from_numpy(ids % TOKENS)[:, None]] = -100
        labels[torch.from_numpy(ids % self._labelled != 0) if self._labelled else slice(None)] = -100
        return inputs, labels
