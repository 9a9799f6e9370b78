"""Models of click-through rates on a few drawn clicks. A plugin: `plugins=[tests.support.ctr_toy]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.recipes.ctr.data import DataOptions
from dtf.recipes.ctr.model_options import Kind, ModelOptions, Structure
from dtf.recipes.ctr.recipe import ClickThrough

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FIELDS, SIZE = 5, 40
TINY: dict[Kind, dict[str, Any]] = {
    Kind.lr: {},
    Kind.fm: {"dim": 3},
    Kind.dnn: {"hidden": [8, 6, 4]},
    Kind.wide_deep: {"hidden": [8, 6]},
    Kind.deepfm: {"hidden": [8, 6, 4]},
    Kind.dcn: {"hidden": [8, 6, 4], "cross_layers": 2},
    Kind.dcnv2: {"hidden": [8, 6], "cross_layers": 2, "cross_rank": 4, "structure": Structure.stacked},
    Kind.xdeepfm: {"hidden": [8], "maps": [4, 3]},
    Kind.dlrm: {"hidden": [8, 6], "bottom": [6]},
}


def options(kind: Kind, **more: Any) -> ModelOptions:
    """A tiny model of a kind, with batch norm and dropout where it has layers."""
    deep = {"batch_norm": True, "dropout": 0.2} if "hidden" in TINY[kind] else {}
    return ModelOptions(
        kind=kind, **{"scale": 0.1, **({} if kind is Kind.lr else {"dim": 3}), **deep, **TINY[kind], **more}
    )


@dataclass(kw_only=True)
class DrawnOptions(DataOptions):
    rows: int = option(default=96, doc="training rows")
    numbers: int = option(default=2, doc="numbers of a row")

    @property
    def fields(self) -> int:
        return FIELDS

    @property
    def integers_count(self) -> int:
        return self.numbers

    @property
    def table_rows(self) -> int:
        return SIZE

    def check(self) -> None: ...

    def open(self, split: str, seed: int) -> Dataset:
        return Drawn(self.rows if split == "train" else 50, self.numbers, split)


@register("recipe", "ctr_toy")
class CtrToy(ClickThrough):
    """Any kind of model, tiny."""

    data: DrawnOptions = option(factory=DrawnOptions, doc="the clicks")
    kind: str = option(default="deepfm", doc="of model")
    rows: int = option(default=96, doc="training rows")

    def __post_init__(self) -> None:
        self.model, self.data = options(Kind[self.kind]), DrawnOptions(rows=self.rows)


class Drawn(Dataset):
    """Clicks that depend on ids and numbers; some ids are missing."""

    prefetch = 0

    def __init__(self, rows: int, numbers: int, split: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(len(split))
        each = SIZE // FIELDS
        self._ids = torch.randint(-1, each, (rows, FIELDS), generator=generator)
        self._ids = torch.where(self._ids < 0, -1, self._ids + each * torch.arange(FIELDS))
        self._dense = torch.randn(rows, numbers, generator=generator)
        self._clicks = (torch.sin(1.0 * self._ids).sum(1) + self._dense.sum(1) > 0).float()

    def __len__(self) -> int:
        return len(self._clicks)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        return {"ids": self._ids[ids], **({"dense": self._dense[ids]} if self._dense.shape[1] else {})}, self._clicks[
            ids
        ]
