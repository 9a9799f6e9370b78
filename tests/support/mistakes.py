"""Recipes with one mistake of their author each. A plugin: `recipe=mistake recipe.mistake=NAME`."""

from __future__ import annotations

import bdb
from typing import TYPE_CHECKING, Any

from dtf.api.evaluator import Evaluator
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums
from tests.support.toy import Rows, Toy

if TYPE_CHECKING:
    from torch import Tensor, nn


@register("recipe", "mistake")
class Mistaken(Toy):
    mistake: str = option(default="", doc="which mistake")

    @property
    def train_metrics(self) -> Any:
        return "loss" if self.mistake == "train_metrics_text" else super().train_metrics

    @property
    def objective(self) -> Any:
        wrong = {"objective_text": "top1", "objective_unknown": ("top2", "max"), "objective_best": ("top1", "most")}
        return wrong.get(self.mistake, super().objective)

    def build_model(self) -> nn.Module:
        from tests.support.mistaken_model import Mistaken as Model

        if self.mistake == "build_model_raises":
            raise KeyError("width")
        if self.mistake == "build_model_exits":
            raise SystemExit(3)
        model = Model(self.mistake, super().build_model())
        if self.mistake == "build_model_on_meta":
            model.tail.to("meta")
        if self.mistake == "build_model_without_parameters":
            return model.tail[0]
        return model.requires_grad_(False) if self.mistake == "build_model_frozen" else model

    def layout(self, model: nn.Module) -> Any:
        from dtf.api.layout import Layout

        return Layout()

    def open_data(self, split: str, seed: int) -> Any:
        if self.mistake == "open_data_list":
            return [1, 2]
        if self.mistake == "open_data_missing_file":
            open("nowhere.csv")  # noqa: SIM115
        return MistakenRows(self.mistake, split, self.rows)

    def receive(self, inputs: Any) -> Any:
        if self.mistake == "receive_raises":
            raise KeyError("pixels")
        return inputs

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        if self.mistake == "loss_raises":
            raise ValueError("no such class")
        if self.mistake == "loss_stops":
            raise bdb.BdbQuit  # what breakpoint() raises without a terminal
        return super().loss(outputs, targets)

    def measure(self, outputs: Any, batch: Any, loss: Tensor) -> Any:
        import torch

        sums = super().measure(outputs, batch, loss)
        wrong = {
            "measure_too_few": sums[:2],
            "measure_scalar": sums[1],
            "measure_list": sums.tolist(),
            "measure_whole_numbers": sums.to(torch.int64),
            "measure_no_weight": sums[[1, 1, 2]],
        }
        if self.mistake == "measure_one_number":
            return weighted_sums(batch.weight, loss.mean(), loss)
        if self.mistake == "measure_raises":
            return self._count(outputs)
        return wrong.get(self.mistake, sums)

    def _count(self, outputs: Tensor) -> Tensor:
        return outputs.undefined  # type: ignore[attr-defined]

    def eval_outputs(self, outputs: Any, batch: Any) -> Any:
        if self.mistake == "eval_outputs_raises":
            return outputs[:, 9]
        if self.mistake == "eval_outputs_flat":
            return outputs[:, 0]
        if self.mistake == "eval_outputs_list":
            return [0]
        return None

    def evaluator(self, rows: int) -> Evaluator | None:
        return Spread() if self.mistake == "evaluator_without_rows" else None

    def summarise(self, sums: list[float]) -> Any:
        if self.mistake == "summarise_raises":
            return {"top1": sums[7]}
        if self.mistake == "summarise_list":
            return sums
        return super().summarise(sums)


class Spread(Evaluator):
    def add(self, rows: Tensor) -> None:
        pass

    def values(self, peers: Any) -> dict[str, float]:
        return {"spread": 0.0}


class MistakenRows(Dataset):
    prefetch = 0

    def __init__(self, mistake: str, split: str, rows: int) -> None:
        self.mistake, self.good = mistake, Rows(rows if split == "train" else 50, split, -1)
        self.evaluates, self.fetched = split == "eval", 0

    def __len__(self) -> Any:
        return len(self.good) / 2 if self.mistake == "length_half" else len(self.good)

    def fetch(self, ids: Any, epoch: int) -> Any:
        import torch

        inputs, targets = self.good.fetch(ids, epoch)
        if self.mistake == "fetch_late" and self.evaluates and ids.max() >= 8:
            raise KeyError(f"row {ids.max()}")
        self.fetched += 1
        if self.mistake == "fetch_draws":
            inputs = inputs + torch.randn(len(inputs), 1)
        if self.mistake == "fetch_later" and not self.evaluates and self.fetched > 6:
            raise OSError("away")
        if self.mistake == "fetch_raises":
            raise RuntimeError("the archive is broken")
        if self.mistake == "fetch_memory":
            raise MemoryError
        wrong = {
            "fetch_one": inputs,
            "fetch_three": (inputs, targets, ids),
            "fetch_array": (inputs.numpy(), targets),
            "fetch_sparse": (inputs.to_sparse(), targets),
            "fetch_nested": (torch.nested.nested_tensor(list(inputs)), targets),
            "fetch_short": (inputs, targets[:-1]),
            "fetch_scalar": ({"x": inputs, "scale": targets.sum()}, targets),
        }
        if self.mistake == "eval_fetch_short" and self.evaluates:
            return inputs[1:], targets
        return wrong.get(self.mistake, (inputs, targets))


@register("recipe", "mistake_arguments")
class WrongArguments(Toy):
    def loss(self, outputs: Any) -> Any:  # type: ignore[override]
        return outputs
