"""A step does not make the host wait for its device, which a queue of work that is far ahead needs; and under dp and
ddp it leaves the model where it is in memory, which CUDA graphs need.

Held here on CPUs that stand in for a device. What only a GPU shows, copies among them, is in
`python -m bench.gpu --only waits`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtf.api.registry import lookup
from dtf.core.types import WHOLE, Batch
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.model.forward import to_device
from tests.support.arrays import crossed
from tests.support.changing_model import RULES
from tests.support.harness import Case, variants
from tests.support.ranks import ranks

CASES: list[dict[str, Any]] = [
    {"precision": "fp32"},
    {"precision": "fp32", "recipe": {"name": "shapes_toy"}},
    {"precision": "fp16", "optimizer": "adamw", "ema": 0.9},
    {"precision": "bf16_master", "optimizer": "lars"},
    {"precision": "fp64", "optimizer": "adagrad"},
]


def run(strategy: str, options: dict[str, Any], case: dict[str, Any]) -> list[dict[str, Any]]:
    processes = sum(lookup("strategy", strategy)().roles(2).values())
    more = {"strategy": strategy, "options": options, "slots": 2, **case}
    return ranks(processes, "tests.support.host_reads:train", shared=True, **more)


def computing() -> list[tuple[str, dict[str, Any]]]:
    """The strategies all of whose ranks compute. Servers keep parameters in host memory, for which trainers wait."""
    return [(name, options) for name, options in variants() if len(lookup("strategy", name)().roles(1)) == 1]


@pytest.mark.parametrize(
    ("strategy", "options", "case"), crossed(computing(), [*range(len(CASES))], turns=[None], each=1)
)
def test_a_step_reads_nothing_from_the_device(strategy: str, options: dict[str, Any], case: int) -> None:
    for result in run(strategy, options, CASES[case]):
        assert result["steps"] == 3 and not result["waits"]


@pytest.mark.parametrize("kind", ["plain", *(kind for kind in RULES if kind != "cache")])  # a pass makes that one anew
@pytest.mark.parametrize("strategy", [pytest.param("dp", marks=pytest.mark.slow), "ddp"])
def test_parameters_and_buffers_stay_in_place(strategy: str, kind: str) -> None:
    changing = {"plugin": "tests.support.changing_model", "recipe": {"name": "changing", "kind": kind}}
    for result in run(strategy, {}, {"precision": "fp32"} if kind == "plain" else changing):
        assert result["places"] and all(len(replica) >= 3 for replica in result["places"])
        for replica in result["places"]:
            assert all(place == replica[0] for place in replica)


def test_all_of_a_batch_is_pinned(monkeypatch: Any) -> None:
    """From memory that is not pinned a copy may wait for all that the device was given before."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    data = Case().task().recipe.open_data("train", 0)
    found = Loader(data, Epochs(Sequential(), len(data), 20, 0), WHOLE, 5, pin=True).get(0, 0)
    assert found is not None
    for tensor in (found.inputs, found.targets, found.weight):
        assert any(tensor is other for other in pinned)


class Moves(TorchDispatchMode):
    """Formats before and after each copy to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device != result.device:
            self.formats.append((args[0].dtype, result.dtype))
        return result


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_batches_are_converted_where_they_go(precision: str) -> None:
    """What the host converts lies in memory that is not pinned."""
    batch = Batch(torch.randn(4, 8), torch.randint(4, (4,)), torch.ones(4), np.arange(4))
    with Moves() as moves:
        moved = to_device(batch, torch.device("meta"), Case(precision=precision).task())
    assert moved.weight.is_meta and moves.formats
    assert all(before is after for before, after in moves.formats)
