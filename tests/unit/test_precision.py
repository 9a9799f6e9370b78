"""Precision: the shipped options are sound, and combinations that make no sense are refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from dtf.api.precision import Cast, Format, Precision
from dtf.api.registry import registered
from dtf.config.compose import compose
from dtf.core.errors import ConfigError

FILES = sorted((Path(__file__).parents[2] / "conf" / "precision").glob("*.yaml"))
OPTIONS = {
    "bf16": Precision(compute=Format.bf16, cast=Cast.autocast),
    "bf16_master": Precision(compute=Format.bf16),
    "bf16_params": Precision(param=Format.bf16, compute=Format.bf16),
    "fp16": Precision(compute=Format.fp16, cast=Cast.autocast, loss_scale=65536.0),
    "fp32": Precision(),
    "fp64": Precision(param=Format.fp64, compute=Format.fp64),
    "tf32": Precision(tf32=True),
}


def load(name: str) -> Precision:
    return compose([f"precision={name}"]).settings.precision


def test_every_shipped_option_is_tested_and_says_why() -> None:
    assert {path.stem for path in FILES} == set(OPTIONS) == set(registered("precision"))
    assert all(path.read_text().startswith("# ") for path in FILES)


@pytest.mark.parametrize("name", OPTIONS)
def test_shipped_options_are_what_they_are_called(name: str) -> None:
    found = load(name)
    found.check("cuda")
    assert asdict(found) == asdict(OPTIONS[name])


def test_default_is_plain_fp32() -> None:
    Precision().check("cpu")
    assert (Precision().param, Precision().compute, Precision().loss_scale) == (Format.fp32, Format.fp32, 0.0)


@pytest.mark.parametrize(
    ("precision", "devices", "message"),
    [
        (
            Precision(param=Format.fp16, compute=Format.fp16, loss_scale=8.0),
            None,
            r"precision\.param=fp16 loses small updates",
        ),
        (
            Precision(param=Format.bf16, compute=Format.fp32),
            None,
            r"precision\.param=bf16 with precision\.compute=fp32 gains nothing",
        ),
        (Precision(param=Format.fp32, compute=Format.fp64), None, r"gains nothing"),
        (Precision(param=Format.fp64, compute=Format.bf16), None, r"gains nothing"),
        (Precision(cast=Cast.autocast), None, r"precision\.cast=autocast has nothing to cast"),
        (Precision(param=Format.bf16, compute=Format.bf16, cast=Cast.autocast), None, r"nothing to cast"),
        (
            Precision(param=Format.fp64, compute=Format.fp64, tf32=True),
            None,
            r"precision\.tf32=true rounds fp32 only, compute is fp64",
        ),
        (Precision(compute=Format.bf16, cast=Cast.autocast, tf32=True), None, r"precision\.tf32=true rounds fp32 only"),
        (Precision(tf32=True), "cpu", r"precision\.tf32=true needs CUDA"),
        (Precision(compute=Format.fp16), None, r"precision\.loss_scale=0 lets fp16 gradients vanish"),
        (Precision(compute=Format.fp16, loss_scale=float("inf")), None, r"precision\.loss_scale=inf"),
        (Precision(loss_scale=1024.0), None, r"precision\.loss_scale=1024 is for fp16, compute is fp32"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(precision: Precision, devices: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        precision.check(devices)


def test_tf32_passes_while_devices_are_unknown() -> None:
    Precision(tf32=True).check()
