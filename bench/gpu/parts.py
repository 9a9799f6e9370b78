"""A plugin of dtf for the kit: several ranks on one GPU, which talk by gloo, as NCCL refuses to; and a model that needs
more memory than there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.registry import register
from dtf.host.devices import Devices
from dtf.launch.local import Local
from dtf.recipes.resnet.recipe import ResnetShapes
from dtf.strategies.fsdp import Fsdp
from dtf.strategies.pipeline.strategy import Pipeline
from dtf.strategies.tensor import Tensor as TensorParallel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dtf.api.strategy import Program
    from dtf.api.task import Task
    from dtf.distributed.world import World

RANKS = 16
"""The most ranks on one GPU."""

GLOO = "cpu:gloo,cuda:gloo"
"""In this form, and not as `gloo`: some versions of torch give device meshes of a world of gloo groups of NCCL."""

SHARE = 0.01
"""Of the GPU's memory, for `gpu_crowded`."""


@register("launcher", "one_gpu")
class OneGpu(Local):
    """As `local`, with all ranks on the first GPU. Without a GPU it is `local`."""

    def chosen_devices(self) -> Devices:
        chosen = super().chosen_devices()
        return chosen._replace(indices=chosen.indices[:1] * RANKS)


@register("strategy", "fsdp_gloo")
class FsdpGloo(Fsdp):
    """`fsdp` for ranks that share a GPU."""

    def communication(self, devices: str) -> str | None:
        return GLOO


@register("strategy", "tensor_gloo")
class TensorGloo(TensorParallel):
    """`tensor` for ranks that share a GPU."""

    def communication(self, devices: str) -> str | None:
        return GLOO


@register("strategy", "pipeline_gloo")
class PipelineGloo(Pipeline):
    """`pipeline` for ranks that share a GPU. Messages go through host memory: gloo sends no others."""

    def communication(self, devices: str) -> str | None:
        return GLOO

    def setup(self, task: Task, world: World) -> Program:
        from dtf.distributed import p2p

        p2p.dist = ByHost(p2p.dist)  # type: ignore[assignment]
        return super().setup(task, world)


class ByHost:
    """torch.distributed, with messages through host memory."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distributed, name)

    def isend(self, tensor: torch.Tensor, target: int, group: Any = None, tag: int = 0) -> Any:
        return _Sent(self._distributed, tensor.cpu(), target, group, tag)

    def irecv(self, tensor: torch.Tensor, source: int, group: Any = None, tag: int = 0) -> Any:
        return _Received(self._distributed, tensor, source, group, tag)


class _Sent:
    """The copy must stay until it is sent."""

    def __init__(self, distributed: Any, copy: torch.Tensor, target: int, group: Any, tag: int) -> None:
        self._copy = copy
        self._work = distributed.isend(copy, target, group=group, tag=tag)

    def wait(self) -> None:
        self._work.wait()


class _Received:
    def __init__(self, distributed: Any, tensor: torch.Tensor, source: int, group: Any, tag: int) -> None:
        self._tensor = tensor
        self._copy = tensor if tensor.device.type == "cpu" else tensor.cpu()
        self._work = distributed.irecv(self._copy, source, group=group, tag=tag)

    def wait(self) -> None:
        self._work.wait()
        if self._copy is not self._tensor:
            self._tensor.copy_(self._copy)


@register("recipe", "gpu_crowded")
class Crowded(ResnetShapes):
    """`resnet_shapes` on a GPU of which it may use a hundredth; without a GPU a pass over many rows says what a GPU
    would.
    """

    def build_model(self) -> nn.Module:
        import torch

        model = super().build_model()
        if torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(SHARE)
        else:
            model.register_forward_pre_hook(_refuse_many)
        return model


def _refuse_many(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    import torch

    if len(inputs[0]) > 16:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB (rehearsed)")
