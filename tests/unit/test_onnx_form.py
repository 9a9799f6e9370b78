"""A model as an ONNX file: what ONNX Runtime says of it, and what cannot be written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dtf
from dtf.core.errors import ConfigError
from dtf.jobs.export import check_onnx
from dtf.jobs.onnx_form import write_onnx
from dtf.jobs.rank_export import _difference, _program


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(3, 2), nn.Embedding(10, 3)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"b": self.linear(inputs["z"]), "a": self.embedding(inputs["ids"]).sum(1)}


@torch.library.custom_op("dtf_tests::foreign", mutates_args=())
def foreign(x: Tensor) -> Tensor:
    return x.clone()


@foreign.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return foreign(x)


def written(path: Path, model: nn.Module, inputs: Any) -> Any:
    return write_onnx(path, _program(model, inputs), inputs, model(inputs), {"dtf.json": "{}"}, 1)


def test_an_onnx_file_says_what_the_model_says(tmp_path: Path) -> None:
    """Of any number of rows, with the model's own names of inputs and outputs."""
    model = Two().eval().requires_grad_(False)
    inputs = {"z": torch.randn(5, 3), "ids": torch.randint(0, 10, (5, 2))}
    run = written(tmp_path / "m.onnx", model, inputs)
    for rows in (5, 1, 3):
        some = {name: tensor[:rows] for name, tensor in inputs.items()}
        assert _difference(model(some), run(some)) < 1e-6
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert [(value.name, value.shape) for value in session.get_inputs()] == [
        ("z", ["batch", 3]),
        ("ids", ["batch", 2]),
    ]
    assert [value.name for value in session.get_outputs()] == ["b", "a"]
    assert session.get_modelmeta().custom_metadata_map == {"dtf.json": "{}"}


def test_what_no_file_can_be_made_of_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = dtf.compose(["job=export", "recipe=ctr_clicks_sparse", "job.forms=[onnx]"]).settings
    with pytest.raises(ConfigError, match=r"GeneratedClicks has sparse tables \(ids\).*job.forms=\[pt2,safetensors\]"):
        check_onnx(sparse)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ConfigError, match=r"needs onnxscript, which is not installed: .* 'dtf\[onnx\]'"):
        check_onnx(sparse)


@pytest.mark.slow
def test_an_operation_that_onnx_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ONNX cannot hold this model: .*dtf_tests.foreign.*job.forms=\[pt2,safe"):
        written(tmp_path / "m.onnx", Foreign(), torch.randn(5, 3))
    assert not (tmp_path / "m.onnx").exists()
