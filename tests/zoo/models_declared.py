"""Models of other files whose forward pass changes buffers, with a recipe that says what becomes of them."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, squared_error, tokens, vectors, zoo_model
from tests.zoo.models_attention import CLASSES, LENGTH, Rotary
from tests.zoo.models_norm import FunctionalNorm, OwnBatchNorm, Renorm, Siamese, Sometimes
from tests.zoo.models_random import LayerDrop
from tests.zoo.models_state import Codebook, CodebookByData, Counter, Rare, Watched, autoencoded

zoo_model(
    "codebook_declared",
    autoencoded(vectors()),
    squared_error,
    "buffers",
    buffers={"embedding": "mean", "counts": "mean", "sums": "mean"},
)(Codebook)
zoo_model(
    "codebook_by_data_declared",
    autoencoded(vectors()),
    squared_error,
    "buffers",
    buffers={"embedding": "mean", "counts": "mean", "sums": "mean"},
)(CodebookByData)
zoo_model("own_batch_norm_declared", vectors(), cross_entropy, "buffers", buffers={"m": "mean", "v": "mean"})(
    OwnBatchNorm
)
zoo_model("functional_norm_declared", vectors(), cross_entropy, "buffers", buffers={"mean": "mean", "var": "mean"})(
    FunctionalNorm
)
zoo_model("batch_renorm_declared", vectors(), cross_entropy, "buffers", buffers={"mean": "mean"})(Renorm)
zoo_model("counter_declared", vectors(), cross_entropy, "buffers", buffers={"calls": "mean"})(Counter)
zoo_model("unused_average_declared", vectors(), cross_entropy, "buffers", buffers={"activity": "mean"})(Watched)
zoo_model("rare_update_declared", vectors(), cross_entropy, "buffers", buffers={"largest": "mean"})(Rare)
zoo_model(
    "rotary_declared",
    tokens(LENGTH, classes=CLASSES),
    cross_entropy,
    "attention",
    "cache",
    buffers={"cos": "local", "sin": "local"},
)(Rotary)
zoo_model("siamese_declared", vectors(16), cross_entropy, "norm", "calls", buffers={"encoder.1": "mean"})(Siamese)
zoo_model(
    "layer_drop_declared",
    vectors(),
    cross_entropy,
    "draws",
    "data-dependent",
    "calls",
    buffers={"blocks.*": "mean"},
    may={"fsdp": "uneven use"},
)(LayerDrop)
zoo_model(
    "sometimes_normalised_declared",
    vectors(),
    cross_entropy,
    "norm",
    "calls",
    buffers={"bn": "mean"},
    may={"fsdp": "uneven use"},
)(Sometimes)


@zoo_model("row_counter_declared", vectors(), cross_entropy, "buffers", buffers={"seen.*": "sum"})
class Seen(nn.Module):
    """Counts rows and what they were taken for; a rare answer gets a larger weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, CLASSES), nn.Module()
        self.seen.register_buffer("rows", torch.tensor(0))
        self.seen.register_buffer("histogram", torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        share = self.seen.histogram / (self.seen.rows + CLASSES)
        if self.training:
            self.seen.rows += len(x)
            self.seen.histogram += F.one_hot(out.detach().argmax(1), CLASSES).sum(0)
        return out - share.to(out).log()
