"""Train the toy recipe on a given number of ranks without a launcher: what the law tests run on warm ranks."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtf.api.lr import Schedule
from dtf.api.options import Compile, FineTuning, Remat, StepOptions
from dtf.api.recipe import Dataset
from dtf.api.registry import lookup, registered
from dtf.api.sampler import Tail
from dtf.api.sparse_table import Placement
from dtf.api.strategy import Strategy
from dtf.api.task import Task
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.options import Every
from dtf.config.settings import load_parts
from dtf.core import nest
from dtf.core.types import Measured, Place, Shard
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.splits import evaluation_loader
from dtf.distributed.world import World
from dtf.engine.clock import Plan, PlannedClock
from dtf.engine.guarded_steps import guarded_steps
from dtf.engine.loop import Loop, fit
from dtf.engine.program_check import check_program
from dtf.model import compiled_forward
from dtf.model.compiled_parts import parts_to_compile
from dtf.model.ema import with_ema
from dtf.model.forward import zero_rows_for_tables
from dtf.model.init import construct
from dtf.model.perturb import perturb
from dtf.model.pretrained import match_weights, open_weights
from dtf.runs.recorded_run import in_order
from dtf.strategies.buffers import SHARE
from dtf.strategies.pipeline import cost_model
from tests.support.checkpoints import boxes_of_others, load, rows_of_writers
from tests.support.in_process_servers import HelperThreads, KillableTransport, ask_again_soon, connect
from tests.support.known_checks import keep, known
from tests.support.lossy_network import LossyTransport
from tests.support.precisions import PRECISIONS
from tests.support.ranks import ranks
from tests.support.row_count import counting_rows
from tests.support.saves import Halt, saves
from tests.support.shapes_toy import ShapesToy  # noqa: F401 (registers itself)
from tests.support.sparse_toy import Tabled  # noqa: F401 (registers itself)
from tests.support.toy import Toy  # noqa: F401
from tests.support.varying_toy import Varying  # noqa: F401

BATCH, ROWS = 19, 42
"""Two batches of three micro-batches of five rows and one of four, and a last batch of four rows: three steps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run. By default one epoch of three steps."""

    strategy: str = "ddp"
    options: dict[str, Any] = field(default_factory=dict)
    slots: int = 0  # `launcher.processes` where it is not the number of ranks
    steps: int = 3
    save_every: int = 0
    delta_every: int = 0
    halt: bool = False  # dies after the first save
    start: str = ""  # the checkpoint to go on from
    folder: str = ""  # where to save
    at_once: str = ""  # where to write the same saves while training waits
    micro_batch_rows: int = 5
    optimizer: str = "sgd"
    precision: str = "fp64"
    tail: str = "partial"
    clip_norm: float = 1.0
    eval_every: int = 2
    log_every: int = 1
    recipe: dict[str, Any] = field(default_factory=dict)
    skip_nonfinite: int = 0
    perturb: int = 0  # as `train.perturb`
    guard_every: int = 0  # as `train.guard_every`
    plugin: str = ""
    remat: str = "none"
    channels_last: bool = False
    compile: str = "off"
    compiler: str = "aot_eager"  # quick: no machine code
    ema: float = 0.0
    freeze: list[str] = field(default_factory=list)
    weights: str = ""
    lr_factors: dict[str, float] = field(default_factory=dict)
    batch_size: int = BATCH
    lr: str = "constant"
    lr_options: dict[str, Any] = field(default_factory=dict)
    sampler: str = "shuffle"
    sampler_options: dict[str, Any] = field(default_factory=dict)
    sparse: str = "adagrad"
    sparse_options: dict[str, Any] = field(default_factory=dict)
    placements: dict[str, str] = field(default_factory=dict)  # of sparse tables, where options say tables=auto
    checked: dict[str, str] | None = None  # what an earlier check at the start has found
    network: int | None = None  # the seed of a bad one between several roles, whose faults are counted in `met`
    deaths: int | None = None  # the seed of the deaths of trainers, which are counted in `died`

    def task(self) -> Task:
        """Without a sample: see `_Run`."""
        values = {"name": "toy", "rows": ROWS, **self.recipe}
        toy = lookup("recipe", values.pop("name"))(**values)
        if self.freeze or self.weights:
            toy.model = FineTuning(weights=self.weights, freeze=self.freeze)
        step = StepOptions(
            batch_size=self.batch_size,
            micro_batch_rows=self.micro_batch_rows,
            clip_norm=self.clip_norm,
            remat=Remat(self.remat),
            ema=self.ema,
            compile=Compile(self.compile),
        )
        read = open_weights(self.weights, "weights") if self.weights else None
        weights = match_weights(read, toy, construct(toy), "weights")[0] if read is not None else None
        stepper = with_ema(lookup("optimizer", self.optimizer)(lr_factors=self.lr_factors), self.ema)
        rule = lookup("sparse", self.sparse)
        rows = rule(**_enums(rule, self.sparse_options))
        precision, last = PRECISIONS[self.precision], self.channels_last
        placed = {name: Placement(value) for name, value in self.placements.items()}
        task = Task(toy, stepper, precision, step, 0, weights=weights, rows=rows, channels_last=last, placements=placed)
        return replace(task, compiled=parts_to_compile(step.compile, toy, construct(toy)))

    def epochs(self, training: Dataset) -> Epochs:
        """The global batches of these rows."""
        sampler = lookup("sampler", self.sampler)(tail=Tail[self.tail], **self.sampler_options)
        return Epochs(sampler, len(training), self.batch_size, 0, training.groups())

    def schedule(self) -> Schedule:
        return lookup("lr", self.lr)(**{"peak": 0.1, **self.lr_options})

    def chosen(self, task: Task) -> Strategy:
        cls = lookup("strategy", self.strategy)
        return cls(**_enums(cls, self.options))


def train(rank: int, size: int, **case: Any) -> dict[str, Any]:
    """All steps of a run as one rank of it; `case`: fields of Case.

    Returns metrics by split and step, sample ids by step, and every box of the state that this rank writes: global
    shape, offset, nested lists.
    """
    torch.set_num_threads(1)
    cost_model.LEAST_ROUNDS = cost_model.MOST_ROUNDS = 1  # any cut will do
    run = _Run(rank, size, Case(**{key: value for key, value in case.items() if value is not None}))
    run.fit()
    return run.result()


def start(rank: int, size: int, **case: Any) -> dict[str, Any]:
    """As `train`, without a step: what a run starts from."""
    torch.set_num_threads(1)
    cost_model.LEAST_ROUNDS = cost_model.MOST_ROUNDS = 1
    return _Run(rank, size, Case(**{key: value for key, value in case.items() if value is not None})).result()


class _Run:
    """One rank of a run: made ready by the constructor, which is collective."""

    def __init__(self, rank: int, size: int, case: Case) -> None:
        load_parts([case.plugin] if case.plugin else [])
        self.case, self.task, compiled_forward.BACKEND = case, case.task(), case.compiler
        self.toy, self.slots = self.task.recipe, case.slots or size
        self.strategy = case.chosen(self.task)
        self.world = World(Place(rank=rank, size=size, slots=self.slots))
        self.training, self.evaluation = (self.toy.open_data(split, 0) for split in ("train", "eval"))
        self.task = replace(self.task, sample=self._sample)
        self.task.start_check.found = case.checked
        self.strategy.check(self.task, self.slots, "cpu")
        self.several_roles = len(self.strategy.roles(1)) > 1
        self.networks: list[LossyTransport] = []
        if case.network is not None or case.deaths is not None:
            ask_again_soon()
        if self.several_roles:
            # of a region's request the second one is refused, and handlers have to bear it
            connect(self._between, 0 if case.network is None or case.network % 2 else 1 << 30)
        self.program = check_program(self.strategy.setup(self.task, self.world), case.strategy, self.world)
        self.epochs = case.epochs(self.training)
        # those that compute ask the others for rows
        self.helpers = self._run_helpers() if next(iter(self.strategy.roles(1))) == "trainer" else None
        self.loader = self._rows("train", self.program.shard, self.program.micro_batch_rows)
        self.program.warmup(self.program.prepare(self._first_rows()))
        if case.eval_every and (self.task.start_check.fresh or self.task.compiled):
            rows = evaluation_loader(self.evaluation, Shard(0, 1), 4).rows(np.arange(min(4, len(self.evaluation))), 0)
            self.program.trial_eval(self.program.prepare(None if self.program.shard is None else rows))
        self.clock_state, self.open_window = self._load()
        for copy in self.program.replicated() if case.perturb else ():
            perturb(copy, case.perturb)
        self.world.barrier()  # all servers can be found
        self.helpers = self.helpers or self._run_helpers()
        self.found: dict[str, Any] = {"train": {}, "eval": {}, "ids": {}, "tensors": {}}
        self.noted: list[str] = []  # what a guard told
        self.found["micro_batch_rows"] = self.program.micro_batch_rows

    def _first_rows(self) -> Any:
        last = self.epochs.batches - 1  # the same on all ranks
        if self.program.shard is None:
            nest.know_classes(self.training.fetch(np.arange(1), 0))  # as the check of first rows does
            return None
        ids = self.epochs.ids(0, last if self.epochs.size(last) == 1 else 0)
        return self._rows("train", Shard(0, 1), self.case.batch_size).rows(ids[:8], 0)

    def _sample(self, rows: int) -> Any:
        fetched = self.training.fetch(np.arange(rows) % len(self.training), 0)[0]
        return zero_rows_for_tables(self.toy.receive(fetched), self.toy.tables())

    def _between(self, client: Any) -> Any:
        """What stands between a trainer and a server."""
        if self.case.network is not None:
            client = LossyTransport(client, seed=self.case.network + 1000 * len(self.networks))
            self.networks.append(client)
        return client if self.case.deaths is None else KillableTransport(client)

    def _rows(self, split: str, shard: Shard | None, micro_batch_rows: int, count: int = 0) -> Loader:
        if split == "train":
            return Loader(self.training, self.epochs, shard, micro_batch_rows)
        return evaluation_loader(self.evaluation, shard, micro_batch_rows, count)

    def _run_helpers(self) -> HelperThreads | None:
        if not self.several_roles or self.world.rank:
            return None
        return HelperThreads(self.strategy, self.task, self.slots, self._rows, self.program, self.case.deaths)

    def _saver(self, folder: str, resume: str = "auto") -> Checkpointer:
        options = Every(resume=resume, delta_every=self.case.delta_every or None)
        return Checkpointer(Path(folder), options, self.world, "test", self.toy.objective, self.case.strategy)

    def _load(self) -> tuple[Any, Any]:
        """The clock's state and the open metric window of the checkpoint to go on from."""
        if not self.case.start:
            return None, None
        reader = self._saver(self.case.start, self.case.start)
        source = reader.load(reader.find(0) or Path())
        state, window, source.scalars = source.scalars["clock"], source.scalars["window"], source.scalars["program"]
        load(self.program, source, self.world, self.toy.tables())
        return state, window

    def _see(self, event: Any) -> None:
        if isinstance(event, Measured):
            values = {key: value for key, value in event.values.items() if key != "rows_per_s"}
            self.found[event.split][str(event.step)] = values

    def _record(self, step: int, ids: np.ndarray) -> None:
        self.found["ids"].setdefault(str(step), []).extend(i for i in ids.tolist() if i >= 0)

    def fit(self) -> None:
        """Step to the end, or to the first save where the case halts there. Collective."""
        case, goal = self.case, self.toy.objective
        plan = Plan(case.steps, case.log_every, case.eval_every, case.save_every, case.delta_every, objective=goal)
        loop = Loop(
            program=self.program,
            clock=PlannedClock(plan, self.epochs, case.schedule(), self.clock_state),
            train=self.loader,
            evaluation=self._rows(
                "eval", self.program.shard, self.task.step.evaluation_rows, self.program.evaluation_micro_batches
            ),
            evaluation_rows=len(self.evaluation),
            recipe=counting_rows(self.toy),
            world=self.world,
            saver=saves(self._saver, self.world, case.folder, case.at_once, case.halt),
            see=self._see,
            scalars={},
            steps_per_epoch=self.epochs.batches,
            skip_nonfinite=case.skip_nonfinite,
            record=self._record,
            carried=self.open_window,
            averages=bool(case.ema),
            guard=guarded_steps(self.program, case.guard_every, 0, None, self.noted.append),
        )
        with suppress(Halt):
            fit(loop)

    def result(self) -> dict[str, Any]:
        """What `train` returns. Collective."""
        self.program.sync()
        state = self.program.state()
        for box in [*state.boxes, *boxes_of_others(state, self.task)]:
            values = (box.tensor if box.tensor.dtype is torch.int64 else box.tensor.double()).tolist()
            self.found["tensors"].setdefault(box.name, []).append([list(box.shape), list(box.offset), values])
        self.program.leased.end()
        self.found |= {"start_check": self.task.start_check.found, "row_flops": self.program.row_flops}
        if self.helpers:
            self.helpers.join()
            met = sum((network.met for network in self.networks), Counter())
            self.found |= {"met": met, "died": self.helpers.died}
        return self.found


def _enums(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Option texts as the class's enum members."""
    defaults = cls()
    return {
        key: type(default)(value) if isinstance(default := getattr(defaults, key), Enum) else value
        for key, value in options.items()
    }


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Every registered strategy with its defaults, and the options that change how numbers are made."""
    load_parts([])
    extra = [
        ("dp", {"reduce": "all"}),
        ("ddp", {"static_graph": True, "bucket_mb": 0.0001}),
        ("fsdp", {"unit": "layer", "reshard_after_forward": False, "prefetch": 0}),
        ("pipeline", {"schedule": "gpipe", "balance": "flops"}),
        ("pserver", {"servers": 2, "min_block": 1}),
    ]
    # tests register faulty ones
    own = [name for name, cls in registered("strategy").items() if cls.__module__.startswith("dtf.")]
    return [(name, {}) for name in own] + extra


def meshes() -> list[tuple[str, dict[str, Any]]]:
    """Combinations of a strategy with data parallelism, for even numbers of processes."""
    return [
        ("fsdp", {"replicate": 2}),
        ("fsdp", {"replicate": 2, "unit": "stage"}),
        ("tensor", {"degree": 2}),
        ("pipeline", {"degree": 2}),
    ]


def spread(strategy: str, processes: int, **case: Any) -> dict[str, Any]:
    """`train` on the ranks that the strategy starts for `processes`; metrics of rank 0, ids and tensors of all.

    `call`: another function than `train`.
    """
    call = case.pop("call", "train")
    call = call if ":" in call else f"{__name__}:{call}"
    chosen = lookup("strategy", strategy)
    size = next(iter(chosen(**_enums(chosen, case.get("options") or {})).roles(processes).values()))
    case = {"checked": known(strategy, case), **case}
    calm = not case.keys() & {"network", "deaths"}  # late requests and dead trainers leave threads behind
    results = ranks(size, call, shared=calm, strategy=strategy, slots=processes, **case)
    keep(strategy, case, results[0]["start_check"])
    merged = _whole(results)
    for other in results[1:]:
        for step, ids in other["ids"].items():
            merged["ids"][step] = merged["ids"][step] + ids
    return merged


def _whole(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rank's result with every tensor put together from all ranks' boxes, each element exactly once."""
    parts: dict[str, list[Any]] = {}
    for result in results:
        for name, boxes in result["tensors"].items():
            parts.setdefault(name, []).extend(boxes)
    tensors = rows_of_writers(parts)
    for name, boxes in parts.items():
        whole, times = np.zeros(boxes[0][0], np.int64 if name.endswith("/ids") else np.float64), np.zeros(boxes[0][0])
        for _, offset, value in boxes:
            place = tuple(slice(at, at + size) for at, size in zip(offset, np.shape(value), strict=True))
            whole[place] = value
            times[place] += 1
        assert (times == 1).all(), name
        tensors[name] = whole
    return results[0] | {"tensors": {name: tensor.tolist() for name, tensor in in_order(tensors).items()}}


@lru_cache(maxsize=32)
def _reference(case: str) -> dict[str, Any]:
    return _whole(ranks(1, "tests.support.harness:train", shared=True, **json.loads(case)))


def reference(**case: Any) -> dict[str, Any]:
    """The one-process run that all others must equal; made once in the session."""
    return dict(_reference(json.dumps(case, sort_keys=True)))


def difference(a: dict[str, Any], b: dict[str, Any], without: tuple[str, ...] = ()) -> float:
    """Largest max|a - b| / max|a| over metrics and tensors but those named `without`; the same names, sample ids and
    model FLOPs are asserted.
    """
    assert a["ids"] == b["ids"]
    assert a["row_flops"] == b["row_flops"] != 0
    names, others = ({name for name in run["tensors"] if not name.startswith((SHARE, *without))} for run in (a, b))
    assert names == others
    pairs = [(a["tensors"][name], b["tensors"][name]) for name in names]
    for split in ("train", "eval"):
        assert a[split].keys() == b[split].keys()
        pairs += [(list(a[split][step].values()), list(b[split][step].values())) for step in a[split]]
    assert all(np.shape(x) == np.shape(y) for x, y in pairs)
    # NaN stays NaN
    return float(
        np.max(
            [np.abs(np.asarray(x) - np.asarray(y)).max() / max(np.abs(x).max(), 1e-30) for x, y in pairs if np.size(x)]
        )
    )
