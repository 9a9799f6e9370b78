"""A step on a GPU leaves the host free: it reads nothing from the device, and sends it nothing that has to wait.

Held here on CPUs, by the operations of a step whose update is told that its tensors are not on the host. What only a
GPU shows, copies among them, is in `python -m bench.gpu --only waits`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtf.api.options import StepOptions
from dtf.api.registry import lookup
from dtf.config.settings import load_parts
from dtf.core.types import WHOLE, Batch, Place, Train
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.host import devices
from dtf.model.forward import to_device
from dtf.strategies.dp_program import DataParallelProgram
from tests.support.harness import Case

WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2"}
"""Operations whose results the host reads."""

MADE = {"lift_fresh"}
"""What torch.tensor(number) does. For a GPU it is a copy that the host waits for; torch.full makes numbers there."""

ROWS = 20
"""Four micro-batches of five."""


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.moved: list[tuple[torch.dtype, torch.dtype]] = []  # formats before and after a copy to another device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device != result.device:
            self.moved.append((args[0].dtype, result.dtype))
        return result


load_parts([])


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(ROWS, 8, generator=generator), torch.randint(4, (ROWS,), generator=generator)
    return Batch(inputs, targets, torch.ones(ROWS), np.arange(ROWS))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad", "lars"])
@pytest.mark.parametrize("precision", ["fp64", "bf16_master", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_a_step_waits_for_nothing(strategy: str, precision: str, optimizer: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(devices, "host_reads", lambda device_type: False)
    monkeypatch.setattr(DataParallelProgram, "_each", lambda self, work, count=None: _in_turn(self, work, count))
    options = StepOptions(batch_size=ROWS, micro_batch_rows=5, clip_norm=1.0)
    task = replace(Case(precision=precision, optimizer=optimizer, recipe={"dropout": 0.0}).task(), step=options)
    program = lookup("strategy", strategy)().setup(task, World(Place(slots=2 if strategy == "dp" else 1)))
    for step in range(2):  # the first may make what stays
        rows = program.prepare(batch())
        with Operations() as operations:
            program.step(Train(step, 0, step, ROWS, 0.1), rows)
    assert operations.names["mm"] + operations.names["addmm"]  # it was watched
    assert not {name: count for name, count in operations.names.items() if name in WAITING | MADE}


def test_all_of_a_batch_is_pinned(monkeypatch: Any) -> None:
    """From memory that is not pinned a copy may wait for all that the device was given before."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    data = Case().task().recipe.open_data("train", 0)
    loader = Loader(data, Epochs(Sequential(), len(data), ROWS, 0), WHOLE, 5, pin=True)
    found = loader.get(0, 0)
    assert found is not None
    for tensor in (found.inputs, found.targets, found.weight):
        assert any(tensor is other for other in pinned)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_batches_are_converted_where_they_go(precision: str) -> None:
    """What the host converts lies in memory that is not pinned."""
    copies = Operations()
    with copies:
        moved = to_device(batch(), torch.device("meta"), Case(precision=precision).task())
    assert moved.weight.is_meta
    assert copies.moved
    assert all(before is after for before, after in copies.moved)


def _in_turn(program: Any, work: Any, count: int | None) -> list[Any]:
    """In this thread, which is watched."""
    return [work(i) for i in range(len(program._replicas) if count is None else count)]
