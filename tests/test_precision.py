"""Precision: the shipped options are sound, and combinations that make no sense are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from dtf.errors import ConfigError
from dtf.precision import Cast, Format, Precision

OPTIONS = sorted((Path(__file__).parent.parent / "conf" / "precision").glob("*.yaml"))


def load(path: Path) -> Precision:
    node = yaml.safe_load(path.read_text())
    assert node.pop("defaults") == ["schema/fp32@_here_", "_self_"]
    made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Precision), node))
    assert isinstance(made, Precision)
    return made


def test_shipped_options_are_the_documented_ones() -> None:
    assert [path.stem for path in OPTIONS] == ["bf16", "bf16_master", "bf16_params", "fp16", "fp64", "tf32"]


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
def test_shipped_options_are_sound_and_say_why(path: Path) -> None:
    load(path).check("cuda")
    assert path.read_text().startswith("# ")


def test_shipped_options_differ() -> None:
    made = [Precision(), *map(load, OPTIONS)]
    assert all(one != other for index, one in enumerate(made) for other in made[:index])


def test_default_is_plain_fp32() -> None:
    Precision().check("cpu")
    assert (Precision().param, Precision().compute, Precision().loss_scale) == (Format.fp32, Format.fp32, 0.0)


@pytest.mark.parametrize(
    ("precision", "devices", "message"),
    [
        (Precision(param=Format.fp16, compute=Format.fp16, loss_scale=8.0), None, r"precision\.param=fp16 loses small updates"),
        (Precision(param=Format.bf16, compute=Format.fp32), None, r"precision\.param=bf16 with precision\.compute=fp32 gains nothing"),
        (Precision(param=Format.fp32, compute=Format.fp64), None, r"gains nothing"),
        (Precision(param=Format.fp64, compute=Format.bf16), None, r"gains nothing"),
        (Precision(cast=Cast.autocast), None, r"precision\.cast=autocast has nothing to cast"),
        (Precision(param=Format.bf16, compute=Format.bf16, cast=Cast.autocast), None, r"nothing to cast"),
        (Precision(param=Format.fp64, compute=Format.fp64, tf32=True), None, r"precision\.tf32=true rounds fp32 only, compute is fp64"),
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
