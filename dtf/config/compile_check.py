"""Whether a run can be compiled, as far as can be told before ranks start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dtf.api.options import Compile, Remat
from dtf.api.schema import KeyProblem
from dtf.host.compiler import check_cache_folder, compiler_lack

if TYPE_CHECKING:
    from dtf.config.settings import Settings


def check_compile(settings: Settings, devices: str, processes: int) -> None:
    """Raise KeyProblem for a `step.compile` that nothing here can do, and ConfigError for a folder of machine code that
    keeps torch from being imported. Jobs that do not train compile nothing.
    """
    step, environment = settings.step, os.environ | getattr(settings.launcher, "env", {})
    check_cache_folder(environment)
    if step.compile is Compile.off or not settings.job.trains:
        return
    asked = f"step.compile={step.compile.value}"
    if step.remat is Remat.selective:
        raise KeyProblem(
            "step.compile",
            f"{asked} hides from step.remat=selective the results that it keeps; use step.remat=blocks",
        )
    if step.compile is Compile.model and step.remat is not Remat.none:
        raise KeyProblem(
            "step.compile",
            f"{asked} makes one piece of the model, and step.remat={step.remat.value} computes parts of it again; use "
            "step.compile=blocks",
        )
    why = settings.strategy.uncompiled(step.compile, processes)
    if why:
        raise KeyProblem("step.compile", f"{asked} does not work with this strategy: {why}")
    lack = compiler_lack(devices, environment)
    if lack:
        raise KeyProblem("step.compile", f"{asked} cannot compile here: {lack}; or use step.compile=off")
