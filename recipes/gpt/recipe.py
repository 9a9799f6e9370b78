"""The recipe of a language model over bytes: its config nodes, and how network, text and loss are put together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split, SplitBy
from dtf.api.options import FineTuning
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.api.sampler import RowTrait
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtf.core.types import Batch


@dataclass(kw_only=True)
class ModelOptions(FineTuning):
    layers: int = option(default=2, least=1, most=1024, doc="blocks of attention and MLP")
    heads: int = option(default=4, least=1, most=1024, doc="heads of attention in each block; they divide the width")
    width: int = option(default=64, least=1, most=1 << 16, doc="numbers for each byte between blocks")
    mlp_ratio: float = option(default=4.0, above=0, most=64, doc="width of the hidden layer of an MLP over `width`")
    dropout: float = option(
        default=0.0, least=0, below=1, doc="after the embedding, on the weights of attention and at the end of branches"
    )
    tied: bool = option(default=True, doc="make the weights of the last layer those of the embedding")

    @property
    def shaped_by(self) -> str:
        return "recipe.model and recipe.data.length"

    def check(self) -> None:
        """Raise ConfigError for values that make no network."""
        if self.width % self.heads:
            raise ConfigError(
                f"recipe.model.width={self.width} must be a multiple of recipe.model.heads={self.heads}; use "
                f"recipe.model.width={-(-self.width // self.heads) * self.heads}"
            )
        if round(self.mlp_ratio * self.width) < 1:
            raise ConfigError(
                f"recipe.model.mlp_ratio={self.mlp_ratio:g} leaves the MLP without a hidden layer; use at least "
                f"{1 / self.width:g}"
            )


@dataclass(kw_only=True)
class TextOptions:
    length: int = option(default=64, least=1, most=1 << 20, doc="bytes that a row predicts", unit="bytes")
    path: str = option(
        default="",
        doc="file to train on, of any kind, or a pattern such as 'books/*.txt', whose files are joined in the order of "
        "their names; empty: generated text",
    )
    eval_share: float = option(
        default=0.1, above=0, below=1, doc="of `path`: share of the bytes, at the end, to evaluate on"
    )
    train_rows: int = option(
        default=76_800, least=1, most=1 << 32, doc="generated text: rows of the training split", unit="rows"
    )
    eval_rows: int = option(
        default=2048, least=1, most=1 << 24, doc="generated text: rows of the evaluation split", unit="rows"
    )
    words: int = option(default=32, least=2, most=1024, doc="generated text: different words")
    repeats: float = option(
        default=0.25, least=0, below=1, doc="generated text: how often a word is one of the row's words so far"
    )
    seed: int = option(default=0, least=0, doc="of the generated text; the run's own seed does not change it")

    def check(self) -> None:
        """Raise DataError for files that make no data set."""
        if self.path:
            from dtf.recipes.gpt.text import Files

            Files.find(self.path).cut(self.eval_share, self.length)


@register("recipe", "gpt_text")
class GptText(Recipe):
    """The next byte of a text, by a small GPT-2: of files of any kind, or of text that it generates itself, whose
    entropy is known.
    """

    model: ModelOptions = option(factory=ModelOptions, doc="the network")
    data: TextOptions = option(factory=TextOptions, doc="the text")

    without_probabilities = "a language model gives some for each byte of a row: take them from dtf.load_model"

    @property
    def row_traits(self) -> tuple[RowTrait, ...]:
        return (RowTrait.single,)

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "bytes", "top1")

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "bits_per_byte", "top1")

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def direction(self, metric: str) -> str:
        return "max" if metric == "top1" else "min"

    def training_rows(self) -> int | None:
        return None if self.data.path else self.data.train_rows

    def inactive_keys(self) -> dict[str, str]:
        without = ("train_rows", "eval_rows", "words", "repeats", "seed") if self.data.path else ("eval_share",)
        return {f"recipe.data.{key}": "recipe.data.path" for key in without}

    def check(self) -> None:
        self.model.check()
        self.data.check()

    def open_data(self, split: str, seed: int) -> Dataset:
        from dtf.recipes.gpt.rows import FromFiles, Generated
        from dtf.recipes.gpt.text import Files, Text
        from dtf.recipes.gpt.words import Words

        data, train = self.data, split == "train"
        if not data.path:
            language = Words(data.words, data.repeats, data.seed)
            return Generated(language, data.train_rows if train else data.eval_rows, data.length, split)
        files = Files.find(data.path)
        cut = files.cut(data.eval_share, data.length)
        return FromFiles(Text(files), 1 if train else cut, cut if train else files.size, data.length)

    def build_model(self) -> nn.Module:
        from dtf.recipes.gpt.model import GPT

        options = self.model
        return GPT(
            layers=options.layers,
            heads=options.heads,
            width=options.width,
            mlp_ratio=options.mlp_ratio,
            dropout=options.dropout,
            length=self.data.length,
            tied=options.tied,
        )

    def layout(self, model: nn.Module) -> Layout:
        names, splits, heads = [f"blocks.{number}" for number in range(self.model.layers)], {}, self.model.heads
        splits["embedding"] = Split.row
        for name in names:
            splits |= {f"{name}.attention.{part}": SplitBy(heads=heads) for part in ("query", "key", "value")}
            splits |= {
                f"{name}.attention.out": SplitBy(Split.row, heads=heads),
                f"{name}.mlp.0": Split.column,
                f"{name}.mlp.2": Split.row,
            }
        splits["head"] = Split.classes
        blocks = (("embedding", "positions"), *((name,) for name in names), ("norm", "head"))
        return Layout(blocks, splits, positions=(*names, "norm", "head"))

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        """The losses of a row's bytes, summed, and their number; both (B,)."""
        from dtf.model.losses import IGNORED, cross_entropy

        scores = outputs.float() if outputs.dtype.itemsize < 4 else outputs
        return cross_entropy(scores, targets).sum(1), (targets != IGNORED).sum(1)

    def measure(self, outputs: Tensor, batch: Batch, loss: Tensor) -> Tensor:
        from dtf.model.losses import IGNORED, target_rank
        from dtf.model.metrics import weighted_sums

        right = target_rank(outputs, batch.targets) == 1
        return weighted_sums(batch.weight, loss, (batch.targets != IGNORED).sum(1), right.sum(1))

    def summarise(self, sums: list[float]) -> dict[str, float]:
        _, loss, count, right = sums
        mean = loss / count if count else math.nan
        return {"loss": mean, "bits_per_byte": mean / math.log(2), "top1": right / count if count else math.nan}

    def probabilities(self, outputs: Any) -> Tensor | None:
        return None  # of each byte of a row, not of the row

    def preprocessing(self) -> dict[str, Any]:
        return {
            "inputs": "bytes of a text as int64, 0 to 255; generated text begins with a line feed (10)",
            "outputs": "scores of the byte after each",
            "longest": self.data.length,
        }
