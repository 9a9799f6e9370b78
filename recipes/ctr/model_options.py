"""The config node `recipe.model` of the recipes for click-through rates.

Imports without torch, numpy and numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dtf.api.options import FineTuning
from dtf.api.registry import option
from dtf.api.schema import KeyProblem, show
from dtf.api.sparse_table import Pooling


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
    table_per_field: bool = option(
        default=False,
        doc="for table=sparse: each field has a table of its own, named after it, in place of one for all; `capacity` "
        "is that of each",
    )
    pooling: Pooling = option(
        default=Pooling.sum,
        doc="what the rows of a category's values become where it has several: their sum, their mean, or of each "
        "column the largest number",
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
        for name in ("capacity", "table_per_field"):
            value, key = getattr(self, name), f"recipe.model.{name}"
            if value and self.table is EmbeddingKind.dense:
                raise KeyProblem(
                    key,
                    f"{key}={show(value)} has a meaning for recipe.model.table=sparse only; set that too, or leave it "
                    "out",
                )

    @property
    def width(self) -> int:
        """Numbers of a row of the table."""
        return (0 if self.kind is Kind.lr else self.dim) + (self.kind in WIDE)
