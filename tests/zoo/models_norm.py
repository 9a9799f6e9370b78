"""Normalisations: batch normalisation used otherwise than once per micro-batch, its relatives, and handmade ones."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, images, vectors, zoo_model

CLASSES = 4


def _net(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), *norm, nn.ReLU(), nn.Linear(12, CLASSES))


def _conv(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), *norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


zoo_model("batch_norm", vectors(), cross_entropy, "norm")(lambda: _net(nn.BatchNorm1d(12)))
zoo_model("batch_norm_cumulative", vectors(), cross_entropy, "norm")(lambda: _net(nn.BatchNorm1d(12, momentum=None)))
zoo_model("batch_norm_fast", vectors(), cross_entropy, "norm")(lambda: _net(nn.BatchNorm1d(12, momentum=1.0)))
zoo_model("batch_norm_untracked", vectors(), cross_entropy, "norm")(
    lambda: _net(nn.BatchNorm1d(12, track_running_stats=False))
)
zoo_model("batch_norm_bare", vectors(), cross_entropy, "norm")(lambda: _net(nn.BatchNorm1d(12, affine=False)))
zoo_model("group_norm", images(), cross_entropy, "norm")(lambda: _conv(nn.GroupNorm(2, 8)))
zoo_model("instance_norm", images(), cross_entropy, "norm")(lambda: _conv(nn.InstanceNorm2d(8, affine=True)))
zoo_model("instance_norm_tracked", images(), cross_entropy, "norm")(
    lambda: _conv(nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
)
zoo_model("local_response_norm", images(), cross_entropy, "norm")(lambda: _conv(nn.LocalResponseNorm(3)))
zoo_model("rms_norm", vectors(), cross_entropy, "norm")(lambda: _net(nn.RMSNorm(12)))
zoo_model("sync_batch_norm", vectors(), cross_entropy, "norm", refused={"*": "layout"})(
    lambda: nn.SyncBatchNorm.convert_sync_batchnorm(_net(nn.BatchNorm1d(12)))
)


@zoo_model("siamese", vectors(16), cross_entropy, "norm", "calls")
class Siamese(nn.Module):
    """One encoder for two inputs: its batch norm is called twice per micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return self.head((self.encoder(a) - self.encoder(b)).abs())


@zoo_model("sometimes_normalised", vectors(), cross_entropy, "norm", "calls", may={"fsdp": "uneven use"})
class Sometimes(nn.Module):
    """A block with batch norm that only micro-batches of a certain kind use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.bn = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if x[:, 0].sum() > 0:
            h = h + self.bn(h)
        return self.last(torch.relu(h))


@zoo_model("shared_norm", vectors(), cross_entropy, "norm", "calls")
class SharedNorm(nn.Module):
    """One batch norm after each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12, bias=False), nn.Linear(12, 12, bias=False), nn.Linear(12, CLASSES)
        self.bn = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn(self.a(x)))
        return self.c(torch.relu(self.bn(self.b(h))))


@zoo_model("frozen_norm", images(), cross_entropy, "norm", "train override")
class FrozenNorm(nn.Module):
    """Batch norm that stays in eval mode, by a train() of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 5)
        nn.init.uniform_(self.bn.running_var, 0.5, 1.5)  # type: ignore[arg-type]

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


@zoo_model("functional_norm", vectors(), cross_entropy, "norm", "hidden state", "buffers")
class FunctionalNorm(nn.Module):
    """F.batch_norm over buffers of the module's own: they change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("var", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        h = F.batch_norm(self.first(x), self.mean, self.var, training=self.training, momentum=0.2)
        return self.last(torch.relu(h))


@zoo_model("own_batch_norm", vectors(), cross_entropy, "norm", "hidden state", "buffers")
class OwnBatchNorm(nn.Module):
    """Written by hand: running averages are assigned, and never used but in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.gain, self.shift = nn.Parameter(torch.ones(12)), nn.Parameter(torch.zeros(12))
        self.register_buffer("m", torch.zeros(12))
        self.register_buffer("v", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            mean, var = h.mean(0), h.var(0, unbiased=False)
            self.m = 0.9 * self.m + 0.1 * mean.detach()
            self.v = 0.9 * self.v + 0.1 * var.detach()
        else:
            mean, var = self.m, self.v
        return self.last(torch.relu(self.gain * (h - mean) / (var + 1e-5).sqrt() + self.shift))


@zoo_model("batch_renorm", vectors(), cross_entropy, "norm", "hidden state", "buffers")
class Renorm(nn.Module):
    """Training too looks at the running averages (as batch renormalisation does)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
        return self.last(torch.relu(h - self.mean))


class StandardisedConv(nn.Conv2d):
    """Weights of mean 0 and variance 1 in each filter."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


zoo_model("weight_standardisation", images(), cross_entropy, "norm")(
    lambda: nn.Sequential(
        StandardisedConv(3, 8, 3, 2), nn.GroupNorm(4, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 225, 5)
    )
)


@zoo_model("batch_statistics_in_forward", vectors(), cross_entropy, "norm", "rows coupled")
class Centred(nn.Module):
    """Rows are centred over the micro-batch, also in evaluation: rows are coupled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.tanh(h - h.mean(0)))
