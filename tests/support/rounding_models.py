"""Recipes with parameters whose gradient is nothing but rounding: what they become depends on the order of sums.

A plugin: `plugins=[tests.support.rounding_models]`. Also strategies that damage one tensor of such a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.registry import option, register
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.strategies.ddp import Ddp
from tests.support.toy import Toy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dtf.distributed.world import World


@register("recipe", "cancelled_bias")
class CancelledBias(Toy):
    """A bias that the next batch normalisation takes away again."""

    def build_model(self) -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0", "1"), ("3",)), {})


@register("recipe", "key_bias")
class KeyBias(Toy):
    """Attention, whose scores do not change when all keys do alike."""

    def build_model(self) -> nn.Module:
        from torch import nn

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 4)
                self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x[:, :, None])
                scores = self.query(x) @ self.key(x).mT / 8**0.5
                return self.last((scores.softmax(-1) @ self.value(x)).tanh().mean(1))

        return Attention()

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("first",), ("query", "key", "value"), ("last",)), {})


@register("recipe", "torchvision_tiny")
class TorchvisionTiny(Toy):
    """A network of torchvision on 32 pixels that are made of the toy's rows."""

    arch: str = option(default="mobilenet_v3_small", doc="name of the network")

    def build_model(self) -> nn.Module:
        import torchvision

        return torchvision.models.get_model(self.arch, weights=None, num_classes=4)

    def layout(self, model: nn.Module) -> Layout:
        return Layout()

    def receive(self, inputs: torch.Tensor) -> Any:
        import torch

        generator = torch.Generator(inputs.device).manual_seed(1)
        patterns = torch.randn(8, 3 * 32 * 32, generator=generator, device=inputs.device, dtype=inputs.dtype)
        return (inputs @ patterns).view(-1, 3, 32, 32)


@register("strategy", "one_tensor_off")
class OneTensorOff(Ddp):
    """One tensor is wrong by a millionth after the last update only: losses agree."""

    last_step: int = option(default=1, doc="after which it is wrong")
    tensor: str = option(default="3.bias", doc="which")

    def setup(self, task: Task, world: World) -> Program:
        program: Any = Ddp.setup(self, task, world)
        if world.size == 1:
            return program
        apply = program._update.apply

        def wrong(step: int, lr: float) -> Any:
            norm = apply(step, lr)
            if step == self.last_step:
                tensor = program._update.held()[self.tensor]
                tensor.add_(1e-6 * tensor.abs().max())
            return norm

        program._update.apply = wrong
        return program


@register("strategy", "evaluates_wrong")
class EvaluatesWrong(Ddp):
    """An evaluation takes the loss of each row twice on one rank."""

    def setup(self, task: Task, world: World) -> Program:
        program: Any = Ddp.setup(self, task, world)
        evaluate = program.eval_step

        def wrong(batch: Any) -> Any:
            evaluated = evaluate(batch)
            evaluated.sums[1] *= 1 + world.rank
            return evaluated

        program.eval_step = wrong
        return program


@register("strategy", "wrong_module")
class WrongModule(Ddp):
    """A layer in the middle adds a millionth on one rank in training, once that was checked at the start."""

    def setup(self, task: Task, world: World) -> Program:
        program: Any = Ddp.setup(self, task, world)
        layer = program._replica.model.get_submodule("5")
        warmup = program.warmup

        def then_wrong(batch: Any) -> None:
            warmup(batch)
            if world.rank:
                layer.register_forward_hook(lambda module, inputs, output: output + 1e-6 * module.training)

        program.warmup = then_wrong
        return program


@register("recipe", "wrong_layout")
class WrongLayout(CancelledBias):
    """Its layout divides the rows of a batch normalisation."""

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0", "1"), ("3",)), {"0": Split.column, "1": Split.row})
