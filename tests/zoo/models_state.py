"""Models whose forward pass leaves something behind: codebooks, queues, teachers, counters, plain attributes."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, squared_error, vectors, zoo_model

CLASSES = 4


def autoencoded(make: Any) -> Any:
    """Inputs as they are and targets that are the inputs."""

    def data(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, _ = make(rows, generator)
        return x, x

    return data


@zoo_model("scratch_of_its_class", vectors(), cross_entropy, "strangers")
class ClassScratch(nn.Module):
    """Hands tensors from one part of its pass to another in an attribute of its class."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        ClassScratch.seen = torch.relu(self.first(x))
        h = ClassScratch.seen
        for _ in range(20):
            h = torch.tanh(self.middle(h))
        return self.last(h + ClassScratch.seen)


@zoo_model("codebook", autoencoded(vectors()), squared_error, "state", "hidden state", "buffers")
class Codebook(nn.Module):
    """Vector quantisation; the codes follow moving averages that the forward pass assigns."""

    def __init__(self, codes: int = 6, width: int = 4) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, width), nn.Linear(width, 8)
        codes_at_first = torch.randn(codes, width)
        self.register_buffer("embedding", codes_at_first)
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", codes_at_first.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        one_hot = F.one_hot(torch.cdist(z.detach(), self.embedding).argmin(1), len(self.embedding)).to(z)
        quantised = one_hot @ self.embedding
        if self.training:
            with torch.no_grad():
                self.counts = 0.9 * self.counts + 0.1 * one_hot.sum(0)
                self.sums = 0.9 * self.sums + 0.1 * one_hot.T @ z
                self.embedding = self.sums / self.counts[:, None]
        return self.decode(z + (quantised - z).detach())


@zoo_model("codebook_by_data", autoencoded(vectors()), squared_error, "state", "hidden state", "buffers")
class CodebookByData(Codebook):
    """The same, written into `.data`, where no version of a tensor tells."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        one_hot = F.one_hot(torch.cdist(z.detach(), self.embedding).argmin(1), len(self.embedding)).to(z)
        quantised = one_hot @ self.embedding
        if self.training:
            self.counts.data.lerp_(one_hot.sum(0), 0.1)
            self.sums.data.mul_(0.9).add_(one_hot.T @ z.detach(), alpha=0.1)
            self.embedding.data.copy_(self.sums / self.counts[:, None])
        return self.decode(z + (quantised - z).detach())


@zoo_model("memory_bank", vectors(), cross_entropy, "state", "hidden state", "buffers")
class MemoryBank(nn.Module):
    """A queue of past features with a pointer, as momentum contrast has it."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 6), nn.Linear(6 + size, CLASSES)
        self.register_buffer("queue", F.normalize(torch.randn(size, 6), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.encoder(x), dim=1)
        out = self.head(torch.cat([z, z @ self.queue.clone().T], 1))
        if self.training:
            places = (int(self.pointer) + torch.arange(len(z))) % len(self.queue)
            self.queue[places] = z.detach()
            self.pointer[0] = (int(self.pointer) + len(z)) % len(self.queue)
        return out


def byol_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    predicted, wanted = outputs
    return 2 - 2 * F.cosine_similarity(predicted, wanted.detach(), dim=1)


@zoo_model("teacher", vectors(), byol_loss, "state", "hidden state", "parameters change in forward")
class Byol(nn.Module):
    """A teacher inside the model: frozen parameters that the forward pass moves towards the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(6, 6)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.follow()
        return self.predictor(self.student(x + 0.1 * x.flip(1))), self.teacher(x)


@zoo_model("counter_buffer", vectors(), cross_entropy, "state", "hidden state", "buffers")
class Counter(nn.Module):
    """Warms a scale up over calls that a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layer(x) * torch.clamp(self.calls / 10, max=1.0)


@zoo_model("counter_attribute", vectors(), cross_entropy, "state", "hidden state", "attribute")
class IntCounter(nn.Module):
    """The same with a Python int."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layer(x) * min(self.calls / 10, 1.0)


@zoo_model("tensor_attribute_state", vectors(), cross_entropy, "state", "hidden state", "attribute")
class PlainState(nn.Module):
    """A running mean in a plain attribute, which training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean.to(x) + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean.to(x))


@zoo_model("unused_average", vectors(), cross_entropy, "state", "hidden state", "buffers")
class Watched(nn.Module):
    """An average that only people read: training does not depend on it, but it is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.register_buffer("activity", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.activity = 0.9 * self.activity + 0.1 * out.detach().abs().mean(0)
        return out


@zoo_model("rare_update", vectors(), cross_entropy, "state", "hidden state", "buffers")
class Rare(nn.Module):
    """A buffer that only some batches change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.register_buffer("largest", torch.tensor(2.2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool(x.abs().max() > self.largest):
            self.largest = x.detach().abs().max()
        return self.layer(x / self.largest)


@zoo_model("data_initialised", vectors(), cross_entropy, "state", "parameters change in forward", "hidden state")
class ActNorm(nn.Module):
    """Scale and shift that the first batch sets (as in Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.ready.fill_(True)
        return self.layer((x + self.shift) * self.scale)


@zoo_model("cached_activations", vectors(), cross_entropy, "attribute")
class Cached(nn.Module):
    """Keeps its last features for people to look at: no later pass reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.relu(self.first(x))
        return self.last(self.features)


@zoo_model("python_list_state", vectors(), cross_entropy, "state", "hidden state", "attribute")
class History(nn.Module):
    """A list of past losses steers a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.past: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.training:
            self.past.append(float(out.detach().abs().mean()))
        return out / (1 + sum(self.past[-3:]) if self.past else 1.0)
