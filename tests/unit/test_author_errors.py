"""Mistakes of a recipe's author are found before the first step, and named. Errors of other causes are left alone."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtf import folder_samples, map_style
from dtf.config.compose import compose
from dtf.core.errors import ConfigError, DataError, DtfError, Exit
from dtf.core.types import Event, Failed, Measured, Place
from dtf.engine.train import work
from dtf.model.attributes import without_trace
from dtf.model.author_errors import author_error
from dtf.model.forward import rows_of
from tests.support.toy import Toy

MISTAKES = {
    "train_metrics_text": "Mistaken.train_metrics is 'loss'; it must be a tuple of names",
    "objective_text": "Mistaken.objective is 'top1'; it must be the name of a metric and 'min' or 'max'",
    "objective_best": "Mistaken.objective is ('top1', 'most')",
    "objective_unknown": "the objective top2 is no metric of the recipe; did you mean top1?",
    "build_model_raises": "Mistaken.build_model() raised KeyError: 'width', at",
    "build_model_exits": "Mistaken.build_model() raised SystemExit: 3, at",
    "build_model_on_meta": "Mistaken.build_model() puts tail.1.narrow.weight on meta, without values",
    "build_model_without_parameters": "there is nothing to train: Mistaken.build_model() has no parameter",
    "build_model_frozen": "there is nothing to train: every parameter of the model is frozen",
    "open_data_list": "Mistaken.open_data('train') returned a list; it must return a dtf.Dataset",
    "length_half": "MistakenRows.__len__() gives no number of rows",
    "fetch_raises": "MistakenRows.fetch() raised RuntimeError: the archive is broken",
    "fetch_one": "MistakenRows.fetch() returned a torch.Tensor; it must return two values",
    "fetch_three": "MistakenRows.fetch() returned 3 values; it must return two values",
    "fetch_array": "MistakenRows.fetch() returned a numpy.ndarray as inputs",
    "fetch_sparse": "MistakenRows.fetch() returned inputs that are of layout torch.sparse_coo; they must be dense",
    "fetch_nested": "MistakenRows.fetch() returned inputs that are a nested tensor; they must be dense",
    "fetch_short": "MistakenRows.fetch() returned targets of shape (1,) for 2 ids",
    "fetch_scalar": "MistakenRows.fetch() returned inputs['scale'] of shape () for 2 ids",
    "eval_fetch_short": "MistakenRows.fetch() returned inputs of shape (1, 8) for 2 ids",
    "fetch_draws": "fetch() of the data of open_data('train') gives other numbers for the same ids",
    "receive_raises": "Mistaken.receive() raised",
    "forward_raises": "the forward pass of tail.1 (Part) raised RuntimeError",
    "forward_wrong_width": "the forward pass of tail.1.narrow (Linear) raised RuntimeError",
    "loss_stops": "breakpoint() needs a terminal: use launcher=inline",
    "backward_raises": "the backward pass of the model raised ValueError: no rule for this gradient, at",
    "backward_in_place": "the backward pass of the model raised RuntimeError",
    "loss_raises": "Mistaken.loss() raised ValueError: no such class, at",
    "measure_raises": "Mistaken.measure() raised AttributeError",
    "measure_one_number": "Mistaken.measure() raised ValueError: weighted_sums() got values of shape () for 2 rows",
    "measure_too_few": "Mistaken.measure() returned shape (2,); it must return 3 sums (weights, loss, top1)",
    "measure_scalar": "Mistaken.measure() returned shape ()",
    "measure_list": "Mistaken.measure() returned list",
    "measure_whole_numbers": "Mistaken.measure() returned torch.int64 numbers",
    "measure_no_weight": "as the first sum of 4 rows; it must be the sum of batch.weight",
    "eval_outputs_raises": "Mistaken.eval_outputs() raised IndexError",
    "eval_outputs_flat": "Mistaken.eval_outputs() returned shape (4,) for 4 rows",
    "eval_outputs_list": "Mistaken.eval_outputs() returned list",
    "evaluator_without_rows": "Mistaken has an evaluator(), but eval_outputs() returned None",
    "summarise_raises": "Mistaken.summarise() raised IndexError",
    "summarise_list": "Mistaken.summarise() returned [4.0, ",
}
HERE = "tests/support/mistake"


@cache
def config() -> dict[str, Any]:
    options = ["launcher=inline", "launcher.devices=cpu", "observer=[]", "strategy=ddp", "train.steps=1"]
    plugin = ["plugins=[tests.support.mistakes]", "recipe=mistake", "step.batch_size=16", "checkpoint=off"]
    return compose([*plugin, *options]).config


def train(folder: Path, mistake: str, steps: int = 1, **recipe: Any) -> list[Event]:
    """So many steps in this process; what the rank reports."""
    events: list[Event] = []
    changed = copy.deepcopy(config())
    changed["train"]["steps"] = steps
    changed["recipe"] |= {"mistake": mistake, **recipe}
    work(changed, str(folder), "run", Place(prefix="run/0"), events.append)
    return events


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("forward_memory", "in the forward pass of tail.1 (Part), at tests/support/mistaken_model.py:"),
        ("forward_memory_of_torch", "in the forward pass of tail.1 (Part), at tests/support/mistaken_model.py:"),
        ("forward_memory_of_gpu", "in the forward pass of tail.1 (Part), at tests/support/mistaken_model.py:"),
        ("backward_memory", "in the backward pass of the model, at tests/support/mistaken_model.py:"),
        ("fetch_memory", "in MistakenRows.fetch(), at tests/support/mistakes.py:"),
    ],
)
def test_too_little_memory_is_said_with_the_keys_that_need_less(mistake: str, where: str, tmp_path: Path) -> None:
    failed = train(tmp_path, mistake)[-1]
    assert isinstance(failed, Failed) and failed.exit == Exit.CONFIG
    assert f"there is not enough memory {where}" in failed.message
    assert "smaller step.micro_batch_rows" in failed.message


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_the_first_step(mistake: str, tmp_path: Path) -> None:
    events = train(tmp_path, mistake)
    failed = events[-1]
    assert isinstance(failed, Failed) and not any(isinstance(event, Measured) for event in events)
    assert (failed.exit, failed.step) == (Exit.CONFIG, 0)
    assert MISTAKES[mistake] in failed.message
    if "raised" in MISTAKES[mistake] and mistake != "backward_in_place":  # its line is in no traceback
        assert f"{HERE}" in failed.message and " in " in failed.message.rpartition(HERE)[2]
        assert "Traceback" in failed.traceback  # for the log of the rank


def test_an_error_of_a_later_step_is_named_and_may_be_tried_again(tmp_path: Path) -> None:
    """From the last save: a file of the data may have been away for a moment."""
    failed = train(tmp_path, "fetch_later", steps=6)[-1]
    assert isinstance(failed, Failed) and failed.exit == Exit.BUG
    assert "MistakenRows.fetch() raised OSError: away, at tests/support/mistakes.py:" in failed.message


def test_a_pass_that_fails_says_what_rows_it_got(tmp_path: Path) -> None:
    failed = train(tmp_path, "forward_wrong_width")[-1]
    assert isinstance(failed, Failed)
    assert "; the rows were inputs (2, 8) float32, targets (2,) int64" in failed.message


def test_a_recipe_without_a_mistake_trains(tmp_path: Path) -> None:
    assert not any(isinstance(event, Failed) for event in train(tmp_path, ""))


def test_a_file_of_the_data_that_is_missing_is_an_error_of_the_data(tmp_path: Path) -> None:
    failed = train(tmp_path, "open_data_missing_file")[-1]
    assert isinstance(failed, Failed) and failed.exit == Exit.DATA
    assert "Mistaken.open_data() raised FileNotFoundError" in failed.message


def test_a_method_with_other_arguments_is_named(tmp_path: Path) -> None:
    class Wrong(Toy):
        def loss(self, outputs: Any) -> Any:  # type: ignore[override]
            return outputs

    assert "Wrong.loss()" in str(_named(lambda: Wrong().loss(torch.zeros(2, 4), torch.zeros(2))))  # type: ignore[call-arg]


class Fails(Toy):
    error: Exception | None = None

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        assert self.error is not None
        raise self.error


def _named(call: Callable[[], Any]) -> DtfError | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  it is looked at
        return author_error(error)
    raise AssertionError("it must fail")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("said well"),
        MemoryError(),
        ConnectionResetError("the other side"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        torch.distributed.DistNetworkError("gone"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_errors_of_other_causes_stay_what_they_are(error: Exception) -> None:
    recipe = Fails()
    recipe.error = error
    assert _named(lambda: recipe.loss(None, torch.zeros(1))) is None
    recipe.error = RuntimeError("the same place, another cause")
    assert "Fails.loss() raised" in str(_named(lambda: recipe.loss(None, torch.zeros(1))))


class Photos(torch.utils.data.Dataset):
    """Rows of which one cannot be read, and one is not there."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, row: int) -> Any:
        if row == 7:
            raise ValueError("odd")
        if row == 8:
            raise FileNotFoundError("8.jpg")
        return torch.zeros(2), row


def _failing(items: list[Any]) -> Any:
    raise KeyError("boxes")


@pytest.mark.parametrize("seed", [None, 3])
def test_rows_that_a_torch_data_set_cannot_read_are_named(seed: int | None) -> None:
    rows = map_style(Photos(), seed=seed)
    odd = _named(lambda: rows.fetch(np.array([1, 7]), 0))
    assert isinstance(odd, ConfigError) and "Photos.__getitem__(7) raised ValueError: odd, at tests" in str(odd)
    gone = _named(lambda: rows.fetch(np.array([8]), 0))
    assert isinstance(gone, DataError) and "Photos.__getitem__(8) raised FileNotFoundError: 8.jpg" in str(gone)
    collated = _named(lambda: map_style(Photos(), collate_fn=_failing, seed=seed).fetch(np.array([1]), 0))
    assert "the collate function of dtf.map_style(Photos) raised KeyError: 'boxes', at tests" in str(collated)
    listed = _named(lambda: map_style([1, 2], seed=seed).fetch(np.array([5]), 0))
    assert "row 5 of the data set raised IndexError" in str(listed)


def test_a_function_that_decodes_a_sample_is_named_with_the_row(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("x")
    rows = folder_samples(str(tmp_path), decode=lambda sample: sample["boxes"], target="cls")
    assert "what makes row 1 of the data set raised KeyError: 'boxes', at tests" in str(
        _named(lambda: rows.fetch(np.array([1]), 0))
    )


def test_an_error_inside_dtf_is_not_the_authors() -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return rows_of(x, 0, 1)

    assert _named(lambda: Model()(1)) is None
    assert _named(lambda: socket.create_connection(("", -1))) is None


def test_trial_passes_leave_no_trace() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.total = self.total + x
            return x

    model = Counts()
    with without_trace([model]):
        model(torch.ones(2))
        assert model.seen == 1 and model.total.tolist() == [1, 1]
    assert model.seen == 0 and model.total.tolist() == [0, 0]
