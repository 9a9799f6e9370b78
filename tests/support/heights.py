"""A recipe that predicts a number and no class. A plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums
from tests.support.toy import Rows, Toy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtf.core.types import Batch


@register("recipe", "heights")
class Heights(Toy):
    form: str = option(default="flat", doc="what the model gives: `flat` (B,), `column` (B, 1), or a `dict`")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss",)

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def build_model(self) -> nn.Module:
        from tests.support.heights_model import Heights as Model

        return Model(self.form)

    def layout(self, model: nn.Module) -> Layout:
        return Layout()

    def open_data(self, split: str, seed: int) -> Dataset:
        return Numbers(self.rows if split == "train" else 20, split, -1)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        found = outputs["height"] if isinstance(outputs, dict) else outputs
        return (found.reshape(len(targets)) - targets) ** 2

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss)


class Numbers(Rows):
    def fetch(self, ids: Any, epoch: int) -> Any:
        inputs, _ = super().fetch(ids, epoch)
        return inputs, inputs.sum(1)
