"""What to train: the contracts of recipes and of their data sets. Names no strategy, and imports torch only for
types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.api.evaluator import Evaluator, Peers  # noqa: F401  a user's module finds them here too
from dtf.api.layout import Layout
from dtf.api.options import FineTuning
from dtf.api.sparse_table import inputs_of
from dtf.core.errors import ConfigError
from dtf.core.renamed import accept_old_names

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from dtf.api.sampler import RowTrait
    from dtf.api.sparse_table import Table
    from dtf.core.types import Batch, Names


class Split(Enum):
    """The parts of a data set: `train` to train on, `eval` to choose the best checkpoint by, and `test`, where there is
    one, for the final measurement of that checkpoint.
    """

    train = "train"
    eval = "eval"
    test = "test"


class Dataset(ABC):
    """Rows by number, as one rank reads them. Every rank can read every row."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_names(Dataset, cls, {"ceiling": "best_possible"})

    prefetch: int = 2
    """Batches to fetch ahead in a thread. 0 where a fetch costs less than handing its result to another thread (data in
    memory).
    """

    queue_rows: int = 0
    """Rows of this rank that may be in memory ahead of the model. As many batches as they fill are fetched ahead, at
    least 2 and at most 65. 0: `prefetch` batches.
    """

    threads: int = 1
    """Batches that are fetched at the same time, each in a thread of its own. `fetch` must be thread-safe where this is
    more than 1.
    """

    repeats: bool = False
    """Whether `fetch` also takes ids from len(self) on. Id k * len(self) + row is the k-th further view of a row, with
    another augmentation.
    """

    shapes_vary: bool = False
    """Whether the shapes of rows depend on which rows are fetched together, as where the longest one of a batch decides
    how far others are padded. Then each micro-batch is fetched by itself, so that its numbers are the same whichever
    rank computes it. Shapes that depend on the epoch alone do not vary.
    """

    bad: Mapping[int, str] = MappingProxyType({})
    """Rows that could not be read so far -> the reason. `fetch` returns any values for them; they get weight 0."""

    allowed: int = 0
    """How many rows of a run may be unreadable, over all ranks; 0: the first is a DataError of `fetch`. `job=predict`
    sets it.
    """

    left_out: Mapping[str, str] = MappingProxyType({})
    """Files that were found with the rows and are none -> why. They are counted at the start of a run."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Any]:
        """Inputs and targets of the rows `ids` (B,) int64, on CPU: each a tensor (B, ...), or dicts, lists and tuples
        of such, with leading axis B.

        A pure function. Augmentation draws from hash(seed, epoch, sample id), see `dtf.draws`, so that a row has the
        same values on every rank and after every restart. DataError when rows cannot be read.
        """

    def unaugmented(self) -> Dataset:
        """The same rows as an evaluation sees them, each with its plain target.

        Default: self, for data that are not augmented.
        """
        return self

    def groups(self) -> np.ndarray | None:
        """The class of each row, (N,) int64, for samplers that balance classes. Default: None, rows have no classes."""
        return None

    def runs(self) -> np.ndarray | None:
        """Bounds (R + 1,) int64 of runs of rows that are best read one after the other, such as the blocks of a log.

        Default: None, rows can be read in any order.
        """
        return None

    def best_possible(self) -> dict[str, float]:
        """The best value of each metric that any model can be expected to reach on these rows. Default: unknown."""
        return {}

    def fingerprint(self) -> str:
        """Text that differs when the data differ. Checkpoints hold it. Default: the number of rows."""
        return str(len(self))


class Recipe(ABC):
    """A model with its loss, data and metrics. Fields are the config node `recipe`; `recipe.model.*` and
    `recipe.data.*` are nested nodes.

    Modules of recipes import no torch at the top level. Methods import what they need. B: rows of a micro-batch; M:
    numbers of the metric state.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_names(
            Recipe,
            cls,
            {"idle": "inactive_keys", "judge": "evaluator", "judged": "eval_outputs", "measures": "train_metrics"},
        )

    presets: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What goes with a recipe of a plugin: group -> option, root key -> values of keys in it. A YAML file that starts
    from the recipe's schema, and the command line, stand over them.
    """
    without_probabilities: ClassVar[str] = "define it: the probability of each class, (B, C), or of one event, (B,)"
    """The remedy where a prediction is asked for and `probabilities` gives None."""

    def join(self, settings: Any) -> None:
        """Get to know the other parts of the run: `settings` is the typed config. Torch-free. Default: nothing."""
        return

    @property
    @abstractmethod
    def train_metrics(self) -> tuple[str, ...]:
        """The names of the sums of `measure` after the first, in their order. `loss` is one of them.

        They are names of metrics, unless `summarise` computes others from them.
        """

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics of an evaluation. Default: `train_metrics`."""
        return self.train_metrics

    @property
    @abstractmethod
    def objective(self) -> tuple[str, str]:
        """The metric that decides which evaluation is best, and whether its best value is the `max` or the `min`."""

    @property
    def fine_tuning(self) -> FineTuning:
        """Where initial values of the model come from, and which parameters are frozen.

        Default: the node `model` where it is a FineTuning, else a FineTuning that does nothing.
        """
        node = getattr(self, "model", None)
        return node if isinstance(node, FineTuning) else FineTuning()

    def training_rows(self) -> int | None:
        """The number of training rows, where the config alone determines it. Default: None, only the data tell."""
        return None

    @property
    def pairs(self) -> bool:
        """Whether rows 2k and 2k + 1 of a global batch of training belong together and must be in one micro-batch.

        Default: False.
        """
        return False

    def direction(self, metric: str) -> str:
        """Whether higher (`max`) or lower (`min`) values of a metric are better. ConfigError for a metric with neither.

        Default: `min` for the loss, the objective's own for the objective, else `max`.
        """
        return "min" if metric == "loss" else self.objective[1] if metric == self.objective[0] else "max"

    def inactive_keys(self) -> dict[str, str]:
        """Config keys of any group that have no effect with these options -> the key that makes them ineffective.
        Torch-free and fast. Default: none.

        When the command line sets the key on the right, a value that a file gives to the key on the left falls back to
        its default.
        """
        return {}

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError or DataError for what can be seen before processes are started, such as a missing path.
        Torch-free and fast.
        """

    def prepare(self) -> None:
        """Get what is needed before any rank opens the data, such as a download. Called once on each host, by one of
        its ranks, while others wait. Default: nothing.
        """
        return

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model as a plain module, on CPU, in fp32. What its constructors make of it is what every strategy starts
        from: parameters, buffers, ties, hooks.

        Called under generators (torch's, Python's, numpy's) that are seeded with the run's seed. A recipe that
        overrides `initialise` is called under `torch.device("meta")` instead.
        """

    def initialise(self, name: str, module: nn.Module) -> None:
        """For a model that is larger than a host: draw the parameters and buffers that `module` itself owns, without
        those of its children. On CPU, in fp32, in place.

        A recipe that overrides this has its model built without memory, and drawn module by module; what the
        constructors draw is lost. `name` is the full dotted name of the module, "" for the root. Before the call the
        global generator is seeded with hash(seed, name). This method itself calls the module's `reset_parameters`.
        """
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()

    def layout(self, model: nn.Module) -> Layout:
        """The parts of `model`, as `build_model` makes it. Default: unknown."""
        return Layout()

    def tables(self) -> dict[str, Table]:
        """Sparse tables by name: that of the input that holds their ids, unless `Table.inputs` names others. Inputs
        must then be a dict. Default: none.
        """
        return {}

    def table_widths(self) -> dict[str, int]:
        """Name of each sparse table -> numbers in a row. Called before processes are started: torch-free and fast.

        Default: as `tables` says, which may read data.
        """
        tables = self.tables()
        inputs_of(tables)  # refuses what declares none, here before processes are started
        return {name: table.width for name, table in tables.items()}

    def clicks(self, targets: Any) -> Tensor | None:
        """Which rows of a batch are clicks, a tensor (B,) of any dtype: 0 and NaN where none is. They raise the scores
        of the rows of sparse tables that were shown, see `sparse.evict_score`. ConfigError where it returns anything
        else. Default: None, nothing is a click.
        """
        return None

    @property
    def row_traits(self) -> Collection[RowTrait] | None:
        """What training rows have that some samplers need: all of it, as ranks compare it with the data. Default: None,
        only the data tell, so that ranks find out.
        """
        return None

    splits: tuple[Split, ...] = (Split.train, Split.eval)
    """The splits that `open_data` can open."""

    needed_splits: tuple[Split, ...] = (Split.train, Split.eval)
    """The splits that the job opens; `check` need not look for others. Jobs that do not train set it."""

    def use_classes(self, names: Sequence[str]) -> None:
        """Called before `open_data` where a model exists that knows its classes by name: labels are places among them.

        Default: nothing, the data alone say what a label means.
        """

    @abstractmethod
    def open_data(self, split: str, seed: int) -> Dataset:
        """The data of one of `splits`. `seed`: the run's, for augmentation. DataError when they cannot be read."""

    def receive(self, inputs: Any) -> Any:
        """The inputs of the model, made on the device from what the data set delivered. For work that is cheaper there,
        such as normalisation. Default: unchanged.

        Gets the rows of one micro-batch, each time under a seed of that micro-batch: what it draws with torch, and what
        it makes of all rows, is the same on any rank. No host synchronisation. Also called on meta.
        """
        return inputs

    @abstractmethod
    def loss(self, outputs: Any, targets: Tensor) -> Any:
        """The loss of one micro-batch, from the model's outputs and `targets` (B, ...), in one of three forms.

        The loss of each row, (B,): the engine weights the losses, sums them and divides by the rows of the global
        batch. Sums and counts, a pair of tensors (B,) or (): the engine divides the sum of the sums by that of the
        counts over the global batch; counts (tokens that are not ignored, pairs) need no gradient. A scalar mean, ():
        accepted where cutting a micro-batch proves that it is the mean over rows, or over labels other than -100.

        Where all counts of a global batch are 0, its gradient is 0: the optimizer makes its step, with decay and
        momentum. A scalar mean is taken as it is where no global batch is cut; over no label it is NaN there.
        A loss that couples rows, such as a contrastive one, couples those of a micro-batch.
        """

    def loss_mean(self, divided: bool) -> str | None:
        """Of what a scalar loss is the mean: `rows`, `labels` other than -100, or "" for neither. For a recipe whose
        model computes the loss. `divided`: whether rows of a batch are, so that neither is refused.

        Default: None, it is found by cutting outputs and targets.
        """
        return None

    @abstractmethod
    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        """Additive metric state, shape (M,): [0] the sum of weights, [i] the weighted sum of `train_metrics[i - 1]`.
        See `dtf.weighted_sums`.

        `loss` (B,) is `self.loss(outputs, batch.targets)`, detached: the sums, where it has counts; a scalar mean once
        for each row. No host synchronisation.
        """

    def eval_outputs(self, outputs: Any, batch: Batch) -> Tensor | None:
        """What `evaluator` needs of each row of an evaluation: (B, K), with `batch.weight` (0 for padding) as one of
        the columns. None (default) where there is no evaluator.

        No host synchronisation.
        """
        return None

    def evaluator(self, rows: int) -> Evaluator | None:
        """A new evaluator for the `rows` rows (over all ranks) of one evaluation, for metrics that are no sums, such as
        AUC.

        Default: None, there are no such metrics.
        """
        return None

    def probabilities(self, outputs: Any) -> Tensor | None:
        """The probability of each class (B, C), or of the one event that happens or not (B,). None: there is none.

        `outputs` are full tensors in fp32 or fp64. Default: softmax over the last axis, of outputs (B, C) with labels
        (B,); other models are not taken for ones of classes.
        """
        return outputs.softmax(-1)

    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the outputs. Called once the data are open. Default: none, classes
        are called by their numbers.

        For an event two names, of its absence and of itself, if accuracy at p >= 0.5 makes sense; none if the event is
        rare, or a rate.
        """
        return ()

    def preprocessing(self) -> dict[str, Any]:
        """How an input of the outside world becomes an input of the model, as JSON, for users of an exported model.

        Default: nothing is said.
        """
        return {}

    def preprocessing_arrays(self) -> dict[str, np.ndarray]:
        """Arrays that `preprocessing` refers to by name, such as a vocabulary. An export writes them to a file.

        Default: none.
        """
        return {}

    def open_inputs(self, path: Path) -> tuple[Names, Dataset]:
        """Inputs without labels for `job=predict`: the name of each row, and the rows, prepared as for evaluation.
        Their targets are ignored.

        Default: ConfigError. DataError when they cannot be read.
        """
        raise ConfigError(
            f"job.input={path}: {type(self).__name__} has no open_inputs() that reads inputs without labels; use "
            "job.split"
        )

    def summarise(self, sums: list[float]) -> dict[str, float]:
        """The values of `metrics` from summed metric state (M,). Default: weighted means."""
        return {
            name: value / sums[0] if sums[0] else float("nan")
            for name, value in zip(self.train_metrics, sums[1:], strict=True)
        }
