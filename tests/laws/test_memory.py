"""How much memory a run says it needs, and what it then takes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console as Terminal
from torch import Tensor, nn

from dtf.api.layout import Layout, Split
from dtf.api.options import Remat, StepOptions
from dtf.api.precision import Precision
from dtf.api.registry import lookup, register
from dtf.api.task import Task
from dtf.config.settings import load_parts
from dtf.core.text import bytes_text, memory_text
from dtf.core.types import WHOLE, Ended, Memory, Place, Started, Train
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.ema import with_ema
from dtf.model.init import init_model
from dtf.model.memory import Footprint, MemoryMeter, activations, table_row, unsummed_grad_bytes
from dtf.model.seeded_dropout import SeededDropout
from dtf.observers.terminal import TerminalView
from dtf.recipes.resnet.options import ModelOptions
from dtf.recipes.resnet.recipe import ResnetShapes
from dtf.strategies.start_check import take_size
from tests.conftest import Result
from tests.support.harness import _enums
from tests.support.ranks import ranks
from tests.support.toy import Toy

ROWS = 64


def resnet(remat: Remat = Remat.none) -> nn.Module:
    recipe = ResnetShapes(model=ModelOptions(arch="resnet8", classes=8))
    model = init_model(recipe, 0)
    names = modules_to_checkpoint(recipe, model, recipe.layout(model), remat)
    apply_activation_checkpointing(model, names, remat, SeededDropout(model, 0, torch.device("cpu")))
    return model


def footprint(model: nn.Module, rows: int) -> Footprint:
    x = torch.zeros(rows, 3, 16, 16)
    model.zero_grad()
    with Footprint() as found:
        model(x).square().sum().backward()
    return found


@pytest.mark.parametrize("remat", Remat)
def test_a_full_micro_batch_is_told_from_few_rows(remat: Remat) -> None:
    model = resnet(remat)
    few, more, full = (footprint(model, rows) for rows in (2, 4, 32))
    assert activations([(2, few), (4, more)], 32) == full.saved_bytes + full.recomputed_bytes
    # one size only: all grows with the rows
    assert activations([(2, few), (2, few)], 32) == pytest.approx(full.saved_bytes + full.recomputed_bytes, rel=0.01)


def test_what_is_kept_is_what_autograd_saves() -> None:
    """Neither parameters nor gradients, nor what was there before."""
    model, x = resnet(), torch.zeros(8, 3, 16, 16)
    before = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in before:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        total = model(x).square().sum()
    assert abs(footprint(model, 8).saved_bytes - sum(saved.values())) <= 64  # the loss itself
    total.backward()


def test_gradients_of_trial_passes_count_where_a_step_has_no_more_activations() -> None:
    trials = [(rows, footprint(resnet(), rows)) for rows in (2, 4)]
    size = activations(trials, 34)
    assert unsummed_grad_bytes([size - 8, 8], trials, 2) == size
    assert unsummed_grad_bytes([size - 8, 8], trials, 32) == activations(trials, 34 - 32 + 4)


@register("recipe", "wide")
class Wide(Toy):
    """Fifty million parameters: what they need is far above what libraries take."""

    def build_model(self) -> nn.Module:
        layers = [layer for a, b in pairwise([8, 5000, 5000, 5000, 4]) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def layout(self, model: nn.Module) -> Layout:
        names = [name for name, layer in model.named_children() if [*layer.parameters()]]
        return Layout(
            tuple((name,) for name in names), dict(zip(names, cycle([Split.column, Split.row]), strict=False))
        )


def made(
    recipe: Any,
    rank: int,
    size: int,
    strategy: str,
    optimizer: str,
    options: dict[str, Any],
    rows: int,
    micro: int,
    ema: float = 0.0,
) -> tuple[Any, Any]:
    """A program after its warmup, and a batch of so many rows."""
    torch.set_num_threads(1)
    data = recipe.open_data("train", 0)
    step = StepOptions(batch_size=rows, micro_batch_rows=micro, ema=ema)
    task = Task(
        recipe,
        with_ema(lookup("optimizer", optimizer)(), ema),
        Precision(),
        step,
        0,
        sample=lambda count: data.fetch(np.arange(count), 0)[0],
    )
    program = lookup("strategy", strategy)(**_enums(lookup("strategy", strategy), options)).setup(
        task, World(Place(rank=rank, size=size, slots=size))
    )
    epochs = Epochs(Sequential(), rows, rows, 0)
    first = None if program.shard is None else Loader(data, epochs, WHOLE, rows).rows(np.arange(8), 0)
    program.warmup(program.prepare(first))  # the same rows on all ranks
    return program, program.prepare(Loader(data, epochs, program.shard, program.micro_batch_rows).get(0, 0))


def take(
    rank: int, size: int, strategy: str, optimizer: str, options: dict[str, Any], micro: int, ema: float = 0.0
) -> dict[str, int]:
    """Two steps and an evaluation; planned bytes by kind, and the peak."""
    load_parts([])
    meter = MemoryMeter("cpu")
    program, batch = made(Wide(rows=ROWS), rank, size, strategy, optimizer, options, ROWS, micro, ema)
    for step in range(2):
        program.step(Train(step, 0, 0, ROWS, 0.1), batch)
    program.sync()
    for on in (True, False) if ema else ():
        program.swap_ema(on)
    planned = program.memory()
    assert planned is not None
    return {**planned._asdict(), "peak": meter.peak()}


CASES = [
    ("ddp", 1, "adamw", {}, 0),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("ddp", 1, "adamw", {}, 16),
            ("ddp", 2, "adamw", {}, 0),
            ("ddp", 2, "sgd", {}, 16),
            ("ddp", 2, "sgd", {}, 8),
            ("ddp", 2, "adamw", {"shard_optimizer": True}, 0),
            ("dp", 2, "adamw", {"replicas": 2}, 0),
            ("fsdp", 2, "adamw", {}, 0),
            ("fsdp", 2, "adamw", {"reshard_after_forward": False}, 0),
            ("fsdp", 2, "sgd", {}, 8),
            ("tensor", 2, "adamw", {}, 0),
            ("tensor", 2, "sgd", {}, 8),
            ("pipeline", 2, "adamw", {"balance": "flops"}, 0),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "processes", "optimizer", "options", "micro"), CASES, ids=str)
def test_the_plan_is_near_the_peak(
    strategy: str, processes: int, optimizer: str, options: dict[str, Any], micro: int
) -> None:
    """`micro`: rows of a micro-batch; gradients that add up wait somewhere."""
    load_parts([])
    count = lookup("strategy", strategy)().roles(processes)["trainer"]
    for found in ranks(
        count,
        "tests.laws.test_memory:take",
        timeout_s=300.0,
        strategy=strategy,
        optimizer=optimizer,
        options=options,
        micro=micro,
    ):
        peak = found.pop("peak")
        assert sum(found.values()) == pytest.approx(peak, rel=0.25)
        assert peak < sum(found.values()) + 110e6  # libraries


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_averages_of_the_weights_need_no_more_than_the_optimizer_state_says(strategy: str) -> None:
    """Neither to keep them nor to evaluate them: a second copy, 100 MB on each of two ranks even if only for a moment,
    would show beside the libraries.
    """
    load_parts([])
    for found in ranks(
        2, "tests.laws.test_memory:take", strategy=strategy, optimizer="sgd", options={}, micro=0, ema=0.9
    ):
        peak = found.pop("peak")
        assert peak < sum(found.values()) + 110e6


@register("recipe", "tall")
class Tall(Toy):
    """So many rows beside its parameters that activations are nearly all it needs."""

    def build_model(self) -> nn.Module:
        layers = [layer for a, b in pairwise([8, *[64] * 31, 4]) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    layout = Wide.layout


class Peak(Footprint):
    """The most bytes that were there at once of what was made under it."""

    peak = 0

    def _meet(self, storage: torch.UntypedStorage, made: bool, again: bool) -> None:
        super()._meet(storage, made, again)
        self.peak = max(self.peak, sum(self._made.values()))


def watched(rank: int, size: int, strategy: str, options: dict[str, Any]) -> dict[str, int]:
    """The plan by kind, and the most that a step of four micro-batches makes at once."""
    load_parts([])
    program, batch = made(Tall(rows=4 * 1024), rank, size, strategy, "sgd", options, rows=4 * 1024, micro=1024)
    with Peak() as footprint:
        program.step(Train(0, 0, 0, 4 * 1024, 0.1), batch)
    return {**program.memory()._asdict(), "peak": footprint.peak}


def test_the_size_of_a_gradient_is_found_without_a_copy_of_it() -> None:
    """In fp64 that would be twice the gradient."""
    gradient = torch.linspace(-1, 2, 4_000_001)
    expected = (gradient.double().square() * torch.where(gradient > 0, 1.0, 0.25)).sum().sqrt()
    with Peak() as peak:
        size = take_size(gradient)
    torch.testing.assert_close(size, expected, rtol=1e-12, atol=0)
    assert peak.peak < gradient.nbytes and gradient[0] == -1


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("pipeline", {"schedule": "1f1b", "balance": "flops"}, marks=pytest.mark.slow),
        pytest.param("pipeline", {"schedule": "gpipe", "balance": "flops"}, marks=pytest.mark.slow),
        ("tensor", {}),
    ],
    ids=str,
)
def test_activations_are_what_was_planned(strategy: str, options: dict[str, Any]) -> None:
    """Counted as tensors, not by pages: micro-batches in flight, messages that wait.

    What a kernel of the backward pass works on is not planned.
    """
    for found in ranks(2, "tests.laws.test_memory:watched", shared=True, strategy=strategy, options=options):
        assert found["activations"] > 0.6 * found["peak"]
        assert found["activations"] + found["gradients"] + found["exchange"] == pytest.approx(
            found["peak"], rel=0.15
        ), found


def test_texts() -> None:
    assert [bytes_text(size) for size in (0, 4_200, 99_000, 1_000_000, 213_400_000, 1_240_000_000)] == [
        "0.0 kB",
        "4.2 kB",
        "99 kB",
        "1.0 MB",
        "213 MB",
        "1.2 GB",
    ]
    ranks = [
        Memory(48_000_000, 48_000_000, 97_000_000, 20_000_000),
        Memory(48_000_000, 48_000_000, 97_000_000, 22_000_000, 1_000_000),
    ]
    assert table_row(ranks) == {
        "memory": "216 MB planned a process = 48 MB parameters + 48 MB gradients + 97 MB optimizer state + 22 MB "
        "activations + 1.0 MB exchange"
    }
    served = [Memory(237_000, 237_000, 0, 0, tables=40_000_000)]
    assert table_row(served, "server") == {
        "memory": "40 MB planned a server = 237 kB parameters + 237 kB gradients + 40 MB rows and index of "
        "sparse tables"
    }
    summary = MemoryMeter("cpu").summary(ranks, [236_000_000, 230_000_000])
    assert summary == {"planned": 213_000_000, "resident": 236_000_000, "rank": 0}
    assert memory_text(summary) == "213 MB planned, 236 MB resident growth at the peak of rank 0"
    assert memory_text(MemoryMeter("cpu").summary([], [5_000_000])) == "5.0 MB resident growth at the peak of rank 0"


def held(rank: int, size: int) -> int:
    """The peak of a process that holds 80 MB for a while."""
    before = torch.ones(10_000_000)
    meter = MemoryMeter("cpu")
    held = torch.ones(20_000_000)
    del held, before
    return meter.peak()


def test_a_meter_counts_from_its_start() -> None:
    assert 75_000_000 < ranks(1, "tests.laws.test_memory:held")[0] < 100_000_000


@pytest.mark.slow
def test_a_run_tells_what_it_plans_and_what_it_took(run_dtf: Callable[..., Result]) -> None:
    done = run_dtf(
        "plugins=[tests.support.residual_toy]",
        "recipe=residual",
        "strategy=ddp",
        "launcher.processes=2",
        "train.steps=2",
        "step.remat=blocks",
    )
    assert done.code == 0, done.err
    assert re.search(
        r'^started .* memory="\S+ kB planned a process = .* parameters \+ .* activations( \+ .* exchange)? '
        r'\+ \S+ kB copy for saves"',
        done.out,
        re.MULTILINE,
    ), done.out
    assert re.search(
        r'^ended .* memory="\S+ kB planned, \S+ MB resident growth at the peak of rank [01]"', done.out, re.MULTILINE
    ), done.out


def test_a_terminal_shows_it_at_the_end(tmp_path: Path) -> None:
    stream = io.StringIO()
    screen = TerminalView(tmp_path, {}, Terminal(file=stream, width=80))
    for event in (
        Started(0, 8, 4, {}),
        Ended(8, "finished", {}, {"planned": 213_000_000, "allocated": 236_000_000, "rank": 1}),
    ):
        screen.see(event)
    screen.close()
    assert "memory      213 MB planned, 236 MB allocated at the peak of rank 1" in stream.getvalue()
