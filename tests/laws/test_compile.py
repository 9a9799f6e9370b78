"""What is compiled computes the same numbers under any strategy, once for each shape, and what cannot be is refused by
name before the first step.

The compiler itself takes tens of seconds for a few blocks. So the default tests follow code and divide it into forward
and backward as for inductor (`aot_eager`), and the slow ones make machine code.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtf.config.compose import Composer
from dtf.core.errors import ConfigError, DtfError
from dtf.model import compiled_forward
from tests.conftest import Result
from tests.support.harness import difference, reference, spread, train, variants
from tests.support.ranks import Refused, ranks

RESIDUAL: dict[str, Any] = {"recipe": {"name": "residual"}, "plugin": "tests.support.residual_toy"}
COMPILED: dict[str, Any] = {**RESIDUAL, "compile": "blocks"}
REFUSING = ("tensor",)


def ways() -> list[Any]:
    """The strategies that compile."""
    return [
        pytest.param(*way, marks=() if way[0] == "fsdp" and not way[1] else pytest.mark.slow)
        for way in variants()
        if way[0] not in REFUSING and way[1].get("unit") != "layer"
    ]


@pytest.mark.parametrize(("strategy", "options"), ways())
def test_the_numbers_are_those_of_the_plain_model(strategy: str, options: dict[str, Any]) -> None:
    """With batch statistics over several micro-batches, masks of modules, and a last batch that is smaller."""
    found = spread(strategy, 2, options=options, **COMPILED)
    assert difference(reference(**RESIDUAL), found) < 1e-10


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_so_they_are_of_a_model_that_writes_to_its_inputs(strategy: str) -> None:
    """Passes that are compared begin with the same rows, which are not cast here, and train, whatever came before."""
    case = {**COMPILED, "recipe": {"name": "residual", "in_place": True}, "precision": "fp32"}
    processes = 2 if strategy == "pipeline" else 1
    assert difference(reference(**{**case, "compile": "off"}), spread(strategy, processes, **case)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [{"remat": "blocks"}, {"ema": 0.9}, {"compile": "model"}, {"recipe": {"name": "shapes_toy"}}]
)
def test_so_they_are_beside_other_options(case: dict[str, Any]) -> None:
    plain = {**RESIDUAL, **{key: value for key, value in case.items() if key not in ("compile", "remat")}}
    processes = 1 if "recipe" in case else 2  # three kinds of blocks
    assert difference(reference(**plain), spread("ddp", processes, **{**COMPILED, **case})) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options"), ways())
def test_machine_code_gives_the_same_numbers(strategy: str, options: dict[str, Any]) -> None:
    found = spread(strategy, 2, options=options, compiler="inductor", **COMPILED)
    assert difference(reference(**RESIDUAL), found) < 1e-10


@pytest.mark.slow
def test_masks_of_a_function_are_the_same_too() -> None:
    """Without a module that draws: from torch's generator, which is seeded with each micro-batch."""
    drawn = {**RESIDUAL, "recipe": {"name": "residual", "functional": True}}
    assert difference(reference(**drawn), spread("ddp", 2, **drawn, compile="blocks")) < 1e-10


def compilations(rank: int, size: int, **case: Any) -> list[tuple[int, ...]]:
    """The shapes of the first input that has several axes of each compilation of a run, in order."""
    made: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        made.append(tuple(next(value.shape for value in inputs if value.dim() == 2 and value.shape[0] < 16)))
        return graph

    train(rank, size, **{**case, "compiler": backend})
    return made


def test_equal_blocks_are_compiled_once_for_each_shape_and_never_again() -> None:
    """Micro-batches of five rows, the last of a batch and the last batch of four; evaluations of five. Two blocks."""
    one = spread_list(steps=3, eval_every=3)
    assert [shape[0] for shape in one] == [5, 4, 5]
    assert spread_list(steps=6, eval_every=3) == one


def spread_list(call: str = "compilations", **case: Any) -> Any:
    return ranks(1, f"tests.laws.test_compile:{call}", shared=True, **{**COMPILED, **case})[0]


@pytest.mark.slow
def test_who_compiles_does_not_hang(run_dtf: Callable[..., Result], tmp_path: Path) -> None:
    """The last batch is smaller: machine code for it takes longer than a step may."""
    found = run_dtf(
        "recipe=resnet_shapes", "recipe.data.train_rows=88", "recipe.data.eval_rows=32", "step.compile=blocks",
        "step.batch_size=40", "train.steps=3", "train.eval_every=0", "checkpoint=off", "launcher.processes=2",
        "launcher.hang_timeout_s=2", "launcher.max_restarts=0", f"+launcher.env.XDG_CACHE_HOME={tmp_path}",
    )  # fmt: skip
    assert found.code == 0, found.err
    assert "blocks: 3 BasicBlock" in found.out


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_or_without(compiled: bool, tmp_path: Path) -> None:
    kinds = ["off", "blocks"] if compiled else ["blocks", "off"]
    half = {**RESIDUAL, "folder": str(tmp_path), "save_every": 2, "halt": True}
    spread("ddp", 2, compile=kinds[0], **half)
    start = str(tmp_path / "step_000002")
    found = spread("ddp", 2, compile=kinds[1], start=start, **RESIDUAL)
    whole = reference(**RESIDUAL)
    later = {split: {step: whole[split][step] for step in found[split]} for split in ("train", "eval")}
    assert difference(whole | later | {"ids": found["ids"]}, found) < 1e-10


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    compiled = {**RESIDUAL, "compile": "blocks", "compiler": "inductor"}
    whole = spread("ddp", 2, **compiled)
    spread("ddp", 2, **compiled, folder=str(tmp_path), save_every=2, halt=True)
    found = spread("ddp", 2, **compiled, start=str(tmp_path / "step_000002"))
    assert found["tensors"] == whole["tensors"]
    assert found["train"]["3"] == whole["train"]["3"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (
            "reads",
            r"cannot compile blocks.0 \(Block\) in one piece: .*data-dependent.*uncompilable.py",
        ),
        ("reads in evaluation", r"cannot compile blocks.0 \(Block\) in one piece: .*data-dependent"),
        ("counts", r"would compile blocks.0 \(Block\) in each pass anew, .*passes.*make an attribute a buffer"),
        (
            "raises",
            r"blocks.0 \(Block\) raises IndexError when it is compiled, and not as it is: .*use step.compile=off",
        ),
        ("differs in evaluation", "something else when it is compiled .output 0 differs"),
        ("scales by a buffer", "something else when it is compiled .gradient of .*such as a buffer that changes"),
        ("draws from Python", r"cannot compile blocks.0 \(Block\): it draws random numbers from Python or numpy"),
        ("draws from numpy", r"cannot compile blocks.0 \(Block\): it draws random numbers from Python or numpy"),
        ("passes by", r"calls none of blocks.0 \(Block\), blocks.1 \(Block\) as a module; call blocks as block\(x\)"),
        ("passes one by", r"calls none of blocks.0 \(Block\) as a module; call blocks as block\(x\)"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name_before_the_first_step(way: str, words: str) -> None:
    case = {"recipe": {"name": "uncompilable", "way": way}, "plugin": "tests.support.uncompilable"}
    with pytest.raises(Refused, match=f"ConfigError: .*{words}"):
        spread("ddp", 1, compile="blocks", **case)


@pytest.mark.parametrize(
    ("way", "processes"),
    [
        pytest.param("counts", 1, marks=pytest.mark.slow),
        pytest.param("counts by a rule", 2, marks=pytest.mark.slow),
        ("ignored output", 1),
        pytest.param("ignored penalty", 1, marks=pytest.mark.slow),
        pytest.param("leaves out by Python", 2, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_keep_numbers_or_make_what_nobody_uses_are_compiled(way: str, processes: int) -> None:
    """A parameter that the loss does not come to has zeros for a gradient then; an update takes both alike."""
    case = {"recipe": {"name": "odd_blocks", "way": way}, "plugin": "tests.support.odd_blocks"}
    one, found = reference(**case), spread("ddp", processes, compile="blocks", **case)
    if way == "leaves out by Python":  # each trial leaves out others
        found["row_flops"] = one["row_flops"] = 1.0
    assert difference(one, found) < 1e-10


def miscompiled(rank: int, size: int, **case: Any) -> str:
    """What a run raises whose compiler makes each number larger, but follows code well."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        return lambda *values: tuple(value * 1.01 for value in graph(*values))

    try:
        train(rank, size, **{**case, "compiler": backend})
    except ConfigError as error:
        return str(error)
    return ""


class Louder(torch.autograd.Function):
    """The input. Its gradient is larger than it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def misread(rank: int, size: int, **case: Any) -> str:
    """What a run raises whose compiler is wrong in the gradients of inputs alone."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        def louder(value: Any) -> Any:
            rows = isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)
            return Louder.apply(value) if rows else value

        return lambda *values: graph(*map(louder, values))

    try:
        train(rank, size, **{**case, "compiler": backend})
    except ConfigError as error:
        return str(error)
    return ""


def failing(rank: int, size: int, raised: str, **case: Any) -> str:
    """What a run raises whose compiler raises this."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if raised == "full" else ImportError(raised)

    try:
        train(rank, size, **{**case, "compiler": backend})
    except DtfError as error:
        return f"{error.exit.name} {error}"
    return ""


@pytest.mark.slow
def test_a_full_disk_and_damaged_machine_code_are_told_as_what_they_are() -> None:
    """torch's own error begins with a line that says nothing."""
    full, damaged = (spread_list("failing", raised=raised) for raised in ("full", "/kept/a.so: file too short"))
    assert full.startswith("IO ") and "No space left on device; make room" in full
    words = r"CONFIG .*cannot compile first \(Block\): ImportError: /kept/a.so: file too short; remove /"
    assert re.match(words, damaged)


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("ddp", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("dp", 1), ("fsdp", 2), ("pipeline", 2))),
    ],
)
def test_wrong_machine_code_is_refused_before_the_first_update(strategy: str, processes: int) -> None:
    case = {**COMPILED, "strategy": strategy, "slots": 2}
    for said in ranks(processes, "tests.laws.test_compile:miscompiled", shared=True, **case):
        assert "step.compile=blocks: the model computes something else when it is compiled (gradient of" in said
        assert "wrong machine code" in said


def test_wrong_gradients_of_rows_are_refused_too() -> None:
    """No parameter of the model shows them: rows of tables are looked up outside."""
    case = {"recipe": {"name": "tabled"}, "plugin": "tests.support.sparse_toy", "compile": "model"}
    (said,) = ranks(1, "tests.laws.test_compile:misread", shared=True, strategy="ddp", **case)
    assert "gradient of rows of" in said and "wrong machine code" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("strategy=tensor", "step.compile=blocks does not work with this strategy: divided layers talk to other ranks"),
        ("strategy=fsdp strategy.unit=layer", "strategy.unit=layer gathers parameters within a block"),
        ("strategy=fsdp step.compile=model", "parameters are gathered part by part"),
        ("strategy=pipeline step.compile=model", "stages divide the model; use step.compile=blocks"),
        ("step.remat=selective", "use step.remat=blocks"),
        ("step.remat=blocks step.compile=model", "use step.compile=blocks"),
        ("+launcher.env.PATH=/nowhere", r"no C\+\+ compiler is installed \(g\+\+\): apt install g\+\+"),
        ("+launcher.env.TORCHDYNAMO_DISABLE=1", "TORCHDYNAMO_DISABLE=1 turns torch.compile off; unset it"),
    ],
)
def test_what_no_rank_could_do_is_refused_before_ranks_start(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Composer().compose(["launcher.devices=cpu", "step.compile=blocks", *line.split()]).check()


def test_a_folder_that_torch_cannot_make_is_named_before_ranks_start(
    tmp_path: Path,
) -> None:
    """Also where nothing is compiled: torch makes it when it is imported. In a process of its own, as the fork server
    that the command has begun would serve later runs.
    """
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "folder")
    folder = str(tmp_path / "link")
    command = [sys.executable, "-m", "dtf", "launcher.processes=1", "train.steps=1", f"run.dir={tmp_path / 'run'}"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2 and f"TORCHINDUCTOR_CACHE_DIR={folder}: torch cannot make this folder" in found.stderr


def test_the_machine_code_is_kept_for_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiled_forward.configure("cpu", 1)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.parent == tmp_path / "dtf" / compiled_forward.CACHE and not folder.stat().st_mode & 0o077
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")  # a user's own choice stays
    compiled_forward.configure("cpu", 1)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    folder.chmod(0o777)  # others may write there what a rank would run
    assert tmp_path not in compiled_forward.cache_folder().parents  # but one of this process alone
