"""Number formats of a run: a value with five fields, and the options that give them names."""

from __future__ import annotations

import math
from enum import Enum

from dtf.api.registry import option, register, with_default
from dtf.core.errors import ConfigError


class Format(Enum):
    """Number formats of parameters and of computation."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Cast(Enum):
    """How `precision.compute` is reached where it differs from `precision.param`."""

    autocast = "autocast"
    module = "module"


HALF = (Format.bf16, Format.fp16)


@register("precision", "fp32")
class Precision:
    """Which number format holds the parameters, which one computes, and whether the loss is scaled."""

    param: Format = option(
        default=Format.fp32, doc="format in which the optimizer keeps parameters; checkpoints hold this one"
    )
    compute: Format = option(default=Format.fp32, doc="format of forward and backward")
    cast: Cast = option(
        default=Cast.module,
        doc="how `compute` is reached when it differs from `param`: `autocast` casts operation by operation, `module` "
        "keeps a copy of the module "
        "in `compute` (the optimizer's is the master copy); batch normalisation stays in fp32 either way",
    )
    tf32: bool = option(default=False, doc="let CUDA matrix units round fp32 inputs to tf32")
    loss_scale: float = option(default=0.0, doc="first value of the dynamic loss scale, for fp16; 0: no scaling")

    def check(self, devices: str | None = None) -> None:
        """Raise ConfigError for combinations that make no sense.

        `devices`: `cpu` or `cuda`; None while it is unknown.
        """
        pair = f"precision.param={self.param.value} with precision.compute={self.compute.value}"
        if self.param is Format.fp16:
            raise ConfigError(
                "precision.param=fp16 loses small updates; use param=fp32 or param=bf16, and fp16 for "
                "precision.compute only"
            )
        if self.compute is not self.param and (self.param is not Format.fp32 or self.compute not in HALF):
            raise ConfigError(
                f"{pair} gains nothing; compute in the format of the parameters, or in bf16 or fp16 with param=fp32"
            )
        if self.cast is Cast.autocast and self.compute is self.param:
            raise ConfigError(
                f"precision.cast=autocast has nothing to cast: {pair}; use cast=module, or compute=bf16 or "
                "compute=fp16 with param=fp32"
            )
        if self.tf32 and self.compute is not Format.fp32:
            raise ConfigError(
                f"precision.tf32=true rounds fp32 only, compute is {self.compute.value}; use tf32=false or compute=fp32"
            )
        if self.tf32 and devices == "cpu":
            raise ConfigError(
                "precision.tf32=true needs CUDA, this run is on cpu; use precision=fp32 or precision=bf16"
            )
        if self.compute is Format.fp16 and not 1.0 <= self.loss_scale < math.inf:
            raise ConfigError(
                f"precision.loss_scale={self.loss_scale:g} lets fp16 gradients vanish; use a finite number of at "
                "least 1, e.g. 65536"
            )
        if self.compute is not Format.fp16 and self.loss_scale:
            raise ConfigError(
                f"precision.loss_scale={self.loss_scale:g} is for fp16, compute is {self.compute.value}; use "
                "loss_scale=0 or compute=fp16"
            )


@register("precision", "bf16", variant_of="fp32")
class Bf16(Precision):
    """The default choice for speed: matrix products in bf16, operation by operation; parameters, sums and losses stay
    fp32.
    """

    compute: Format = with_default(Precision, "compute", Format.bf16)
    cast: Cast = with_default(Precision, "cast", Cast.autocast)


@register("precision", "bf16_master", variant_of="fp32")
class Bf16Master(Precision):
    """bf16 modules without the casts of autocast; the optimizer keeps an fp32 master copy, so no update is lost."""

    compute: Format = with_default(Precision, "compute", Format.bf16)


@register("precision", "bf16_params", variant_of="fp32")
class Bf16Params(Precision):
    """Least memory: parameters and optimizer state in bf16 too; updates below 1/256 of a weight are lost."""

    param: Format = with_default(Precision, "param", Format.bf16)
    compute: Format = with_default(Precision, "compute", Format.bf16)


@register("precision", "fp16", variant_of="fp32")
class Fp16(Precision):
    """For GPUs without bf16: fp16 has few exponent bits, so the loss is scaled as far as gradients do not overflow."""

    compute: Format = with_default(Precision, "compute", Format.fp16)
    cast: Cast = with_default(Precision, "cast", Cast.autocast)
    loss_scale: float = with_default(Precision, "loss_scale", 65536.0)


@register("precision", "fp64", variant_of="fp32")
class Fp64(Precision):
    """For proofs, not for speed: job=verify separates rounding from errors with it."""

    param: Format = with_default(Precision, "param", Format.fp64)
    compute: Format = with_default(Precision, "compute", Format.fp64)


@register("precision", "tf32", variant_of="fp32")
class Tf32(Precision):
    """fp32 at the speed of tensor cores (CUDA only): inputs of matrix products keep 10 bits of mantissa; sums and
    parameters stay fp32.
    """

    tf32: bool = with_default(Precision, "tf32", True)


def set_switches(precision: Precision) -> None:
    """Process-wide switches of torch: the same bits each time, and no silent change of number format."""
    import torch

    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
