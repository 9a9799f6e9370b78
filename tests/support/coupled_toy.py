"""Toy recipes whose numbers depend on which rows are together in a micro-batch, and on when it is made ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums
from tests.support.sparse_toy import Tabled
from tests.support.toy import Rows, Toy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dtf.core.types import Batch

NOISE = 0.5


def contrast(outputs: Tensor) -> Tensor:
    """The loss of each row (B,): how well it is told from all other rows of the micro-batch."""
    import torch
    from torch.nn import functional

    scores = functional.normalize(outputs, dim=1) @ functional.normalize(outputs.roll(1, 1), dim=1).T
    return functional.cross_entropy(4 * scores, torch.arange(len(outputs), device=outputs.device), reduction="none")


def noisy(inputs: Tensor) -> Tensor:
    """Inputs with noise, less half their mean over the rows: without any, running means would be rounding."""
    import torch

    drawn = inputs + NOISE * torch.randn(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    return drawn - drawn.mean(0) / 2


@register("recipe", "coupled_toy")
class Coupled(Toy):
    """`received`: whether inputs are noisy, too."""

    received: bool = option(default=False, doc="whether inputs get noise and lose their mean")
    eval_rows: int = option(default=25, doc="evaluation rows", unit="rows")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss",)

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def open_data(self, split: str, seed: int) -> Dataset:
        return Rows(self.rows if split == "train" else self.eval_rows, split, -1)

    def layout(self, model: nn.Module) -> Layout:
        layout = super().layout(model)
        splits = {name: split for name, split in layout.splits.items() if split is not Split.classes}
        return Layout(layout.blocks, splits)

    def receive(self, inputs: torch.Tensor) -> torch.Tensor:
        return noisy(inputs) if self.received else inputs

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return contrast(outputs)

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss)


@register("recipe", "received_tables_toy")
class ReceivedTables(Tabled):
    """Ids that are moved on by a number that is drawn for the micro-batch."""

    def receive(self, inputs: Any) -> Any:
        import torch

        drawn = int(torch.randint(3, ()))
        return inputs | {name: (inputs[name] + drawn) % 7 for name in self.tables()}
