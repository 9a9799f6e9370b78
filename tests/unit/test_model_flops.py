"""What a rate of rows means in operations, and the peaks of GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtf.api.precision import Precision
from dtf.api.registry import lookup
from dtf.engine.model_flops import ModelFlops
from dtf.host.peak_flops import peak_flops

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "number_format", "tera"),
    [
        (H100, "bf16", 989.4),
        (H100, "tf32", 494.7),
        (H100, "fp32", 67),
        (H100, "fp64", 67),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L4", "bf16", 121),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # it has no tensor cores for that
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("Radeon", "fp32", None),
    ],
)
def test_the_peak_of_a_gpu(name: str, number_format: str, tera: float | None) -> None:
    assert peak_flops(name, number_format) == (None if tera is None else pytest.approx(1e12 * tera))


def made(
    monkeypatch: pytest.MonkeyPatch, names: list[list[str]], precision: Precision, flops: float | None, vary: bool
) -> ModelFlops:
    """On ranks with GPUs of these names; without names, on a CPU. A name of two ranks is one GPU, but for its end."""
    everyone = [[(name, name.rstrip("*")) for name in some] for some in names]
    world = SimpleNamespace(device=torch.device("cuda" if names else "cpu"), gather=lambda value: everyone)
    properties = SimpleNamespace(uuid=0, name="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    program: Any = SimpleNamespace(row_flops=flops, devices=())
    return ModelFlops(program, precision, world, vary)  # type: ignore[arg-type]


def test_a_share_of_what_all_devices_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(
        monkeypatch, [[H100], [H100], [f"{H100}*", "NVIDIA L4"]], lookup("precision", "bf16")(), 1e9, vary=False
    )
    assert found.values(1e6) == {"model_flops_per_s": 1e15, "mfu": pytest.approx(1e15 / (2 * 989.4e12 + 121e12))}
    assert found.row() == {
        "arithmetic": "1 GFLOP a row in matrix products and convolutions; 2.1 PFLOP/s are the peak of 2 x NVIDIA H100 "
        "80GB HBM3, 1 x NVIDIA L4 in bf16"
    }


@pytest.mark.parametrize("names", [[], [["Radeon"]], [[H100], ["Radeon"]]], ids=str)
def test_without_a_known_peak_there_is_no_share(names: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch, names, lookup("precision", "fp64")(), 1e9, vary=False)
    assert found.values(10.0) == {"model_flops_per_s": 1e10} and "peak" not in found.row()["arithmetic"]


@pytest.mark.parametrize(("flops", "vary"), [(None, False), (0.0, False), (1e9, True)])
def test_what_is_not_known_is_not_shown(flops: float | None, vary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of it is of an embedding, and rows of other lengths take other numbers of operations."""
    found = made(monkeypatch, [[H100]], lookup("precision", "tf32")(), flops, vary)
    assert found.values(10.0) == found.row() == {}
