"""Recipes for click-through rates: their config nodes, and how model, log and loss are put together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.options import FineTuning
from dtf.api.recipe import Dataset, Recipe, Split
from dtf.api.registry import option, register
from dtf.api.sampler import RowTrait
from dtf.api.schema import KeyProblem, show
from dtf.api.sparse_table import Table
from dtf.core.errors import ConfigError
from dtf.recipes.ctr.data import DataOptions
from dtf.recipes.ctr.generated_data import ClicksOptions
from dtf.recipes.ctr.log_data import LogOptions, Mode

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from dtf.core.types import Batch, Names
    from dtf.model.auc import AucEvaluator


class Kind(Enum):
    """Models by name; the class of each in `model.py` has its source."""

    lr = "lr"
    fm = "fm"
    dnn = "dnn"
    wide_deep = "wide_deep"
    deepfm = "deepfm"
    dcn = "dcn"
    dcnv2 = "dcnv2"
    xdeepfm = "xdeepfm"
    dlrm = "dlrm"


DEEP = frozenset(Kind) - {Kind.lr, Kind.fm}
"""Models with a multilayer perceptron."""

WIDE = frozenset({Kind.lr, Kind.fm, Kind.wide_deep, Kind.deepfm, Kind.xdeepfm})
"""Models with a first-order term, whose weight is the last number of a row of the table."""


OF_KINDS = {
    "dim": frozenset(Kind) - {Kind.lr},
    "hidden": DEEP,
    "batch_norm": DEEP,
    "dropout": DEEP,
    "cross_layers": {Kind.dcn, Kind.dcnv2},
    "cross_rank": {Kind.dcnv2},
    "structure": {Kind.dcnv2},
    "maps": {Kind.xdeepfm},
    "bottom": {Kind.dlrm},
}
"""Option of a model -> the kinds that have it."""


class EmbeddingKind(Enum):
    dense = "dense"
    sparse = "sparse"


class Structure(Enum):
    parallel = "parallel"
    stacked = "stacked"


@dataclass(kw_only=True)
class ModelOptions(FineTuning):
    kind: Kind = option(
        default=Kind.dnn,
        doc="`lr` logistic regression; `fm` factorization machine; `dnn` multilayer perceptron; `wide_deep`, `deepfm`, "
        "`xdeepfm` it beside a logistic regression, a factorization machine, a compressed interaction network; `dcn`, "
        "`dcnv2` it with cross layers; `dlrm` it on products of pairs of vectors",
    )
    table: EmbeddingKind = option(
        default=EmbeddingKind.dense,
        doc="where the rows of ids are: `dense` in a parameter of the model, which every step of the optimizer goes "
        "over, so that L2 and Adam are exact; "
        "`sparse` in a table beside it, of which a step changes only the rows of its batch",
    )
    capacity: int = option(
        default=0,
        least=0,
        most=1 << 40,
        doc="for table=sparse: rows it may come to hold, over all ranks; 0: one for each id",
        unit="rows",
    )
    scale: float = option(
        default=1e-4, above=0, doc="standard deviation of the numbers that rows of ids are drawn from"
    )
    dim: int = option(default=10, least=1, most=4096, doc="numbers of an id's vector; not of kind=lr")
    hidden: list[int] = option(
        factory=lambda: [400, 400, 400],
        least=1,
        most=65536,
        doc="widths of the hidden layers of the multilayer perceptron",
    )
    batch_norm: bool = option(default=False, doc="normalise these hidden layers by batch statistics")
    dropout: float = option(
        default=0.0, least=0, below=1, doc="share of the activations of these hidden layers that is dropped"
    )
    cross_layers: int = option(default=3, least=1, most=64, doc="of kind=dcn and dcnv2")
    cross_rank: int = option(
        default=0, least=0, most=65536, doc="of kind=dcnv2: rank of the matrices of cross layers; 0: full"
    )
    structure: Structure = option(
        default=Structure.parallel,
        doc="of kind=dcnv2: multilayer perceptron beside the cross layers, or `stacked` on them",
    )
    maps: list[int] = option(
        factory=lambda: [64],
        least=1,
        most=4096,
        doc="of kind=xdeepfm: feature maps of the layers of its interaction network",
    )
    bottom: list[int] = option(
        factory=lambda: [512, 256],
        least=1,
        most=65536,
        doc="of kind=dlrm: hidden widths of the multilayer perceptron that makes a vector of the numbers of a row",
    )

    def check(self) -> None:
        """Raise ConfigError for values that make no model, and for those that this kind of model does not have."""
        default = ModelOptions()
        for key, kinds in OF_KINDS.items():
            value = getattr(self, key)
            if value != getattr(default, key) and self.kind not in kinds:
                given = show(value.name if isinstance(value, Enum) else value)
                names = ", ".join(kind.name for kind in Kind if kind in kinds)
                full = f"recipe.model.{key}"
                raise KeyProblem(
                    full,
                    f"{full}={given} does not apply to recipe.model.kind={self.kind.name}, only to {names}; leave it "
                    "out",
                )
        for key in ("hidden", "maps"):
            if not getattr(self, key):
                raise KeyProblem(
                    f"recipe.model.{key}",
                    f"recipe.model.{key}=[] must name at least one layer; kind=lr and kind=fm have none",
                )
        if self.capacity and self.table is EmbeddingKind.dense:
            key = "recipe.model.capacity"
            raise KeyProblem(
                key,
                f"{key}={self.capacity} has a meaning for recipe.model.table=sparse only; set that too, or leave it "
                "out",
            )

    @property
    def width(self) -> int:
        """Numbers of a row of the table."""
        return (0 if self.kind is Kind.lr else self.dim) + (self.kind in WIDE)


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
            ("sparse", "recipe.model.capacity")
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
        if self.group >= self.data.fields:
            named = ", ".join(f"{number} {name}" for number, name in enumerate(self.data.field_names))
            raise ConfigError(
                f"recipe.group={self.group} must be -1 for none, or a field of a row, 0 to "
                f"{self.data.fields - 1}{named and f': {named}'}"
            )

    def table_widths(self) -> dict[str, int]:
        return {} if self.model.table is EmbeddingKind.dense else {"ids": self.model.width}

    def tables(self) -> dict[str, Table]:
        if self.model.table is EmbeddingKind.dense:
            return {}
        size = self.data.table_rows
        return {"ids": Table(self.model.width, size, self.model.capacity or size, self.model.scale)}

    def open_data(self, split: str, seed: int) -> Dataset:
        return self._grouped(self.data.open(split, seed))

    def _grouped(self, rows: Dataset) -> Dataset:
        """The same rows, with a group for each where `group` is set."""
        if self.group < 0:
            return rows
        from dtf.recipes.ctr.grouped import Grouped

        return Grouped(rows, self.group)

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
            self.data.fields, self.data.integers_count, self.data.table_rows if o.table is EmbeddingKind.dense else 0
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
        return rows.places, self._grouped(rows)


@register("recipe", "ctr_generated")
class GeneratedClicks(ClickThrough):
    """A model of click-through rates, trained on clicks of known probabilities that are drawn as they are read: no
    files needed.
    """

    data: ClicksOptions = option(factory=ClicksOptions, doc="the clicks")

    @property
    def row_traits(self) -> tuple[RowTrait, ...]:
        return (RowTrait.single,)
