"""A model whose constructor draws and ties in ways of its own, as strangers write them. A plugin.

`authored` starts from what the constructor makes, `by_name` is drawn by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout, Split
from dtf.api.registry import register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "authored")
class Authored(Toy):
    def build_model(self) -> nn.Module:
        from tests.support.authored_model import Model

        return Model()

    def layout(self, model: nn.Module) -> Layout:
        splits = {"mlp.up": Split.column, "mlp.down": Split.row}
        return Layout((("embed",), ("attention",), ("mlp",), ("head",)), splits)


@register("recipe", "by_name")
class ByName(Toy):
    def build_model(self) -> nn.Module:
        from tests.support.authored_model import Plain

        return Plain()

    def initialise(self, name: str, module: nn.Module) -> None:
        import torch

        super().initialise(name, module)
        if name == "":
            torch.nn.init.normal_(module.token, std=0.5)  # type: ignore[arg-type]

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("first",), ("last",)), {"last": Split.classes})
