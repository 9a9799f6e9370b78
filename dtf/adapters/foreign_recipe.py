"""What recipes of other libraries' models have in common. Torch-free: the command line reads them."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.api.recipe import Dataset, Recipe

if TYPE_CHECKING:
    from torch import nn


class _Opened:
    """What copies of a recipe have in common."""

    run: Any = None


class ForeignRecipe(Recipe):
    """A model of another library, and its data. A line of a plugin makes a subclass, and sets what follows."""

    shapes_vary: ClassVar[bool | None]
    chosen_objective: ClassVar[tuple[str, str]]
    recipe_name: ClassVar[str]

    def join(self, settings: Any) -> None:
        self._settings, self._opened = settings, _Opened()

    @abstractmethod
    def open_run(self) -> Any:
        """Import the library, and open model and data in a rank. Has the methods `build()`, a new model, and
        `rows(split)`.
        """

    @property
    def run(self) -> Any:
        """What `open_run` returned when it was first asked for."""
        if self._opened.run is None:
            self._opened.run = self.open_run()
        return self._opened.run

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("loss", self.chosen_objective[0])))

    @property
    def objective(self) -> tuple[str, str]:
        return self.chosen_objective

    def build_model(self) -> nn.Module:
        return self.run.build()

    def open_data(self, split: str, seed: int) -> Dataset:
        return self.run.rows(split)
