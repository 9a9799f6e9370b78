"""Replicas that go astray are found before a save, and the checkpoint before it stays; what only looks so is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.config.settings import load_parts
from dtf.model.fingerprint import _column_sums, fingerprints
from tests.support.arrays import seldom
from tests.support.harness import Case, _Run, spread
from tests.support.ranks import ranks

load_parts([])
HOARDING = {
    "plugin": "tests.support.hoarding_model",
    "save_every": 1,
    "steps": 6,
    "eval_every": 0,
    "micro_batch_rows": 2,
}
DIVIDED = [
    ("dp", {}, 2),
    ("ddp", {}, 2),
    ("ddp", {"shard_optimizer": True}, 2),
    ("fsdp", {}, 2),
    ("fsdp", {"replicate": 2}, 4),
    ("tensor", {"degree": 2}, 4),
    ("pipeline", {"degree": 2}, 4),
]
"""Strategies with replicas."""
SELDOM = (DIVIDED[0], DIVIDED[2], DIVIDED[4], DIVIDED[5])
"""Those that combine the others."""
USUAL = [pytest.param(*each, marks=pytest.mark.slow if each in (*SELDOM, DIVIDED[6]) else ()) for each in DIVIDED]
"""Whole replicas, and what holds parts; a pipeline compares its stages as ddp does the model, and is slow."""
SEEMING = [
    pytest.param(*each, kind, marks=() if kind in kinds else pytest.mark.slow)
    for each, kinds in zip(
        [DIVIDED[0], DIVIDED[1], DIVIDED[3], DIVIDED[6]],
        (["shown"], ["grown"], [], ["clock"]),
        strict=True,
    )
    for kind in ("shown", "grown", "clock")
]


LATER = {
    "counts": "rows after more passes: 8 is .*passes change the attributes?.* 8.passes",
    "evaluated": "rows after it has seen others in evaluation: 8 is .*passes change the attribute 8.kept",
    "evaluations": "rows after more passes in evaluation: 8 is .*passes change the attribute 8.passes",
}
"""What is said of what begins later, by its kind."""


def begin_later() -> list[Any]:
    """By default each kind under ddp, and one of them, in turn, under each other kind of strategy."""
    found = []
    for place, each in enumerate([*DIVIDED, ("pserver", {}, 2)]):
        for turn, kind in enumerate(LATER):
            usual = (
                each not in SELDOM
                and each[0] in ("ddp", "pipeline", "pserver")
                and (each[0] == "ddp" or place % 3 == turn)
            )
            identity = f"{kind}-{each[0]}-options{place}-{each[2]}"
            found.append(pytest.param(kind, *each, id=identity, marks=() if usual else pytest.mark.slow))
    return found


def run(strategy: str, options: dict[str, Any], processes: int, kind: str, **case: Any) -> dict[str, Any]:
    recipe = {"name": "hoarding", "kind": kind, "dropout": case.pop("dropout", 0.0)}
    return spread(strategy, processes, options=options, recipe=recipe, **{**HOARDING, **case})


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step_"))


@pytest.mark.parametrize(("strategy", "options", "processes"), USUAL)
def test_what_begins_late_is_found_before_the_next_save(
    strategy: str, options: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="ConfigError") as refused:
        run(strategy, options, processes, "late", folder=str(tmp_path))
    text = str(refused.value)
    assert "8 is the first module whose output differs" in text
    assert re.search(
        "(rank|replica) [0-3] does not have the attributes of (rank|replica) [0-3]: .*8.(kept|walked)", text
    )
    assert "the last checkpoint is kept" in text and "Layout.buffers" in text
    steps = [int(name.removeprefix("step_")) for name in saved(tmp_path)]
    last = 5 if options.get("replicate") else 3  # four ranks make half the passes each
    assert steps == [last - 2, last - 1, last]


@pytest.mark.parametrize(("kind", "strategy", "options", "processes"), begin_later())
def test_what_would_begin_later_is_found_before_the_first_step(
    kind: str, strategy: str, options: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError: the model gives other numbers for the same {LATER[kind]}"):
        run(strategy, options, processes, kind, folder=str(tmp_path), eval_every=2)
    assert not saved(tmp_path)


@pytest.mark.parametrize("kind", ["always", "once", "parameter"])
def test_each_way_to_go_astray(kind: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ConfigError") as refused:
        run("ddp", {}, 2, kind, folder=str(tmp_path))
    text = str(refused.value)
    if kind == "always":  # before the first step
        assert "the model gives other numbers for the same rows after it has seen others: 8" in text
    elif kind == "once":
        assert "8.passes, 8.seen" in text
    else:
        assert "8.scale of rank 1 is not that of rank 0" in text
    assert saved(tmp_path) == ([] if kind == "always" else [f"step_{step:06d}" for step in (1, 2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options", "processes", "kind"), SEEMING)
def test_what_only_looks_astray_is_saved_and_changes_nothing(
    strategy: str, options: dict[str, Any], processes: int, kind: str, tmp_path: Path
) -> None:
    """The passes that tell leave no trace either: without a save there are none."""
    watched = run(strategy, options, processes, kind, folder=str(tmp_path), steps=3, dropout=0.2)
    assert saved(tmp_path) == ["step_000001", "step_000002", "step_000003"]
    assert watched == run(strategy, options, processes, kind, save_every=0, steps=3, dropout=0.2)


@pytest.mark.parametrize(
    ("strategy", "options", "processes"),
    seldom(DIVIDED[2:], lambda *each: each == DIVIDED[3]),
)
def test_what_dtf_itself_does_looks_never_astray(
    strategy: str, options: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    """Then no passes are needed to tell."""
    case = {"folder": str(tmp_path), "save_every": 1, "ema": 0.9, "precision": "fp32"}
    spread(strategy, processes, call="tests.support.unjudged:train_unjudged", options=options, **case)
    assert len(saved(tmp_path)) == 3


def astray(rank: int, size: int) -> None:
    program: Any = _Run(rank, size, Case(strategy="mesh", options={"replicate": 2, "pipeline": 2})).program
    if rank == 3:
        next(iter(program.replicated()[0].values())).add_(1)
    program.check_replicas()


def test_a_stage_that_differs_from_its_copy_is_found() -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: .* of rank 3 is not that of rank 1"):
        ranks(4, f"{__name__}:astray", shared=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (7,), (4096,), (3, 4099), (4, 3, 8, 8)])
def test_a_fingerprint_differs_with_each_number_and_its_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    moved = torch.empty(tensor.numel() + 1, dtype=dtype)[1:].view(shape).copy_(tensor)
    if tensor.dim() == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
        moved = tensor.clone()
    others = []
    for number in {0, tensor.numel() // 2, tensor.numel() - 1}:
        flat = tensor.flatten().clone()
        flat[number] += 0.125
        others.append(flat.view(shape).to(memory_format=torch.preserve_format))
    if tensor.numel() > 1:
        flat = tensor.flatten().clone()
        flat[[0, -1]] = flat[[-1, 0]]
        others.append(flat.view(shape))
    if tensor.dim() == 4:
        others = [other.to(memory_format=torch.channels_last) for other in others]
    first, same, *rest = fingerprints([tensor, moved, *others])
    assert first == same and first not in rest


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_the_sums_of_a_host_wrap_as_those_of_a_device(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**62), 2**62, (300, 5)).to(dtype)
    sums = _column_sums(bits)
    assert sums.dtype is dtype and torch.equal(sums, bits.sum(0, dtype=dtype))


def test_all_kinds_of_tensors_have_a_fingerprint() -> None:
    kinds = [torch.ones(5, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int16, torch.complex128)]
    assert len(fingerprints([*kinds, torch.ones(0), torch.ones(2).to_sparse(), torch.ones(2, device="meta")])) == 7


def test_replicas_of_a_strategy_that_is_not_dtfs_accuse_its_exchange_first(run_dtf: Any) -> None:
    plugins = "plugins=[tests.support.rounding_models,tests.support.broken_strategies]"
    short = ("recipe=toy", "train.steps=2", "train.eval_every=0", "checkpoint.every_steps=1", "launcher.processes=2")
    done = run_dtf(plugins, "strategy=keeps_gradients", *short)
    assert done.code == 2
    assert re.search(
        "of rank 1 is not that of rank 0, .*: look first at strategy=keeps_gradients \\(KeepsGradients\\), whose "
        "Sharding has to give all ranks the same gradients by complete_gradients and the same parameters by "
        "fetch_others \\(it has none: .*\\); otherwise the model changes it",
        done.err,
    ), done.err
