"""Root config keys that belong to no group, as typed nodes. Values only; see `registry.option`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from dtf.api.registry import option

# Upper ends are far beyond use: at a millisecond each, 10**12 steps take 30 years. They stop slips of the keyboard,
# which end in overflows otherwise.


EVALUATION_ROWS = 1024
"""The most rows of a micro-batch of an evaluation, where `step.micro_batch_rows` says nothing."""


@dataclass(kw_only=True)
class RunOptions:
    """Config node `run`."""

    name: str = option(default="", doc="folder under outputs/; empty: the recipe's name")
    dir: str = option(default="", doc="run folder; empty: outputs/<name>/<date-time-id>, a new one each time")
    objective: str = option(
        default="", doc="evaluation metric that decides best checkpoint and early stop; empty: the recipe's own"
    )


@dataclass(kw_only=True)
class BudgetOptions:
    """Config node `budget`."""

    hours: float | None = option(
        default=None,
        above=0,
        most=1_000_000,
        doc="wall time over all launches of the run; of a sweep: of all its trials",
        unit="h",
    )
    cost_per_hour: float | None = option(default=None, above=0, doc="price of an hour of all that the run occupies")
    cost: float | None = option(
        default=None, above=0, doc="money that the run, or the sweep, may take; needs budget.cost_per_hour"
    )


class Prune(Enum):
    """Which trials of a sweep end before their plan."""

    none = "none"
    asha = "asha"
    median = "median"


@dataclass(kw_only=True)
class SweepOptions:
    """Config node `sweep`: how the trials of `-m` are run. One value for all of them; a single run has none."""

    parallel: int = option(
        default=0,
        least=0,
        most=1024,
        doc="trials at once: on this host each with its share of the cores, or with GPUs of its own; 0: one here, and "
        "as many as a scheduler gives",
        unit="trials",
    )
    prune: Prune = option(
        default=Prune.none,
        doc="which trials stop early, saved, at a rung: `none`; `asha`: all but the best, one in sweep.factor of those "
        "that have come to it; `median`: those whose best value is worse than the median of what finished trials had "
        "on average by then",
    )
    factor: int = option(
        default=3,
        least=2,
        most=1024,
        doc="rungs of sweep.prune lie after 1/factor, 1/factor^2, ... of a trial's evaluations",
    )

    @property
    def places(self) -> int:
        """Trials at once on this host."""
        return max(1, self.parallel)

    @property
    def given(self) -> list[str]:
        """The keys that have no default value, as `sweep.parallel=2`."""
        default = SweepOptions()
        return [
            f"sweep.{field.name}={value.name if isinstance(value, Enum) else value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(default, field.name)
        ]


class Remat(Enum):
    """Kinds of activation checkpointing."""

    none = "none"
    blocks = "blocks"
    selective = "selective"


class Compile(Enum):
    """What of a model torch.compile turns into one program."""

    off = "off"
    blocks = "blocks"
    model = "model"


class MemoryFormat(Enum):
    """Where the channels of images lie in memory."""

    auto = "auto"
    channels_last = "channels_last"
    contiguous = "contiguous"


@dataclass(kw_only=True)
class StepOptions:
    """Config node `step`."""

    batch_size: int = option(default=128, least=1, most=1_000_000, doc="global batch over all ranks", unit="rows")
    micro_batch_rows: int = option(
        default=0,
        least=0,
        doc="rows per forward pass; batch statistics, dropout and accumulation act per micro-batch, so fixing it makes "
        "results independent of the number of ranks; 0: as the strategy chooses, a rank's whole share under most, and "
        "in an evaluation step.batch_size, 1024 at most",
        unit="rows",
    )
    clip_norm: float = option(default=0.0, least=0, doc="largest global L2 norm of the gradient; 0: no clipping")
    remat: Remat = option(
        default=Remat.none,
        doc="activation checkpointing, at the same numbers: what the blocks named by the recipe's layout compute again "
        "in backward: `none`, `blocks` (all, a third more arithmetic, least memory) or `selective` (all but "
        "convolutions, matrix products and collectives, a few per cent more)",
    )
    memory_format: MemoryFormat = option(
        default=MemoryFormat.auto,
        doc="where the channels of images (B, C, H, W) lie in memory, at the same shapes and checkpoints: "
        "`contiguous` puts them first; `channels_last` makes most convolutions faster; `auto`: last where the model "
        "has two-dimensional convolutions and two rows show that it gives the same numbers and is likely to gain",
    )
    compile: Compile = option(
        default=Compile.off,
        doc="what torch.compile turns into faster code, each piece without a break: nothing (`off`), the repeated "
        "blocks of the model (`blocks`: equal ones are compiled once) or its whole forward pass (`model`). The first "
        "step waits for it. Needs a C++ compiler on CPU, Triton on CUDA",
    )
    ema: float = option(
        default=0.0,
        least=0,
        below=1,
        doc="also keep an exponential moving average of the weights and of batch statistics with this decay, in the "
        "first n steps at most (1 + n) / (10 + n), and evaluate it in place of them; 0: no average",
    )

    def parts_pairs(self, micro_batch_rows: int) -> bool:
        """Whether micro-batches of so many rows separate rows 2k and 2k + 1 of a global batch."""
        return micro_batch_rows % 2 == 1 and micro_batch_rows < self.batch_size

    def rows_each(self, count: int) -> int:
        """Rows of a micro-batch: `micro_batch_rows`. Where that is 0, the number that cuts a full global batch into at
        most `count` micro-batches.
        """
        return self.micro_batch_rows or -(-self.batch_size // count)

    @property
    def evaluation_rows(self) -> int:
        """Rows of a micro-batch of an evaluation, which depend on no number of processes: `micro_batch_rows`. Where
        that is 0, a global batch, or EVALUATION_ROWS of a larger one.
        """
        return self.micro_batch_rows or min(self.batch_size, EVALUATION_ROWS)


@dataclass(kw_only=True)
class FineTuning:
    """The keys that a recipe's `model` node inherits in order to start from existing values. See
    `Recipe.fine_tuning`.
    """

    weights: str = option(
        default="",
        doc="start from these numbers: a .pth, .pt, .ckpt or .safetensors file, a checkpoint, or a run folder, which "
        "means its newest one; "
        "the last layer is drawn anew when it has another number of classes; empty: all are drawn",
    )
    freeze: list[str] = option(
        factory=list,
        doc="modules and parameters that do not learn, by name, with all that lies in them: [conv1, bn1, layer1], "
        "['layer[123]']; `*` stands for "
        "characters between two dots. Their batch normalisation keeps the running averages it has",
    )

    @property
    def shaped_by(self) -> str:
        """The config keys that the shapes of the model depend on, for people."""
        return "recipe.model"

    @property
    def older_names(self) -> tuple[tuple[str, str], ...]:
        """Regular expressions of names in files that are older than the model's code, and what they became. Default:
        none.
        """
        return ()


@dataclass(kw_only=True)
class TrainOptions:
    """Config node `train`."""

    steps: int | None = option(
        default=None,
        least=1,
        most=10**12,
        doc="length of the run; when set it decides, whatever train.epochs says",
        unit="steps",
    )
    epochs: float | None = option(
        default=None, above=0, most=1_000_000, doc="length of the run in passes over the training split", unit="epochs"
    )
    until: int | None = option(
        default=None,
        least=1,
        doc="stop here for now, saved: schedule and length stay those of the whole run, which goes on when started "
        "again",
        unit="steps",
    )
    log_every: int = option(default=20, least=0, doc="report training metrics so often; 0: never", unit="steps")
    eval_every: int | None = option(
        default=None, least=0, doc="evaluate so often; null: at each end of an epoch; 0: never", unit="steps"
    )
    eval_rows: int = option(
        default=0, least=0, doc="evaluate on so many first rows of the evaluation data; 0: on all", unit="rows"
    )
    early_stop: int = option(
        default=0, least=0, doc="stop after so many evaluations without a new best; 0: never", unit="evaluations"
    )
    guard_every: int = option(
        default=0,
        least=0,
        doc="compare replicas so often, to find a machine that changes bits: what they hold, and what each computes of "
        "the same micro-batch; 0: never",
        unit="steps",
    )
    skip_nonfinite: int = option(
        default=0,
        least=0,
        doc="updates with a non-finite loss or gradient that may be skipped before the run fails",
        unit="steps",
    )
    dry_run: bool = option(
        default=False,
        doc="try every part of this run on a few steps, in a temporary folder: fetch, step, evaluate, save, resume, "
        "predict; say of each how long it took, and leave nothing behind",
    )
    record: bool = option(
        default=False,
        doc="write evidence to record_rank_<r>.jsonl in the run folder: the sample ids each rank trains on, sums over "
        "the outputs of each module in the first step, and a digest of its parameters",
    )
    perturb: int = option(
        default=0,
        least=0,
        doc="seed by which every parameter starts one rounding away from where it would, up or down; shows what "
        "rounding does to a run, as job=verify asks; 0: not at all",
    )
