"""The rows of a click recipe: what any config node `recipe.data` must tell the model.

Imports without torch, numpy and numba.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from dtf.api.recipe import Dataset

MOST_ROWS = 1 << 40


@dataclass(kw_only=True)
class DataOptions(ABC):
    """What a model must know of its rows. `dtf.recipes.ctr.clicklog.Clicks` describes the rows themselves."""

    @property
    @abstractmethod
    def fields(self) -> int:
        """Categories of a row that have one value: `ids` is (B, fields), and missing where it is 0."""

    @property
    def bag_fields(self) -> int:
        """Categories of a row that have any number of values: `bags` has lengths (B, bag_fields), and is missing where
        it is 0. Default: none.
        """
        return 0

    @property
    @abstractmethod
    def integers_count(self) -> int:
        """Numbers of a row: `dense` is (B, integers_count), and missing where it is 0."""

    @property
    @abstractmethod
    def table_rows(self) -> int:
        """Ids are 0 to table_rows - 1; 0: any but -1.

        Reads the training split when the ids are those of a vocabulary not yet made.
        """

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the fields, in their order, those of bags last. Default: none."""
        return ()

    def rows_of_fields(self) -> list[int]:
        """How many ids each field may have, those of bags last; 0: any. Reads what `table_rows` reads. Default: each as
        many as all.
        """
        return [self.table_rows] * (self.fields + self.bag_fields)

    @property
    def any_ids(self) -> bool:
        """Whether `table_rows` is 0. Reads nothing."""
        return False

    def preprocessing(self) -> dict[str, Any]:
        """As `Recipe.preprocessing`. Default: empty."""
        return {}

    def preprocessing_arrays(self) -> dict[str, np.ndarray]:
        """As `Recipe.preprocessing_arrays`. Default: none."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError or DataError for what can be seen before launch. Torch-free."""

    @abstractmethod
    def open(self, split: str, seed: int) -> Dataset:
        """The `train` or `eval` split."""
