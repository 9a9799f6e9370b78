"""Recipes for click-through rates: their config nodes, and how model, log and loss are put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.recipe import Dataset, Recipe, Split
from dtf.api.registry import option, register
from dtf.api.sampler import RowTrait
from dtf.api.schema import KeyProblem
from dtf.api.sparse_table import Pooling, Table, name_fault
from dtf.core.errors import ConfigError
from dtf.recipes.ctr.data import DataOptions
from dtf.recipes.ctr.generated_data import ClicksOptions
from dtf.recipes.ctr.log_data import LogOptions, Mode
from dtf.recipes.ctr.model_options import OF_KINDS, EmbeddingKind, Kind, ModelOptions, Structure

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from dtf.core.types import Batch, Names
    from dtf.model.auc import AucEvaluator


@dataclass(kw_only=True)
class ClickThrough(Recipe):
    """The probability of a click, from the ids and numbers of a row. Where the rows come from is left to subclasses.

    `loss` is the log loss, `calibration` predicted over observed clicks; evaluations have `auc` too, and `group_auc`
    where there are groups.
    """

    model: ModelOptions = option(factory=ModelOptions, doc="the model")
    data: DataOptions = option(factory=DataOptions, doc="the rows")
    group: int = option(
        default=-1,
        least=-1,
        doc="field, from 0, within whose values evaluations also measure the AUC: `group_auc`, weighted by rows; -1: "
        "off",
        unit="field",
    )

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "predicted", "observed")

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "calibration", "auc", *(("group_auc",) if self.group >= 0 else ()))

    @property
    def objective(self) -> tuple[str, str]:
        return ("auc", "max")

    def direction(self, metric: str) -> str:
        if metric == "calibration":
            raise ConfigError(
                "run.objective=calibration is best at 1, neither at its largest nor at its smallest, and ranks no "
                "models; use auc or loss"
            )
        return super().direction(metric)

    def inactive_keys(self) -> dict[str, str]:
        of_kind = {
            f"recipe.model.{key}": "recipe.model.kind"
            for key, kinds in OF_KINDS.items()
            if self.model.kind not in kinds
        }
        of_table = (
            ("sparse", "recipe.model.capacity", "recipe.model.table_per_field")
            if self.model.table is EmbeddingKind.dense
            else ("optimizer.weight_decays.table",)
        )
        return of_kind | dict.fromkeys(of_table, "recipe.model.table")

    def check(self) -> None:
        if self.data.any_ids and self.model.table is EmbeddingKind.dense:
            raise ConfigError(
                "recipe.model.table=dense has a row for each id, and the ids of recipe.data.ids=raw are any; use "
                "recipe.model.table=sparse, and recipe.model.capacity=ROWS that it may come to hold"
            )
        self.model.check()
        if self.data.any_ids and not self.model.capacity:
            raise ConfigError(
                "recipe.model.capacity is not set, and the ids of recipe.data.ids=raw are any; give the rows that the "
                "table may come to hold"
            )
        self.data.check()
        self._check_fields()
        if self.group >= self.data.fields:
            single = self.data.field_names[: self.data.fields]
            named = ", ".join(f"{number} {name}" for number, name in enumerate(single))
            raise ConfigError(
                f"recipe.group={self.group} must be -1 for none, or a field of a row, 0 to "
                f"{self.data.fields - 1}{named and f': {named}'}"
            )

    def _check_fields(self) -> None:
        """Raise ConfigError for fields that this model cannot have."""
        if self.data.bag_fields and self.model.table is EmbeddingKind.dense:
            raise ConfigError(
                "recipe.model.table=dense has one value of each category, and recipe.data has categories of several; "
                "use recipe.model.table=sparse"
            )
        if self.model.pooling is not Pooling.sum and not self.data.bag_fields:
            key = "recipe.model.pooling"
            raise KeyProblem(
                key, f"{key}={self.model.pooling.name}: no category of recipe.data has several values; leave it out"
            )
        names = self._inputs
        twice = next((name for place, name in enumerate(names) if name in (*names[:place], "dense")), None)
        if twice is not None:
            raise ConfigError(
                f"recipe.model.table_per_field=true names an input after each field, and {twice} would be two; rename "
                "the column"
            )
        odd = next((name for name in names if name_fault(name)), None)
        if odd is not None:
            raise ConfigError(
                f"recipe.model.table_per_field=true names tables after fields: {odd!r} {name_fault(odd)}; rename "
                "the column"
            )

    @property
    def _inputs(self) -> tuple[str, ...]:
        """Names of the inputs that hold ids."""
        data, count = self.data, self.data.fields + self.data.bag_fields
        if self.model.table_per_field:
            return data.field_names or tuple(f"field{number}" for number in range(count))
        return (*(("ids",) if data.fields else ()), *(("bags",) if data.bag_fields else ()))

    def table_widths(self) -> dict[str, int]:
        if self.model.table is EmbeddingKind.dense:
            return {}
        return dict.fromkeys(self._inputs if self.model.table_per_field else ("ids",), self.model.width)

    def tables(self) -> dict[str, Table]:
        if self.model.table is EmbeddingKind.dense:
            return {}
        width, capacity, scale = self.model.width, self.model.capacity, self.model.scale
        size, pooling = self.data.table_rows, self.model.pooling if self.data.bag_fields else None
        key = "recipe.model.capacity"
        if not self.model.table_per_field:
            inputs = () if self._inputs == ("ids",) else self._inputs
            return {"ids": Table(width, size, capacity or size, scale, inputs, pooling, key)}
        rows = self.data.rows_of_fields()
        return {
            name: Table(width, size, capacity or rows[f], scale, (), pooling if f >= self.data.fields else None, key)
            for f, name in enumerate(self._inputs)
        }

    def open_data(self, split: str, seed: int) -> Dataset:
        return self._wrapped(self.data.open(split, seed))

    def _wrapped(self, rows: Dataset) -> Dataset:
        """The same rows, with a group for each where `group` is set, and an input for each field where those are."""
        if self.group >= 0:
            from dtf.recipes.ctr.grouped import Grouped

            rows = Grouped(rows, self.group)
        if self.model.table_per_field:
            from dtf.recipes.ctr.by_field import ByField

            rows = ByField(rows, self._inputs)
        return rows

    def build_model(self) -> nn.Module:
        from dtf.recipes.ctr.model import draw

        model = self._model()
        draw(model, self.model.scale)
        return model

    def _model(self) -> nn.Module:
        """The model as torch's layers draw themselves."""
        from dtf.recipes.ctr import model as models

        o = self.model
        inputs = models.Inputs(
            self.data.fields + self.data.bag_fields,
            self.data.integers_count,
            self.data.table_rows if o.table is EmbeddingKind.dense else 0,
            self._inputs,
        )
        tower = models.Tower(o.hidden, o.batch_norm, o.dropout)
        match o.kind:
            case Kind.lr:
                return models.LogisticRegression(inputs)
            case Kind.fm:
                return models.FactorizationMachine(inputs, o.dim)
            case Kind.dnn:
                return models.DNN(inputs, o.dim, tower)
            case Kind.wide_deep | Kind.deepfm:
                return models.WideDeep(inputs, o.dim, tower, pairs=o.kind is Kind.deepfm)
            case Kind.dcn:
                return models.DCN(inputs, o.dim, tower, o.cross_layers, None, stacked=False)
            case Kind.dcnv2:
                return models.DCN(
                    inputs, o.dim, tower, o.cross_layers, o.cross_rank, stacked=o.structure is Structure.stacked
                )
            case Kind.xdeepfm:
                return models.XDeepFM(inputs, o.dim, tower, o.maps)
            case Kind.dlrm:
                return models.DLRM(inputs, o.dim, tower, o.bottom)

    def layout(self, model: nn.Module) -> Layout:
        from dtf.recipes.ctr.model import layout

        return layout(model)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(outputs, _clicks(targets).to(outputs.dtype), reduction="none")

    def clicks(self, targets: Tensor) -> Tensor:
        return _clicks(targets)

    def measure(self, outputs: Tensor, batch: Batch, loss: Tensor) -> Tensor:
        from dtf.model.metrics import weighted_sums

        return weighted_sums(batch.weight, loss, outputs.sigmoid(), _clicks(batch.targets))

    def summarise(self, sums: list[float]) -> dict[str, float]:
        rows, loss, predicted, observed = sums
        return {
            "loss": loss / rows if rows else float("nan"),
            "calibration": predicted / observed if observed else float("nan"),
        }

    def eval_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch

        columns = [
            outputs,
            _clicks(batch.targets),
            batch.weight,
            *(batch.targets[:, 1:].unbind(1) if self.group >= 0 else ()),
        ]
        return torch.stack(
            [column.to(batch.targets.dtype if self.group >= 0 else outputs.dtype) for column in columns], 1
        )

    def evaluator(self, rows: int) -> AucEvaluator:
        from dtf.model.auc import AucEvaluator

        return AucEvaluator(rows, grouped=self.group >= 0)

    def preprocessing(self) -> dict[str, Any]:
        return self.data.preprocessing()

    def preprocessing_arrays(self) -> dict[str, np.ndarray]:
        return self.data.preprocessing_arrays()

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()


def _clicks(targets: Tensor) -> Tensor:
    """(B,), from targets that may have a second column, the group; see `grouped`."""
    return targets if targets.dim() == 1 else targets[:, 0]


@register("recipe", "ctr_log")
class ClickLog(ClickThrough):
    """A model of click-through rates, trained on files of clicks."""

    data: LogOptions = option(factory=LogOptions, doc="the files")
    splits = tuple(Split)

    @property
    def row_traits(self) -> tuple[RowTrait, ...]:
        return () if self.data.mode is Mode.queue else (RowTrait.single,)

    def open_inputs(self, path: Path) -> tuple[Names, Dataset]:
        rows = self.data.inputs(path)
        return rows.places, self._wrapped(rows)


@register("recipe", "ctr_generated")
class GeneratedClicks(ClickThrough):
    """A model of click-through rates, trained on clicks of known probabilities that are drawn as they are read: no
    files needed.
    """

    data: ClicksOptions = option(factory=ClicksOptions, doc="the clicks")

    @property
    def row_traits(self) -> tuple[RowTrait, ...]:
        return (RowTrait.single,)
