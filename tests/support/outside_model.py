"""A recipe that holds tensors which need a gradient past the parameters of its model. A plugin.

Kinds: `criterion`: a loss with a weight, in the recipe. `listed`: a layer of the model in a plain list. `teacher`: one
that is used without a gradient. `inputs`: a gradient by inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import Tensor, nn


@register("recipe", "outside")
class Outside(Toy):
    kind: str = option(default="criterion", doc="what is held")

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        kind = self.kind
        if kind == "criterion":
            self.scales = {"log": nn.Linear(1, 1).double()}

        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)
                self.held = [nn.Linear(8, 8).double()]

            def forward(self, x: Tensor) -> Tensor:
                if kind == "listed":
                    return self.layer(x) + self.held[0](x.double()).to(x)
                if kind == "teacher":
                    with torch.no_grad():
                        target = self.held[0](x.double())
                    return self.layer(x) + target.to(x)
                if kind == "inputs" and torch.is_grad_enabled():
                    x = x.detach().requires_grad_()
                return self.layer(x)

        return nn.Sequential(First(), nn.Linear(8, 4))

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0",), ("1",)), {"1": Split.classes})

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        loss = super().loss(outputs, targets)
        return loss * self.scales["log"].weight.exp().squeeze() if self.kind == "criterion" else loss
