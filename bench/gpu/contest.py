"""dtf's engine and a loop written by hand take turns over the same rows, on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from bench.endless import Endless
from bench.gpu import device
from bench.medians import interval
from dtf.api.optimizer import Optimizer
from dtf.api.options import Compile, MemoryFormat, StepOptions
from dtf.api.precision import Cast, Format, Precision, set_switches
from dtf.api.recipe import Recipe
from dtf.api.task import Task
from dtf.core.types import Batch, Place, Ticket, Train
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.engine.loop import Loop, fit
from dtf.model.init import init_model
from dtf.strategies.ddp import Ddp

LR = 0.01
STEP = "step of dtf"
NO_IDS = np.empty(0, np.int64)
BF16 = Precision(compute=Format.bf16, cast=Cast.autocast)


@dataclass(frozen=True)
class Case:
    """What both train. `hand`: the optimizer of torch that does what `optimizer` does."""

    recipe: Recipe
    batch: int
    optimizer: Optimizer
    hand: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    channels_last: bool = False
    bf16: bool = True
    compiled: bool = False

    def task(self) -> Task:
        """With what a run chooses: the format of memory, and for step.compile=model the model itself."""
        format = MemoryFormat.channels_last if self.channels_last else MemoryFormat.auto
        compile = Compile.model if self.compiled else Compile.off
        step = StepOptions(batch_size=self.batch, memory_format=format, compile=compile)
        parts = ("",) if self.compiled else ()
        return Task(
            self.recipe, self.optimizer, self.precision, step, 0, channels_last=self.channels_last, compiled=parts
        )

    @property
    def precision(self) -> Precision:
        return BF16 if self.bf16 else Precision()


class Clock(Endless):
    """Knows where steps begin and end: reports, polls and the end of a turn may wait for the device, steps may not."""

    forbids = False
    """Whether torch raises where a step waits."""

    marks = False
    """Whether steps are sections of a trace, named STEP."""

    _section: Any = None

    def __next__(self) -> Ticket:
        if self._section is not None:
            self._section.__exit__(None, None, None)
            self._section = None
        ticket = super().__next__()
        steps = isinstance(ticket, Train)
        device.forbid_waits(self.forbids and steps)
        if self.marks and steps:
            self._section = record_function(STEP)
            self._section.__enter__()
        return ticket


@dataclass
class Engine:
    """dtf trains. `run(steps)` goes on where it was."""

    case: Case
    place: str
    program: Any = field(init=False)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        world = World(Place(device=self.place))
        data = self.case.recipe.open_data("train", 0)
        self.program = Ddp().setup(self.case.task(), world)
        epochs = Epochs(Sequential(), len(data), self.case.batch, 0)
        self.clock = Clock(epochs, LR, logs=True)
        pin = world.device.type == "cuda"
        loader = Loader(data, epochs, self.program.shard, self.program.micro_batch_rows, pin)
        self.losses: list[float] = []
        recipe = self.case.recipe
        see = self._see
        self.loop = Loop(self.program, self.clock, loader, loader, 0, recipe, world, None, see, {}, epochs.batches)

    def _see(self, event: Any) -> None:
        if hasattr(event, "values"):
            self.losses.append(event.values["loss"])

    def run(self, steps: int) -> None:
        set_switches(self.case.precision)  # deterministic kernels of cuDNN, as in each run of dtf
        self.clock.turn(steps)
        fit(self.loop)

    @property
    def loss(self) -> float:
        """Mean over the steps of the last turn."""
        return self.losses[-1]


class Reader:
    """Batches of a data set on the device, as one writes it by hand: read and pinned ahead in threads."""

    def __init__(self, case: Case, place: str, ahead: int = 3) -> None:
        self._data, self._batch, self._place = case.recipe.open_data("train", 0), case.batch, place
        self._pin = place.startswith("cuda")
        self._threads = ThreadPoolExecutor(self._data.threads)
        self._next, self._pending = 0, list[Future]()
        for _ in range(ahead):
            self._ask()

    def _ask(self) -> None:
        first = self._next * self._batch % len(self._data)
        self._pending.append(self._threads.submit(self._read, np.arange(first, first + self._batch)))
        self._next += 1

    def _read(self, rows: np.ndarray) -> tuple[Any, Tensor]:
        inputs, targets = self._data.fetch(rows, 0)
        if not self._pin:
            return inputs, targets
        inputs = {k: v.pin_memory() for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.pin_memory()
        return inputs, targets.pin_memory()

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        while True:
            inputs, targets = self._pending.pop(0).result()
            self._ask()
            yield moved(inputs, self._place), targets.to(self._place, non_blocking=True)


def moved(inputs: Any, place: str) -> Any:
    if isinstance(inputs, dict):
        return {name: tensor.to(place, non_blocking=True) for name, tensor in inputs.items()}
    return inputs.to(place, non_blocking=True)


class Hand:
    """The same as people write it: loss, metrics, gradient norm, torch's fused optimizer.

    cuDNN chooses among all its kernels, as is torch's default. `benchmark`: it tries them at first use.
    """

    def __init__(self, case: Case, place: str, compiled: bool = False, benchmark: bool = False) -> None:
        self.benchmark = benchmark
        model = init_model(case.recipe, 0)
        self.model = (model.to(memory_format=torch.channels_last) if case.channels_last else model).to(place).train()
        self.forward: Any = torch.compile(self.model) if compiled else self.model
        self.parameters = list(self.model.parameters())
        self.case, self.place, self.optimizer = case, place, case.hand(self.parameters)
        self.sums = torch.zeros(1 + len(case.recipe.train_metrics), dtype=torch.float64, device=place)
        self.norm = torch.zeros((), device=place)
        self.weight = torch.ones(case.batch, device=place)
        self.batches = iter(Reader(case, place))

    def gradients(self, inputs: Any, targets: Tensor) -> None:
        """Forward and backward; the metrics are added up, as the recipe computes them."""
        recipe = self.case.recipe
        autocast = torch.autocast(self.place.partition(":")[0], torch.bfloat16, cache_enabled=False)
        with autocast if self.case.bf16 else nullcontext():
            outputs = self.forward(recipe.receive(inputs))
        outputs = outputs.float()
        losses = recipe.loss(outputs, targets)
        losses.mean().backward()
        with torch.no_grad():
            batch = Batch(inputs, targets, self.weight, NO_IDS)
            self.sums.add_(recipe.measure(outputs.detach(), batch, losses.detach()))

    def step(self, inputs: Any, targets: Tensor) -> None:
        self.gradients(inputs, targets)
        self.norm = self.norm + nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int) -> None:
        device.choose_kernels(self.benchmark)
        self.sums.zero_()
        for _ in range(steps):
            self.step(*next(self.batches))

    @property
    def loss(self) -> float:
        rows, total, *_ = self.sums.tolist()
        return total / rows


class Graphed(Hand):
    """The fewest kernels, the fastest ones, launched as one CUDA graph: what is left to win. Copies its rows into the
    graph's."""

    def __init__(self, case: Case, place: str) -> None:
        super().__init__(case, place, benchmark=True)
        inputs, targets = next(self.batches)
        self._inputs, self._targets = clone(inputs), targets.clone()

        def step() -> None:
            self.optimizer.zero_grad()
            self.gradients(self._inputs, self._targets)
            self.optimizer.step()

        device.choose_kernels(self.benchmark)
        self._replay = device.captured(step)

    def step(self, inputs: Any, targets: Tensor) -> None:
        fill(self._inputs, inputs)
        self._targets.copy_(targets, non_blocking=True)
        self._replay()


def clone(inputs: Any) -> Any:
    return {name: tensor.clone() for name, tensor in inputs.items()} if isinstance(inputs, dict) else inputs.clone()


def fill(into: Any, inputs: Any) -> None:
    if isinstance(into, dict):
        for name, tensor in into.items():
            tensor.copy_(inputs[name], non_blocking=True)
    else:
        into.copy_(inputs, non_blocking=True)


@dataclass(frozen=True)
class Outcome:
    """Seconds a step of each contestant, round by round."""

    seconds: dict[str, list[float]]
    losses: dict[str, float]  # of the first round: later ones differ by what rounding has grown to

    def ratios(self, one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[one], self.seconds[other], strict=True)]

    def text(self, one: str, other: str) -> str:
        """Median of the ratios, with its 95 % interval."""
        ratios = self.ratios(one, other)
        return f"{median(ratios):.3f} ({interval_text(ratios)})"


def interval_text(values: list[float]) -> str:
    """As `interval`, with three digits."""
    ends = interval([1e6 * value for value in values]).split(" to ")
    return " to ".join(f"{float(end) / 1e6:.3f}" for end in ends)


def contest(runs: dict[str, Any], steps: int, rounds: int, left_s: Callable[[], float], warmup: int = 5) -> Outcome:
    """All take turns of `steps` steps, in an order drawn for each round, until `rounds` or until the time is up."""
    order, seconds, names = random.Random(0), {name: [] for name in runs}, list(runs)
    for run in runs.values():
        run.run(warmup)
    number, longest, losses = 0, 0.0, {}
    while number < rounds and (number < 3 or left_s() > 2 * longest):
        order.shuffle(names)
        took = {name: device.timed(lambda name=name: runs[name].run(steps)) for name in names}
        for name, value in took.items():
            seconds[name].append(value / steps)
        losses = losses or {name: run.loss for name, run in runs.items()}
        number, longest = number + 1, max(longest, sum(took.values()))
    return Outcome(seconds, losses)
