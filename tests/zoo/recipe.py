"""The recipe `zoo`: any entry of the zoo under dtf, with what every recipe has and nothing more. A plugin."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dtf.api.layout import BufferUpdate, Layout, Split, SplitBy
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from dtf.core.types import Batch
    from tests.zoo.entries import ZooModel


def _chain(*names: str) -> tuple[tuple[str, ...], ...]:
    """Blocks of one module each."""
    return tuple((name,) for name in names)


def _mlps(*names: str) -> dict[str, Split | SplitBy]:
    """Splits of two layers of each module: the first by its outputs, the last by its inputs."""
    return {f"{name}.{end}": by for name in names for end, by in (("0", Split.column), ("2", Split.row))}


def _mlps_of_timm(*names: str) -> dict[str, Split | SplitBy]:
    """The same, of timm's `Mlp`."""
    ends = ("fc1", Split.column), ("drop1", Split.local), ("fc2", Split.row)
    return {f"{name}.{end}": by for name in names for end, by in ends}


def _attention(name: str, heads: int, width: int) -> dict[str, Split | SplitBy]:
    """Splits of attention with one projection for queries, keys and values."""
    return {
        f"{name}.qkv": SplitBy(heads=heads, parts=(width,) * 3),
        f"{name}.drop": SplitBy(Split.local, heads),
        f"{name}.out": SplitBy(Split.row, heads),
    }


LAYOUTS: dict[str, Layout] = {
    "writes_into_its_rows": Layout((("first",), ("last",))),
    "gpt_tied": Layout(
        (("embed",), ("place",), ("blocks.0",), ("blocks.1",), ("ln",)), _mlps("blocks.0.mlp", "blocks.1.mlp")
    ),
    "gpt_tied_modules": Layout((("embed",), ("first",), ("second",), ("ln", "head")), _mlps("first.mlp", "second.mlp")),
    "class_token": Layout(splits=_mlps("block.mlp")),
    "mixture_of_experts": Layout(splits=_mlps(*(f"moe.experts.{i}" for i in range(3)))),
    "heads_by_size": Layout(
        _chain("embed", "attention", "head"), _attention("attention", 2, 12) | {"attention.norm": Split.whole}
    ),
    "grouped_queries": Layout(
        splits={
            "q": SplitBy(heads=4, groups=2),
            "kv": SplitBy(heads=4, groups=2, parts=(6, 6)),
            "out": SplitBy(Split.row, heads=4, groups=2),
        }
    ),
    "heads_by_count": Layout(_chain("embed", "attention", "head"), _attention("attention", 2, 12)),
    "heads_by_count_and_width": Layout(_chain("embed", "attention", "head"), _attention("attention", 2, 12)),
    "timm_vit": Layout(splits=_mlps_of_timm("blocks.0.mlp", "blocks.1.mlp")),
    "timm_deit": Layout(splits=_mlps_of_timm("blocks.0.mlp", "blocks.1.mlp")),
    "timm_beit": Layout(splits=_mlps_of_timm("blocks.0.mlp", "blocks.1.mlp")),
    "timm_cait": Layout(splits=_mlps_of_timm("blocks.0.mlp", "blocks.1.mlp", "blocks_token_only.0.mlp")),
    "timm_xcit": Layout(splits=_mlps_of_timm("blocks.0.mlp")),
    "timm_mixer": Layout(splits=_mlps_of_timm("blocks.0.mlp_tokens", "blocks.1.mlp_channels")),
    **{
        f"hf_{name}": Layout(
            _chain(f"{name}.embeddings", *(f"{name}.encoder.layer.{i}" for i in range(3)), "classifier")
        )
        for name in ("bert", "roberta")
    },
    "gru_language_model": Layout((("embed",), ("gru",), ("decoder",))),
    "batch_norm": Layout((("0", "1"), ("3",)), {"0": Split.column, "1": Split.local, "3": Split.row}),
    "deep": Layout(tuple((str(i),) for i in (0, 2, 4, 6, 8)), {"0": Split.column, "2": Split.row}),
    "dropout_layers": Layout((("0",), ("3",)), {"0": Split.column, "2": Split.local, "3": Split.row}),
    "dropout_unnamed": Layout(_chain("0", "3", "4"), {"0": Split.column, "3": Split.row}),
    "very_deep": Layout(_chain(*(str(i) for i in (0, *range(1, 121, 2), 121)))),
    "frozen_half": Layout((("0", "1"), ("3",), ("4",))),
    "encoder": Layout(_chain("embed", "encoder", "head")),
    "gru": Layout(_chain("embed", "rnn", "head")),
    "siamese": Layout(_chain("encoder", "head")),
    "siamese_declared": Layout(_chain("encoder", "head")),
    "unet": Layout(_chain("down1", "down2", "bottom", "up2", "join2", "up1", "join1", "head")),
    "places_in_attribute": Layout(_chain("embed", "qkv", "head")),
    "places_registered_declared": Layout(_chain("embed", "qkv", "head")),
    "cached_mask": Layout(_chain("embed", "qkv", "head")),
    "lstm_weight_norm": Layout(_chain("embed", "lstm", "head")),
    "film": Layout((("words",), ("film",), ("conv", "bn"), ("head",))),
    "bilinear": Layout(_chain("join", "last")),
    "loss_inside": Layout(_chain("first", "last")),
    "temperature": Layout(_chain("left", "right")),
    "fourier_mixing": Layout(_chain("embed", "norm", "head")),
    "adaptive_softmax": Layout(_chain("first", "softmax")),
    "quantisation_aware": Layout(_chain("first", "last")),
    "resnet": Layout((("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",), ("layer4",), ("fc",))),
    "convnext_still": Layout(_chain(*(f"features.{i}" for i in range(4)), "classifier")),
    "vit": Layout(
        (("conv_proj",), *((f"encoder.layers.encoder_layer_{i}",) for i in range(2)), ("encoder.ln", "heads"))
    ),
}
"""What the authors of some entries would say of their parts. All others say nothing."""


@register("recipe", "zoo")
class Zoo(Recipe):
    which: str = option(default="gru", doc="name of the entry")
    rows: int = option(default=42, doc="training rows", unit="rows")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss",)

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    @property
    def entry(self) -> ZooModel:
        """What is trained."""
        from tests.zoo.entries import load_zoo

        return load_zoo()[self.which]

    def check(self) -> None:
        pass

    def build_model(self) -> nn.Module:
        return self.entry.build()

    def layout(self, model: nn.Module) -> Layout:
        rules = {pattern: BufferUpdate(rule) for pattern, rule in self.entry.buffers.items()}
        return replace(LAYOUTS.get(self.which, Layout()), buffers=rules)

    def open_data(self, split: str, seed: int) -> Dataset:
        from tests.zoo.plain import EVALUATED

        return Rows(self.entry, self.rows if split == "train" else EVALUATED, len(split))

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.entry.loss(outputs, targets)

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss)


class Rows(Dataset):
    """The rows of an entry, in memory."""

    prefetch = 0

    def __init__(self, entry: ZooModel, rows: int, seed: int) -> None:
        self._inputs, self._targets = entry.rows(rows, seed)

    def __len__(self) -> int:
        return len(self._targets)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        import torch

        rows = torch.from_numpy(ids)
        if isinstance(self._inputs, dict):
            return {name: tensor[rows] for name, tensor in self._inputs.items()}, self._targets[rows]
        return self._inputs[rows], self._targets[rows]
