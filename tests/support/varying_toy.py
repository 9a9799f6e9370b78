"""A recipe whose rows are of many lengths and in a nest of every kind, through a collate function that pads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dtf.api.layout import Layout, Split
from dtf.api.options import FineTuning
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtf.core.types import Batch

EVAL_ROWS = 20


@register("recipe", "varying")
class Varying(Recipe):
    """A class for each word. Padding counts in the mean that the model takes: who is padded with whom shows."""

    model: FineTuning = option(factory=FineTuning, doc="what is learned")
    rows: int = option(default=42, doc="training rows", unit="rows")
    train_metrics = ("loss", "tokens")  # type: ignore[assignment]
    objective = ("loss", "min")  # type: ignore[assignment]

    def check(self) -> None:
        pass

    def build_model(self) -> nn.Module:
        from tests.support.varying_model import Tagger

        return Tagger()

    def layout(self, model: nn.Module) -> Layout:
        units = (("words", "marks"), ("up", "drop"), ("down",), ("head",))
        splits = {"up": Split.column, "drop": Split.local, "down": Split.row}
        return Layout(units, splits)

    def open_data(self, split: str, seed: int) -> Dataset:
        from dtf import map_style

        return map_style(Sentences(self.rows if split == "train" else EVAL_ROWS), collate_fn=padded)

    def loss(self, outputs: Any, targets: Any) -> Any:
        from torch.nn.functional import cross_entropy

        losses = cross_entropy(outputs.mT, targets["classes"], reduction="none")
        return (losses * targets["weights"][:, None]).sum(1), (targets["classes"] != -100).sum(1)

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, (batch.targets["classes"] != -100).sum(1))


class Row(NamedTuple):
    """What is known of a sentence."""

    words: Any
    lists: Any


class Sentences:
    """Row i has between 2 and 9 words."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[Any, Any, Any]:
        import torch

        drawn = torch.Generator().manual_seed(row)
        words = torch.randint(1, 11, (2 + row * 5 % 8,), generator=drawn)
        return words, torch.randn(3, generator=drawn), words % 4


def padded(items: list[Any]) -> tuple[Any, Any]:
    """Inputs: a named tuple with a list with a dict and a tuple. Targets: a dict, of which one part is padded."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    words, marks, classes = zip(*items, strict=True)
    marked = torch.stack(marks)
    inputs = Row(pad_sequence(list(words), batch_first=True), [{"marks": marked}, (marked[:, 0],)])
    tags = pad_sequence(list(classes), batch_first=True, padding_value=-100)
    return inputs, {"classes": tags, "weights": marked[:, 1].abs()}
