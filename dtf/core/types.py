"""Values that pass between parts: shards, tickets, batches, events. They have no behaviour and need no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from torch import Tensor


class Shard(NamedTuple):
    """Share `index` of `count` equal shares of a global batch."""

    index: int
    count: int


WHOLE = Shard(0, 1)


# ---------------------------------------------------------------- tickets: what a clock asks for next


@dataclass(frozen=True, slots=True)
class Train:
    """One optimizer step over one global batch. `step` is the number of steps finished before it, and the idempotency
    key.
    """

    step: int
    epoch: int
    index: int  # of the global batch within the epoch
    rows: int  # in the global batch, over all ranks
    lr: float


@dataclass(frozen=True, slots=True)
class Log:
    """Reduce and report the metrics since the last Log. `step`: how many optimizer steps are finished, here and
    below.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Poll:
    """Ask all ranks whether any of them got a signal to stop, whether the budget is spent, how much time is left, how
    long steps take, and which rows could not be read.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the whole evaluation split, each row once."""

    step: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint: whole, or with only the rows of tables that changed since the last one."""

    step: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run. `reason`: `finished`, `stopped` (at train.until), `early_stop`, `preempted`, `time_limit` or
    `budget`.
    """

    step: int
    reason: str


Ticket = Train | Log | Poll | Evaluate | Save | Stop

# ---------------------------------------------------------------- data


class Batch(NamedTuple):
    """The rows that one rank works on. B: how many there are, with padding."""

    inputs: Any  # a tensor (B, ...), or dicts, lists and tuples of such, see `core.nest`
    targets: Any  # the same; most often one tensor
    weight: Tensor  # (B,) 1 for a real row, 0 for padding
    ids: np.ndarray  # (B,) int64 sample ids, -1 for padding


class Names(Protocol):
    """Names by number, like those of a list. They may be made when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> str: ...


class StepOutput(NamedTuple):
    """The result of one optimizer step, on the device, without host synchronisation."""

    sums: Tensor  # (M,) additive metric state; zeros on a rank that owns no outputs
    # (global norm before clipping, 1) on one rank; (0, 0) on the others, and on all when an overflow hid it: a tensor
    # (2,), or two numbers where the host has them
    grad_norm: Tensor | tuple[float, float]


class Evaluated(NamedTuple):
    """The result of one batch of an evaluation, on the device."""

    sums: Tensor  # (M,) additive metric state; zeros on a rank that owns no outputs
    # (R, K) as Recipe.eval_outputs gives them, of rows that no other rank reports; None: there are none
    rows: Tensor | None


class Box(NamedTuple):
    """An axis-aligned part of a named global tensor. Checkpoints consist of boxes."""

    name: str  # "model/conv1.weight", "optimizer/conv1.weight/momentum"
    tensor: Tensor  # the local part
    shape: tuple[int, ...]  # of the global tensor
    offset: tuple[int, ...]  # of the local part in it
    layer: int | None = None
    """Of rows of sparse tables that later checkpoints may take over: 0 for all rows, n for those that changed since
    layer n - 1 was saved, whose memory is nobody else's. None: whole in each checkpoint.
    """


class State(NamedTuple):
    """What a program contributes to a checkpoint on this rank: the boxes that it owns, and JSON scalars, of which those
    of rank 0 are saved.
    """

    boxes: list[Box]
    scalars: dict[str, Any]
    others: Callable[[], Callable[[Path], list[dict[str, Any]]]] | None = None
    """Let processes that work for this rank set their boxes aside as they are now. What it returns, another thread may
    call later: it has them write these into a checkpoint's folder, and returns what they wrote, see
    `boxes.write_boxes`.
    """

    private: bool = False
    """Whether nothing that another rank does, or lets others do, changes what this rank still copies. Else a barrier
    follows the copy. All ranks alike.
    """


# ---------------------------------------------------------------- events: what observers see


SPEEDS = ("rows_per_s", "model_flops_per_s", "mfu", "read_rows_per_s", "queue_batches", "stalled")
"""Values of a measurement that tell how fast training was: those of two equal runs differ."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Metrics of a stretch of training, or of an evaluation. `split`: `train` or `eval`.

    `values`: metric name -> value over all ranks. Training adds `lr`, `grad_norm` and `rows_per_s`, where
    they are known `model_flops_per_s` and `mfu` (a share of 1), and rank 0 its `Loader.reading`.
    """

    split: str
    step: int
    epoch: float
    seconds: float  # since the ranks started this attempt
    values: dict[str, float]
    best: bool = False  # an evaluation with the best value of the objective so far


@dataclass(frozen=True, slots=True)
class Started:
    """The ranks are ready. `step`: where they start, 0 or the step of the checkpoint that they resume from."""

    step: int
    total: int  # optimizer steps of the whole run
    steps_per_epoch: int
    table: dict[str, Any]  # what the start-up table shows: name -> text or number
    attempt: int = 0
    # the last ones up to `step`, of this run: an observer killed with its launcher may not have heard them
    recent: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """The ranks, which were started again, have done their first step.

    `marks`: what rank 0 had done -> when, by time.monotonic(): `started`, `met`, `built`, `loaded`, `stepped`.
    """

    marks: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written, in so many seconds. `best`: the objective is the best so far."""

    step: int
    path: str
    best: bool
    seconds: float
    held: float = 0.0  # of these, how long training stood still; the rest was written in the background


@dataclass(frozen=True, slots=True)
class Note:
    """Something for people to read, such as a restart or a skipped step. `level`: `info` or `warning`."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank failed. `exit`: its exit code. `rank`: None where no single rank is known to be at fault."""

    rank: int | None
    step: int
    exit: int
    message: str
    traceback: str
    patient: bool = False  # it has already waited long for what it misses, so that a restart is of no use
    by_author: bool = False  # code of a recipe or a model raised it, as the first exception of the traceback
    error: str = ""  # the name of its class


@dataclass(frozen=True, slots=True)
class Ended:
    """The ranks have ended. `values`: those of the last evaluation, `best_<objective>` and `best_step`."""

    step: int
    reason: str  # as in Stop
    values: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(
        default_factory=dict
    )  # bytes `planned` and, at the peak, `resident` or `allocated` (on CUDA), of the `rank` with the highest peak
    guarded: int = 0  # steps of this attempt at which replicas were compared, see `train.guard_every`: nothing differed


@dataclass(frozen=True, slots=True)
class Tried:
    """A part of a dry run worked, or `failed`. `text`: what there is to say of it."""

    part: str
    seconds: float
    text: str = ""
    failed: bool = False


Event = Started | Stepped | Measured | Saved | Note | Failed | Ended | Tried
_EVENTS = {cls.__name__: cls for cls in (Started, Stepped, Measured, Saved, Note, Failed, Ended, Tried)}


def event_to_json(event: Event) -> dict[str, Any]:
    """An event as a JSON object, with the class name under `event`. Non-finite floats stay floats (Python's json writes
    NaN).
    """
    return {"event": type(event).__name__, **asdict(event)}


def event_from_json(data: dict[str, Any]) -> Event:
    """The inverse of `event_to_json`. KeyError for an unknown event name."""
    fields = dict(data)
    kind = _EVENTS[fields.pop("event")]
    if kind is Started:
        fields["recent"] = tuple(Measured(**measured) for measured in fields.get("recent", ()))
    return kind(**fields)


@dataclass(frozen=True, slots=True)
class ManualStart:
    """How a process finds the others that was started by a command of its own (`launcher=manual`). Plain values."""

    endpoints: tuple[str, ...] = ()  # "host:port" where each process of the role that runs the engine listens, in order
    timeout_s: float = 600.0  # how long to wait for the others, at first and after they were lost
    tls: dict[str, str] = field(default_factory=dict)  # paths of `ca`, `cert` and `key` in PEM; empty without TLS
    mutual_tls: bool = False  # processes that ask show a certificate too
    allow_insecure: bool = False  # what passes beyond this host may be unencrypted


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank is: its number, device, role and rendezvous address. Plain values, so that it can be sent as
    JSON.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    role: str = "trainer"
    number: int = 0  # among the processes of its role
    slots: int = 1  # `launcher.processes`: how far to spread; equals size but for strategies that use threads
    device: str = "cpu"  # "cpu" or "cuda:<index>"
    devices: tuple[str, ...] = ()  # of all slots, for a process that spreads over several
    threads: int = 1  # intra-op threads of this rank
    # where ranks find each other: "host:port" of a TCPStore, or an open file that ranks of one host inherited
    store: str = ""
    prefix: str = ""  # "<run id>/<attempt>": keys of an earlier attempt are never met
    attempt: int = 0
    retry: int = 0  # how often this process alone was started again within the attempt
    # of the run, a secret: travels through inherited descriptors only; "" where there is one role
    token: str = field(default="", repr=False)
    hang_timeout_s: float = 60.0  # silence that means that another process hangs
    start_timeout_s: float = 600.0  # the same while it starts
    grace_s: float = 25.0  # from a signal to stop until this process is killed
    deadline: float = math.inf  # when it is killed in any case, in seconds since 1970, see `dtf.host.deadline`
    manual: ManualStart | None = None  # where a command of its own started this process

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Place:
        """The inverse of `dataclasses.asdict`, also after its result went through JSON."""
        manual = values.get("manual")
        if manual is not None:
            manual = ManualStart(**{**manual, "endpoints": tuple(manual["endpoints"])})
        return cls(**{**values, "devices": tuple(values["devices"]), "manual": manual})

    @property
    def launch_id(self) -> str:
        """The command that started this process, the same in all attempts of its launcher."""
        return self.prefix.partition("/")[0]


class Memory(NamedTuple):
    """Bytes that a rank needs. All but `activations` are needed throughout training; `activations` are needed for one
    micro-batch, or for as many as are in progress at once.
    """

    parameters: int  # master copies and buffers included
    gradients: int
    optimizer: int
    activations: int
    # what is on its way to or from other ranks: gathered parameters, copies of gradients; or gradients of a trial pass,
    # beside those that a wrapper sums
    exchange: int = 0
    # of sparse tables: rows with their state, and the index of ids, whose whole range is reserved and taken as it is
    # used
    tables: int = 0
    copies: int = 0  # of the state, for saves that a thread writes; without those that lie beside a GPU's memory


TRACE_PREFIX = "dtf:"
"""The prefix of section names in a trace, which tells them from those of other programs."""


class Batches(Protocol):
    """The rows of this rank by global batch. See `dtf.data.loader.Loader`."""

    batches: int
    prefetch: int

    @property
    def allowed(self) -> int: ...  # rows of an epoch that all ranks together may fail to read

    def size(self, index: int) -> int: ...  # rows of a global batch of any epoch
    def bad(self, epoch: int) -> int: ...  # rows of it that this rank could not read so far

    def reading(self) -> dict[str, float]: ...  # how it went since the last call, where that is of interest

    def get(self, epoch: int, index: int) -> Batch | None: ...
    def rows(self, ids: np.ndarray, epoch: int) -> Batch: ...  # any ones, in this order
    def batch_ids(self, epoch: int, index: int) -> np.ndarray: ...  # of all ranks
    def ahead(self, keys: list[tuple[int, int]]) -> None: ...
