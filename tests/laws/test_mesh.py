"""Laws of combined axes: copies, stages, slices of state and slices of layers, on one device mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtf.api.layout import Layout
from dtf.api.registry import register
from dtf.config.settings import load_parts
from dtf.core.types import Batch, Train
from dtf.distributed.sharding import local
from dtf.model.init import construct
from dtf.model.memory import Footprint
from tests.support.harness import Case, _Run, difference, reference, spread
from tests.support.ranks import ranks
from tests.support.toy import Toy

load_parts([])

Way = tuple[int, dict[str, Any]]

SHORT: dict[str, Any] = {"steps": 3, "eval_every": 3}

MESHES: dict[str, Way] = {
    "stages of slices": (4, {"pipeline": 2}),
    "three stages": (3, {"pipeline": 3}),
    "slices on three": (3, {"shard": 3, "zero": 2}),
    "divided layers on three": (3, {"tensor": 3}),
    "divided stages": (4, {"tensor": 2, "pipeline": 2}),
    "slices of divided layers": (4, {"tensor": 2}),
    "interleaved": (4, {"pipeline": 2, "virtual": 2, "zero": 2}),
    "copies of slices": (4, {"replicate": 2, "zero": 1}),
    "copies of divided layers": (4, {"replicate": 2, "tensor": 2}),
    "copies of stages": (4, {"replicate": 2, "pipeline": 2}),
    "gpipe": (4, {"pipeline": 2, "schedule": "gpipe", "zero": 1}),
    "kept": (4, {"pipeline": 2, "reshard_after_forward": False, "unit": "layer"}),
    "three shares of stages": (6, {"pipeline": 2, "shard": 3}),
    "copies of stages of slices": (8, {"replicate": 2, "shard": 2, "pipeline": 2}),
    "stages of slices of divided layers": (8, {"pipeline": 2, "tensor": 2, "shard": 2}),
    "copies of slices of divided layers": (8, {"replicate": 2, "tensor": 2, "shard": 2, "zero": 2}),
    "copies of divided stages": (8, {"replicate": 2, "tensor": 2, "pipeline": 2}),
}
"""Processes and options."""

FAR = {name for name, (processes, _) in MESHES.items() if processes > 4} | {"gpipe", "kept"}
"""Slow: they take more ranks, or are much as others. One of eight ranks is among the usual cases below."""


def seldom(names: set[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in names else ()) for name in MESHES]


def on(name: str, **case: Any) -> dict[str, Any]:
    processes, options = MESHES[name]
    return spread("mesh", processes, options=options | case.pop("more", {}), **case)


@pytest.mark.parametrize("name", seldom(FAR))
def test_every_mesh_follows_the_reference_in_fp64(name: str) -> None:
    """Batch norm, dropout, a clipped norm; the last batch has fewer micro-batches than some meshes have shares."""
    assert difference(reference(steps=4), on(name, steps=4)) <= 1e-10


CASES: dict[str, dict[str, Any]] = {
    "lars": {"optimizer": "lars"},
    "ema": {"ema": 0.5, "optimizer": "adamw"},
    "uneven": {"micro_batch_rows": 6},
    "one micro-batch": {"micro_batch_rows": 19},
    "fill": {"tail": "fill"},
    "remat": {"remat": "blocks", "plugin": "tests.support.residual_toy", "recipe": {"name": "residual"}},
    "tables": {"recipe": {"name": "tabled"}},
}
USUAL = [
    ("stages of slices", "lars"),
    ("slices of divided layers", "lars"),
    ("slices of divided layers", "uneven"),
    ("stages of slices", "one micro-batch"),
    ("divided stages", "ema"),
    ("copies of slices", "tables"),
    ("stages of slices of divided layers", "tables"),
    ("interleaved", "uneven"),
    ("slices of divided layers", "remat"),
    ("copies of stages", "fill"),
]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if (name, case) in USUAL else pytest.mark.slow)
        for name in MESHES
        for case in CASES
    ],
)
def test_meshes_with_what_reaches_across_axes(name: str, case: str) -> None:
    """Norms of whole tensors in slices, averages, padding passes, rows of tables."""
    values = SHORT | CASES[case]
    assert difference(reference(**values), on(name, **values)) <= 1e-10


@pytest.mark.parametrize("name", seldom(MESHES.keys() - {"slices of divided layers"}))
def test_loss_scale_on_a_mesh(name: str) -> None:
    """fp16: a rank that meets an infinite gradient makes all of them skip the step."""
    case: dict[str, Any] = {"precision": "fp16", **SHORT}
    assert difference(reference(**case), on(name, **case), without=("optimizer/",)) <= 0.05
    bad: dict[str, Any] = {"precision": "fp16", "recipe": {"bad_row": 7}, "skip_nonfinite": 5, "steps": 3}
    found = on(name, **bad)
    assert found["train"].keys() == reference(**bad)["train"].keys()
    assert all(map(_finite, found["tensors"].values()))


def _finite(values: Any) -> bool:
    return all(map(_finite, values)) if isinstance(values, list) else abs(values) < 1e30


TIED: dict[str, Any] = {"plugin": "tests.support.tied", **SHORT}


@pytest.mark.parametrize("recipe", ["tied", pytest.param("tied_by_name", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["function", "modules"])
@pytest.mark.parametrize(
    "options",
    [{"pipeline": 2}, pytest.param({"pipeline": 2, "zero": 1, "virtual": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_tied_weights_in_slices_of_stages(options: dict, kind: str, recipe: str) -> None:
    case = {"recipe": {"name": recipe, "kind": kind}, **TIED}
    assert difference(reference(**case), spread("mesh", 4, options=options, **case)) <= 1e-10


@pytest.mark.parametrize(
    "options", [{"tensor": 2, "pipeline": 2}, pytest.param({"tensor": 2, "shard": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_layer_that_works_on_slices_without_being_divided_is_refused(options: dict) -> None:
    odd = {"plugin": "tests.support.corner_cases", "recipe": {"name": "odd", "kind": "prelu"}}
    with pytest.raises(AssertionError, match="ranks that should agree have different gradients of act.weight"):
        spread("mesh", 4, options=options, **odd)


# ---------------------------------------------------------------- checkpoints

OTHERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("ddp", 3, {}),
    "fsdp": ("fsdp", 2, {}),
    "tensor": ("tensor", 3, {}),
    "pipeline": ("pipeline", 2, {}),
}
PLAN: dict[str, Any] = {"steps": 6, "log_every": 1, "eval_every": 3}
TRAVELS = {("stages of slices", "tensor"), ("slices of divided layers", "pipeline"), ("divided stages", "fsdp")}
BACK = {("fsdp", "divided stages")}


def way(name: str) -> tuple[str, int, dict[str, Any]]:
    return OTHERS.get(name) or ("mesh", *MESHES[name])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(first, second, marks=() if (first, second) in TRAVELS | BACK else pytest.mark.slow)
        for first in (*MESHES, *OTHERS)
        for second in (*MESHES, *OTHERS)
        if first != second and not {first, second} <= {*OTHERS}
    ],
)
def test_a_checkpoint_goes_on_under_another_mesh(first: str, second: str, tmp_path: Path) -> None:
    (one, processes, options), (other, more, others) = way(first), way(second)
    case = PLAN | {"optimizer": "adamw"}
    spread(one, processes, options=options, folder=str(tmp_path), save_every=3, halt=True, **case)
    found = spread(other, more, options=others, start=str(tmp_path / "step_000003"), **case)
    whole = reference(**case)
    whole |= {key: {step: value for step, value in whole[key].items() if int(step) > 3} for key in ("train", "eval")}
    whole["ids"] = {step: ids for step, ids in whole["ids"].items() if step in found["ids"]}
    assert difference(whole, found) <= 1e-10


@pytest.mark.parametrize("name", seldom(MESHES.keys() - {"slices of divided layers", "divided stages"}))
def test_the_same_mesh_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    case = PLAN | {"precision": "fp32", "optimizer": "adamw"}
    whole = on(name, folder=str(tmp_path), save_every=3, **case)
    found = on(name, start=str(tmp_path / "step_000003"), **case)
    assert found["tensors"] == whole["tensors"]
    for key in ("train", "eval", "ids"):
        assert found[key] and found[key] == {step: whole[key][step] for step in found[key]}


# ---------------------------------------------------------------- stages of ZeRO


@register("recipe", "broad")
class Broad(Toy):
    """Parameters that weigh much more than activations."""

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(8, 128), *(nn.Linear(128, 128) for _ in range(8)), nn.Linear(128, 4)]
        return nn.Sequential(*layers)

    def layout(self, model: nn.Module) -> Layout:
        return Layout(tuple((str(i),) for i in range(10)))


def alive(rank: int, size: int, **values: Any) -> dict[str, float]:
    """In bytes of all parameters, before the last micro-batch of a step: what the step has made and is there, which is
    gradients, and what is there of parameters; of the optimizer's state after it.
    """
    torch.set_num_threads(1)
    run = _Run(rank, size, Case(**values))
    found: dict[str, float] = {}
    program: Any = run.program
    whole = sum(8 * p.numel() for p in construct(run.toy).parameters())
    replica, step = program._replica, program.step
    begin = replica._begin_random

    def watched(ticket: Train, batch: Batch) -> Any:
        with Footprint() as footprint:

            def note(step: int, micro_batch: int) -> None:
                found["gradients"] = sum(footprint._made.values()) / whole
                held = {id(s): s for p in replica.model.parameters() if (s := local(p.detach()).untyped_storage())}
                found["parameters"] = sum(storage.nbytes() for storage in held.values()) / whole
                begin(step, micro_batch)

            replica._begin_random = note
            return step(ticket, batch)

    program.step = watched
    run.fit()
    return found | {"optimizer": program.update.bytes()[2] / whole}


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients"), [(1, 1.0, 1.0), (2, 1.0, 0.5), (3, 0.5, 0.5)], ids=["1", "2", "3"]
)
def test_two_ranks_hold_halves_of_what_the_stage_of_zero_says(zero: int, parameters: float, gradients: float) -> None:
    case = {"recipe": {"name": "broad"}, "steps": 1, "eval_every": 0, "optimizer": "adamw"}
    for found in ranks(2, f"{__name__}:alive", shared=True, strategy="mesh", options={"zero": zero}, **case):
        assert 0.45 <= found["optimizer"] / 2 <= 0.55, "two numbers for each of a half of the parameters"
        assert 0.9 * gradients <= found["gradients"] <= 1.1 * gradients
        assert 0.9 * parameters <= found["parameters"] <= 1.1 * parameters
