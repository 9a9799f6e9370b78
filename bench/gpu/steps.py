"""The steps of the kit, in the order of their worth: what each needs, and how long it may take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

COMMAND = ("hydra", "omegaconf", "antlr4", "yaml", "rich", "safetensors", "tensorboard", "numpy", "PIL")
"""Modules without which no command of dtf starts."""

PACKAGES = {
    "hydra": "hydra-core",
    "antlr4": "antlr4-python3-runtime",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "grpc": "grpcio",
    "zlib_ng": "zlib-ng",
}
"""Module -> the package that brings it, where its name is another."""

CIFAR10 = "DTF_CIFAR10"
"""The environment variable with the folder or archive of CIFAR-10's images."""

IMAGES = "DTF_IMAGES"
"""The same with JPEG files of natural size, for the figures of decoding."""


@dataclass(frozen=True)
class Step:
    name: str
    about: str
    entry: str  # "module:function", called with a `Job`
    limit_s: float  # it is stopped then
    least_s: float  # it is not begun with less time than that
    modules: tuple[str, ...] = ()
    lacks: Callable[[], str] = lambda: ""
    """Why it cannot run here, beside missing modules; empty: it can."""

    alone: bool = True
    """Whether nothing may run beside it: it measures time."""

    def missing(self) -> list[str]:
        return [PACKAGES.get(module, module) for module in self.modules if not installed(module)]


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _no_cifar10() -> str:
    place = os.environ.get(CIFAR10, "")
    if not place:
        return f"{CIFAR10} is not set; let it name a folder or archive {{train,val}}/<class>/<image>"
    return "" if os.path.exists(os.path.expanduser(place)) else f"{CIFAR10}={place} does not exist"


PAIR = ("numpy", "torchvision")
STEPS = (
    Step("machine", "GPU, driver, libraries, processor", "bench.gpu.machine:run", 60, 5, alone=False),
    Step("waits", "host waits in dtf's steps: none", "bench.gpu.waits:run", 120, 25, PAIR),
    Step("kernels", "optimizers, digests, masks, copies", "bench.gpu.kernels:run", 90, 15, ("numpy",), alone=False),
    Step("nccl", "collectives in a group of one rank", "bench.gpu.collectives:run", 90, 15, alone=False),
    Step("numbers", "a GPU against the CPU, and precisions", "bench.gpu.numbers:run", 240, 45, COMMAND, alone=False),
    Step("shared", "two ranks on one GPU, ResNet", "bench.gpu.shared:resnet", 200, 60, COMMAND, alone=False),
    Step(
        "clicks", "two ranks on one GPU, DeepFM", "bench.gpu.shared:clicks", 200, 60, (*COMMAND, "numba"), alone=False
    ),
    Step("memory_error", "out of memory: text and exit code", "bench.gpu.failures:run", 90, 25, COMMAND, alone=False),
    Step("offload", "fsdp with parameters on the host", "bench.gpu.shared:offload", 120, 40, COMMAND, alone=False),
    Step("memory", "peak memory by strategy", "bench.gpu.memory:run", 180, 45, COMMAND, alone=False),
    Step("resnet50", "steps against a loop written by hand", "bench.gpu.figures:resnet50", 120, 40, PAIR),
    Step("deepfm", "the same for DeepFM", "bench.gpu.figures:deepfm", 75, 25, PAIR),
    Step("compiled", "ResNet-50 compiled, likewise", "bench.gpu.figures:compiled", 200, 90, PAIR),
    Step("images", "JPEG files to the GPU, and rivals", "bench.gpu.images:run", 75, 25, (*PAIR, "simplejpeg", "PIL")),
    Step(
        "cifar10",
        "94 % on CIFAR-10, and how long it takes",
        "bench.gpu.cifar10:run",
        300,
        120,
        (*COMMAND, "torchvision", "simplejpeg"),
        _no_cifar10,
    ),
)
BY_NAME = {step.name: step for step in STEPS}
