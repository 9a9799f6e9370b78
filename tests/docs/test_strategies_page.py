"""docs/strategies.md: its arithmetic is computed anew, and its commands are pass the checks before launch."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

import dtf
from dtf.api.options import StepOptions
from dtf.api.registry import lookup
from dtf.api.task import Task
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.recipes.gpt.recipe import GptText
from dtf.strategies.mesh_strategy import MeshStrategy
from tests.support.toy import Toy

PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
HOST, NVLINK, NETWORK = 8, 300.0, 50.0  # devices; GB/s
POSITIONS = 8192
SHAPES = {1: (20, 1024), 10: (32, 2560), 100: (55, 6144)}  # GB of fp32 parameters -> blocks, width


class Sizes(NamedTuple):
    replicate: int = 1
    pipeline: int = 1
    shard: int = 1
    tensor: int = 1
    zero: int = 3


class Needs(NamedTuple):
    """GB of state on a device, and GB that it sends in a step inside of a host and between hosts."""

    state: float
    inside: float
    between: float

    @property
    def seconds(self) -> float:
        return self.inside / NVLINK + self.between / NETWORK


def boundary(size: int) -> float:
    """GB between two blocks, of a micro-batch in a format of two bytes."""
    return POSITIONS * SHAPES[size][1] * 2 / 1e9


def needs(size: int, mesh: Sizes) -> Needs:
    """Of `size` GB of fp32 parameters with AdamW. Ranks along the last axes are neighbours."""
    cut, passes = mesh.pipeline * mesh.tensor, mesh.pipeline * mesh.tensor
    state = 4 * size / (cut * mesh.shard)
    if mesh.shard > 1 and mesh.zero < 3:
        state += size / cut * (1 if mesh.zero == 2 or passes == 1 else 2)
    gathers = 2 * passes if mesh.zero == 3 else 1
    scatters = passes if mesh.zero > 1 else 1
    blocks = -(-SHAPES[size][0] // mesh.pipeline)
    sent = {
        "tensor": 8 * (mesh.tensor - 1) / mesh.tensor * boundary(size) * blocks * passes,
        "shard": (mesh.shard - 1) / mesh.shard * size / cut * (gathers + scatters),
        "pipeline": 2 * boundary(size) * passes * (mesh.pipeline > 1),
        "replicate": 2 * (mesh.replicate - 1) / mesh.replicate * size / (cut * mesh.shard),
    }
    inside = between = 0.0
    ranks = 1
    for axis, number in sent.items():
        ranks *= getattr(mesh, axis)
        inside, between = (inside + number, between) if ranks <= HOST else (inside, between + number)
    return Needs(state, inside, between)


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    table = re.search(rf"^\| {re.escape(head)}.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table, head
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]


def test_what_fits_and_what_is_sent() -> None:
    found = rows("`M` | devices")
    assert [(row[0], row[1]) for row in found[:9]] == [(f"{m} GB", str(n)) for m in (1, 10, 100) for n in (1, 8, 64)]
    for model, devices, take, *said in found:
        size, count = int(model.split()[0]), int(devices)
        given = dict(part.split("=") for part in re.findall(r"\w+=\d+", take))
        mesh = Sizes(**{key: int(value) for key, value in given.items()})
        if take == "`ddp`":
            mesh = Sizes(replicate=count)
        if take == "nothing":
            assert said[0] == f"{needs(size, mesh).state:.1f}" and float(said[0]) > 80
            continue
        assert mesh.replicate * mesh.pipeline * mesh.shard * mesh.tensor == count, take
        one = needs(size, mesh)
        assert one.state < 80
        assert [float(text) for text in said] == pytest.approx(
            [one.state, one.inside, one.between, one.seconds], abs=0.051, rel=0.01
        ), (take, one)
        assert float(said[-1]) == pytest.approx(one.seconds, abs=0.0051), (take, one)


def test_activations_and_arithmetic() -> None:
    for (size, (blocks, width)), row in zip(SHAPES.items(), rows("parameters | `M`"), strict=True):
        x = boundary(size)
        assert row[1:3] == [f"{size} GB", f"{blocks} x {width}"]
        assert row[3:] == [f"{x:.3f} GB", f"{17 * x * blocks:.1f} GB", f"{x * blocks + 17 * x:.1f} GB"]
        assert 12 * blocks * width**2 * 4 / 1e9 == pytest.approx(size, rel=0.02)
        assert f"{6 * size * 1e9 / 4 * POSITIONS / 400e12:.2f} s for" in PAGE


def test_bytes_of_a_parameter() -> None:
    """As the update of a small model has them."""
    toy = Toy(batch_norm=False)
    for names, *said in rows("`precision` | parameters"):
        for name in re.findall(r"`(\w+)`", names):
            precision = dtf.compose([f"precision={name}"]).settings.precision
            task = Task(toy, lookup("optimizer", "adamw")(), precision, StepOptions(batch_size=4), 0)
            update = lookup("strategy", "ddp")().setup(task, World(Place(rank=0, size=1))).update
            numbers = sum(p.numel() for p in toy.build_model().parameters())
            *each, _ = update.bytes()
            assert [round(size / numbers) for size in each] == [int(text) for text in said[:3]], name
            assert sum(map(int, said[:3])) == int(said[3])


def test_commands_pass_all_checks_before_launch() -> None:
    commands = [line.partition("#")[0] for line in PAGE.splitlines() if line.startswith("python -m dtf ")]
    assert len(commands) > 16
    for command in commands:
        if "job=describe" in command:
            continue
        composed = dtf.compose(shlex.split(command)[3:])
        composed.check()
        settings = composed.settings
        if isinstance(settings.recipe, GptText) and isinstance(settings.strategy, MeshStrategy):
            (processes,) = (int(word.partition("=")[2]) for word in command.split() if "launcher.processes=" in word)
            sizes = settings.strategy.sizes(processes)
            assert sizes.layer_ranks <= settings.recipe.model.heads and sizes.pipeline <= settings.recipe.model.layers
