"""A causal language model small enough to run in milliseconds, and ones that no rank can compute from a part of the
positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.recipes.gpt.recipe import GptText, ModelOptions, TextOptions

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

LENGTH, EVAL_ROWS = 7, 20
"""An odd number of positions: ranks get different numbers of them."""


@register("recipe", "causal")
class Causal(GptText):
    """gpt_text over few rows. `plain`: attention by products and a softmax, of which dtf knows nothing. `counted`: it
    adds to the positions it gets what belongs to the first ones, which starts at zero. `torch_loss`: that of torch.
    `early`: the first norm of the last block is also before the blocks.
    `drops`: dropout as well by a function at the end of each block, and behind the positions, where all positions have
    one norm: "rows" of (B, T, D), or "flat", of (B * T, D).
    """

    rows: int = option(default=42, doc="training rows", unit="rows")
    heads: int = option(default=4, doc="heads of attention")
    plain: bool = option(default=False, doc="whether attention is written out")
    counted: bool = option(default=False, doc="whether attention counts positions itself")
    scaled: bool = option(default=False, doc="whether a norm keeps a running scale, a buffer")
    torch_loss: bool = option(default=False, doc="whether the loss is a function of torch")
    early: bool = option(default=False, doc="whether a norm of all positions is also one of some")
    drops: str = option(default="", doc="what is dropped behind norms: rows, flat, or nothing")

    def __post_init__(self) -> None:
        self.model = ModelOptions(layers=2, heads=self.heads, width=16, mlp_ratio=2, dropout=0.2)
        self.data = TextOptions(length=LENGTH)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.scaled:
            model.blocks[0].norm2 = _scaled(model.blocks[0].norm2)  # type: ignore[union-attr,index]
        if self.early:
            _normalise_early(model)
        if self.plain or self.counted:
            make = _plain if self.plain else _counted
            for block in model.blocks:  # type: ignore[union-attr]
                make(block.attention)  # type: ignore[union-attr]
        if self.drops:
            _dropping(model, self.drops == "flat")
        return model

    def layout(self, model: nn.Module) -> Layout:
        found = super().layout(model)
        if not self.drops:
            return found
        blocks = (*found.blocks[:-1], ("norm", "drop", "head"))
        return Layout(blocks, found.splits, positions=found.positions[:-1])

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        from torch.nn import functional

        if self.torch_loss:
            return functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)
        return super().loss(outputs, targets)

    def open_data(self, split: str, seed: int) -> Dataset:
        return Words(self.rows if split == "train" else EVAL_ROWS, split)


class Words(Dataset):
    """Rows of bytes."""

    prefetch = 0

    def __init__(self, rows: int, split: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(len(split))
        self._tokens = torch.randint(97, 123, (rows, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rows = self._tokens[torch.from_numpy(ids)]
        return rows[:, :-1], rows[:, 1:]


def _scaled(norm: nn.Module) -> nn.Module:
    from torch import nn

    class Scaled(nn.Sequential):
        scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.training:
                self.scale.mul_(0.9).add_(0.1 * y.detach().abs().amax())
            return y

    module = Scaled(norm)
    module.register_buffer("scale", norm.weight.detach().sum() * 0)  # type: ignore[operator,union-attr]
    return module


def _plain(attention: Any) -> None:
    class Plain(type(attention)):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
            later = x.new_ones(x.shape[1], x.shape[1]).triu(1).bool()
            weights = (query @ key.transpose(2, 3) / 2).masked_fill(later, float("-inf")).softmax(-1)
            return self.out((weights @ value).transpose(1, 2).flatten(2))

    attention.__class__ = Plain


def _normalise_early(model: Any) -> None:
    import torch

    norm = torch.nn.LayerNorm(16)
    norm.weight = model.blocks[1].norm1.weight
    model.dropout = torch.nn.Sequential(norm, model.dropout)


def _counted(attention: Any) -> None:
    import torch

    class Counted(type(attention)):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.places[: x.shape[1]])

    attention.__class__, attention.places = Counted, torch.nn.Parameter(torch.zeros(LENGTH, 16))


def _dropping(model: Any, flat: bool) -> None:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(type(model.blocks[0])):
        def forward(self, x: Tensor) -> Tensor:
            x = self.after(super().forward(x))
            dropped = functional.dropout(x.flatten(0, 1) if flat else x, 0.3, self.training)
            return dropped.view_as(x)

    class Model(type(model)):
        def forward(self, tokens: Tensor) -> Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.dropout(self.embedding(tokens) + self.positions(places))
            for block in self.blocks:
                x = block(x)
            return self.head(self.drop(self.norm(x)))

    model.__class__, model.drop = Model, nn.Dropout(0.3)
    for block in model.blocks:
        block.__class__, block.after = Block, nn.LayerNorm(16)


def refuse(rank: int, size: int, **case: Any) -> str:
    """What the start of a run says."""
    from dtf.core.errors import ConfigError
    from tests.support.harness import start

    try:
        start(rank, size, **case)
    except ConfigError as error:
        return str(error)
    return ""
