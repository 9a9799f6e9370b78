"""The precisions of the tests' runs, by name."""

from __future__ import annotations

from dtf.api.precision import Cast, Format, Precision

PRECISIONS = {
    "fp64": Precision(param=Format.fp64, compute=Format.fp64),
    "fp32": Precision(),
    "bf16": Precision(compute=Format.bf16, cast=Cast.autocast),
    "bf16_params": Precision(param=Format.bf16, compute=Format.bf16),
    "bf16_master": Precision(compute=Format.bf16),
    "fp16": Precision(compute=Format.fp16, cast=Cast.autocast, loss_scale=2.0**13),
}
