"""Recurrent networks, packed sequences, and what reads lists of token numbers without attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.entries import cross_entropy, token_loss, tokens, zoo_model

WORDS, CLASSES = 11, 4


class Recurrent(nn.Module):
    """Embedding, one recurrent layer, and a classifier of the last state."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.rnn = kind(8, 12, batch_first=True, **options)
        self.head = nn.Linear(12 * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])


@zoo_model("rnn", tokens(classes=CLASSES), cross_entropy, "sequence")
def rnn() -> nn.Module:
    return Recurrent(nn.RNN, nonlinearity="tanh")


@zoo_model("gru", tokens(classes=CLASSES), cross_entropy, "sequence")
def gru() -> nn.Module:
    return Recurrent(nn.GRU)


@zoo_model("lstm", tokens(classes=CLASSES), cross_entropy, "sequence")
def lstm() -> nn.Module:
    return Recurrent(nn.LSTM, proj_size=0, num_layers=2)


@zoo_model("lstm_projected", tokens(classes=CLASSES), cross_entropy, "sequence")
class ProjectedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True, proj_size=6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.lstm(self.embed(x))
        return self.head(h[-1])


@zoo_model("bidirectional", tokens(classes=CLASSES), cross_entropy, "sequence")
def bidirectional() -> nn.Module:
    return Recurrent(nn.GRU, bidirectional=True)


@zoo_model("rnn_dropout", tokens(classes=CLASSES), cross_entropy, "sequence", "draws")
def rnn_dropout() -> nn.Module:
    return Recurrent(nn.LSTM, num_layers=2, dropout=0.3)


@zoo_model("packed", tokens(classes=CLASSES), cross_entropy, "sequence")
class Packed(nn.Module):
    """Lengths from the padding, a packed sequence, the last real state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.gru = nn.GRU(8, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        out, last = self.gru(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(torch.cat([last[0], last[1]], -1) + padded.mean(1))


@zoo_model("gru_language_model", tokens(), token_loss, "sequence", "sums and counts")
class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12, padding_idx=0)
        self.gru = nn.GRU(12, 12, batch_first=True)
        self.decoder = nn.Linear(12, WORDS, bias=False)
        self.decoder.weight = self.embed.weight  # as in the word language model of torch's examples

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.gru(self.embed(x))[0])


@zoo_model("lstm_cell", tokens(classes=CLASSES), cross_entropy, "sequence")
class Cell(nn.Module):
    """A cell called once per token, from a state that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.cell = nn.LSTMCell(8, 12)
        self.start = nn.Parameter(torch.randn(2, 12) * 0.1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, c = (state.expand(len(x), -1) for state in self.start)
        for token in self.embed(x).unbind(1):
            h, c = self.cell(token, (h, c))
        return self.head(h)


@zoo_model("stateful_rnn", tokens(classes=CLASSES), cross_entropy, "sequence", "hidden state", "attribute")
class Stateful(nn.Module):
    """The last state goes on into the next call, as truncated backpropagation through time does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.gru = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        start = None if self.state is None else self.state.mean(1, keepdim=True).expand(-1, len(x), -1).contiguous()
        out, state = self.gru(self.embed(x), start)
        if self.training:
            self.state = state.detach()
        return self.head(out[:, -1])


@zoo_model("beyond_its_length", tokens(classes=CLASSES), cross_entropy, "sequence", "variable shapes")
class Trimmed(nn.Module):
    """Cuts a batch down to its longest row, as collators do: shapes depend on the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 12, 3, padding=1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = x != 0
        longest = int(mask.sum(1).max())
        features = torch.relu(self.conv(self.embed(x[:, :longest]).transpose(1, 2)))
        return self.head(features.masked_fill(~mask[:, None, :longest], 0.0).sum(2) / mask.sum(1, keepdim=True))


@zoo_model("embedding_bag", tokens(classes=CLASSES), cross_entropy, "sequence", "embedding")
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 8, mode="mean", padding_idx=0)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(x)))


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, **options)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mix(self.embed(x))).mean(1))


EMBEDDED = tokens(classes=CLASSES)
zoo_model("embedding_padding", EMBEDDED, cross_entropy, "embedding")(lambda: Embedded(padding_idx=0))
zoo_model("embedding_frequency", EMBEDDED, cross_entropy, "embedding")(lambda: Embedded(scale_grad_by_freq=True))
zoo_model(
    "embedding_max_norm",
    EMBEDDED,
    cross_entropy,
    "embedding",
    "parameters change in forward",
    refused={"divided": "hidden state"},
)(lambda: Embedded(max_norm=1.0))
zoo_model("embedding_sparse", EMBEDDED, cross_entropy, "embedding", refused={"*": "sparse gradients"})(
    lambda: Embedded(sparse=True)
)
zoo_model("embedding_bag_sparse", EMBEDDED, cross_entropy, "embedding", refused={"*": "sparse gradients"})(
    lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8, sparse=True), nn.Linear(8, CLASSES))
)
zoo_model("embedding_frozen", EMBEDDED, cross_entropy, "embedding", "frozen")(
    lambda: nn.Sequential(nn.Embedding.from_pretrained(torch.eye(WORDS)), nn.Flatten(), nn.Linear(7 * WORDS, CLASSES))
)


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Connectionist temporal classification of scores (B, T, C) against labels (B, 3)."""
    log_probs = outputs.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((outputs.shape[0],), outputs.shape[1]), (targets != 0).sum(1)
    return F.ctc_loss(log_probs, targets, *lengths, reduction="none", zero_infinity=True)


def speech(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Frames (B, 9, 6) and labels (B, 3), 0 for none."""
    labels = torch.randint(1, CLASSES, (rows, 3), generator=generator)
    labels[:, 2] *= torch.randint(2, (rows,), generator=generator)
    return torch.randn(rows, 9, 6, generator=generator), labels


@zoo_model("ctc", speech, ctc, "sequence", "loss")
class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])
