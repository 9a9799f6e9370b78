"""What to train: the contract of a recipe and of its data sets. Names no strategy and imports torch only to type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from dtf.api.layout import Layout
from dtf.api.options import FineTuning
from dtf.core.errors import ConfigError
from dtf.core.renamed import accept_old_methods

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from dtf.api.sparse_table import Table
    from dtf.core.types import Batch, Names


class Split(Enum):
    """Rows to train on, to choose the best model by and, where there are such, to judge that one by in the end."""

    train = "train"
    eval = "eval"
    test = "test"


class Dataset(ABC):
    """Rows by number. Lives in one rank; every rank can read every row."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_methods(cls, {"ceiling": "best_possible"})

    prefetch: int = 2
    """Batches worth fetching ahead in a thread; 0 when a fetch costs less than handing it over (data in memory)."""

    queue_rows: int = 0
    """Rows, of this rank, that may be in memory ahead of the model: as many batches are fetched ahead, two at least, 65
    at most. 0: `prefetch` batches are.
    """

    threads: int = 1
    """Batches that are fetched at the same time, each in a thread of its own; `fetch` must allow it."""

    repeats: bool = False
    """Whether `fetch` also takes ids from len(self) on: id k * len(self) + row is the k-th further view of a row,
    augmented differently.
    """

    bad: Mapping[int, str] = MappingProxyType({})
    """Rows that could not be read so far -> why. `fetch` delivers something for them, and they count for nothing."""

    allowed: int = 0
    """Rows of a run that may be bad, over all ranks."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        """Inputs (a tensor or dict of tensors with leading axis B) and targets (B, ...) of the rows `ids` (B,) int64.

        On CPU. A pure function: randomness (augmentation) comes from hash(seed, epoch, sample id), see
        `dtf.core.seeding.draws`, so that the same row has the same pixels on whichever rank and after whatever restart.
        """

    def unaugmented(self) -> Dataset:
        """The same rows, each as an evaluation sees it, with its plain target.

        Default: self, for data that training sees no other way.
        """
        return self

    def groups(self) -> np.ndarray | None:
        """Class of each row, (N,) int64, for samplers that balance. Default: None, rows have none."""
        return None

    def runs(self) -> np.ndarray | None:
        """Bounds (R + 1,) int64 of runs of rows that are read one after the other, as a log's blocks are.

        Default: None, in any order.
        """
        return None

    def best_possible(self) -> dict[str, float]:
        """The best values of metrics that any model can be expected to reach on these rows. Default: unknown."""
        return {}

    def fingerprint(self) -> str:
        """Text that differs when the data differs; saved in checkpoints. Default: the number of rows."""
        return str(len(self))


class Peers(Protocol):
    """What an evaluator asks of other ranks; see `dtf.distributed.world.World`. Each is collective."""

    def reduce(self, sums: Tensor) -> Tensor: ...
    def collect(self, rows: Tensor) -> Tensor | None: ...
    def broadcast(self, value: Any) -> Any: ...


class Evaluator(ABC):
    """Rows of one evaluation on one rank, and the metrics that those of all ranks give together."""

    @abstractmethod
    def add(self, rows: Tensor) -> None:
        """More of them, (R, K) as `Recipe.eval_outputs` gives them, on the device. No host synchronisation."""

    @abstractmethod
    def values(self, peers: Peers) -> dict[str, float]:
        """By name; the same on all ranks. Collective."""


class Recipe(ABC):
    """A model, its loss, its data and its metrics. Fields are the config node `recipe`; `recipe.model.*` and
    `recipe.data.*` are nested nodes.

    Modules must import without torch at the top level; methods import what they need.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_methods(cls, {"judge": "evaluator", "judged": "eval_outputs", "measures": "train_metrics"})

    @property
    @abstractmethod
    def train_metrics(self) -> tuple[str, ...]:
        """Names of `measure`'s sums after the first, in their order; `loss` is one of them.

        They name metrics, unless `summarise` makes others of them.
        """

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation. Default: `train_metrics`."""
        return self.train_metrics

    @property
    @abstractmethod
    def objective(self) -> tuple[str, str]:
        """The metric that says which evaluation is best, and `max` or `min`."""

    @property
    def fine_tuning(self) -> FineTuning:
        """Where the model's numbers come from, and which of them learn.

        Default: the node `model`, where it is a FineTuning; else nothing.
        """
        node = getattr(self, "model", None)
        return node if isinstance(node, FineTuning) else FineTuning()

    def training_rows(self) -> int | None:
        """Rows of the training split, where the config alone tells. Default: None, the data will tell."""
        return None

    @property
    def pairs(self) -> bool:
        """Whether rows 2k and 2k + 1 of a global batch of training belong together, and must be in one micro-batch.

        Default: False.
        """
        return False

    def direction(self, metric: str) -> str:
        """`max` or `min`: which values of a metric are better. ConfigError for one that has no such end.

        Default: `min` for the loss, the objective's own for the objective, else `max`.
        """
        return "min" if metric == "loss" else self.objective[1] if metric == self.objective[0] else "max"

    def idle(self) -> dict[str, str]:
        """Keys of the config, of any group, that have no effect as this recipe is set -> the key that makes it so.
        Torch-free, quick. Default: none.

        A value that a file gives to such a key falls back to its default when the command line sets the key that makes
        it so.
        """
        return {}

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError or DataError for what can be seen before launch (a missing path). Torch-free, quick."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A plain module. Called under `torch.device("meta")`: parameters are drawn later by `initialise`."""

    def initialise(self, name: str, module: nn.Module) -> None:
        """Draw the parameters and buffers that `module` itself owns (not its children's), on CPU.

        `name` is the module's full dotted name ("" for the root). The global generator is seeded from hash(seed, name)
        before the call. Default: the module's `reset_parameters`.
        """
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()

    def layout(self, model: nn.Module) -> Layout:
        """How `model`, as `build_model` makes it, falls into parts. Default: unknown."""
        return Layout()

    def tables(self) -> dict[str, Table]:
        """Sparse tables, by the name of the input that holds their ids; inputs are then a dict. Default: none."""
        return {}

    def table_widths(self) -> dict[str, int]:
        """Numbers in a row of each sparse table, by name. Asked before launch: torch-free, quick.

        Default: as `tables` says, which may read data.
        """
        return {name: table.width for name, table in self.tables().items()}

    splits: tuple[Split, ...] = (Split.train, Split.eval)
    """What `open_data` can open, by the values of these."""

    @abstractmethod
    def open_data(self, split: str, seed: int) -> Dataset:
        """One of `splits`. `seed` is the run's, for augmentation. DataError when it cannot be read."""

    def receive(self, inputs: Any) -> Any:
        """The model's inputs from what the data set delivered, on the device: for what is cheaper there, as
        normalisation. Default: the same.

        No host synchronisation. Also called on meta.
        """
        return inputs

    @abstractmethod
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Loss per row, shape (B,). The engine weights, sums and divides by the rows of the global batch."""

    @abstractmethod
    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        """Additive metric state, shape (M,): [0] the sum of weights, [i] as `train_metrics[i - 1]`; see
        `dtf.model.metrics.weighted_sums`.

        `loss` (B,) is `self.loss(outputs, batch.targets)`, detached. No host synchronisation.
        """

    def eval_outputs(self, outputs: Any, batch: Batch) -> Tensor | None:
        """What `evaluator` needs to know of each row of an evaluation, (B, K), `batch.weight` among it. None (default):
        there is no evaluator.

        No host synchronisation.
        """
        return None

    def evaluator(self, rows: int) -> Evaluator | None:
        """For metrics that no sums give, as the area under a curve: what makes them of the rows of one evaluation, so
        many over all ranks.

        Default: None, there are no such metrics.
        """
        return None

    def probabilities(self, outputs: Any) -> Tensor:
        """What the model says of each row: the probability of each class, (B, C), or of the one event that happens or
        not, (B,).

        `outputs` are whole tensors in fp32 at least. Default: softmax over the last axis.
        """
        return outputs.softmax(-1)

    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of the outputs; asked once the data are open. Default: none, numbers stand for them.

        Of an event two names, of its absence and of itself, where it is to be judged by how often p >= 0.5 is right;
        none where it is rare or a rate.
        """
        return ()

    def preprocessing(self) -> dict[str, Any]:
        """How an input of the outside world becomes what the model takes, as JSON, for users of an exported model.

        Default: nothing is said.
        """
        return {}

    def preprocessing_arrays(self) -> dict[str, np.ndarray]:
        """Arrays that `preprocessing` speaks of by their names, such as a vocabulary; an export writes them to a file.

        Default: none.
        """
        return {}

    def open_inputs(self, path: Path) -> tuple[Names, Dataset]:
        """Inputs without labels, for `job=predict`: the name of each row, and the rows, prepared as for evaluation;
        targets mean nothing.

        Default: ConfigError. DataError when they cannot be read.
        """
        raise ConfigError(
            f"job.input={path}: {type(self).__name__} has no open_inputs() that reads inputs without labels; use "
            "job.split"
        )

    def summarise(self, sums: list[float]) -> dict[str, float]:
        """Metric values from summed state (M,). Default: weighted means."""
        return {
            name: value / sums[0] if sums[0] else float("nan")
            for name, value in zip(self.train_metrics, sums[1:], strict=True)
        }
