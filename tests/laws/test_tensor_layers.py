"""Layers divided among ranks compute as if whole; which layers can be divided, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from dtf.api.layout import Split
from dtf.api.options import Remat
from dtf.api.precision import Format, Precision
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Place
from dtf.distributed.world import World
from dtf.model.error_context import name_failing_module
from dtf.model.memory import Footprint
from tests.support.ranks import ranks


class Every(nn.Module):
    """All kinds of layers that can be divided, in one chain."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(11, 6, padding_idx=7)
        self.features = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(10, 8)
        self.scatter_up = nn.Linear(8, 9)
        self.scatter = nn.Linear(9, 8)
        self.again = nn.Linear(8, 8)
        self.conv = nn.Conv2d(8, 12, 1)
        self.norm = nn.BatchNorm2d(12)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=6)
        self.channels = nn.Dropout2d(0.5)
        self.back = nn.Conv2d(12, 8, 1)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ids(ids) + self.mix(self.features(ids))
        x = self.down(self.drop(torch.relu(self.up(x))))
        x = self.again(torch.relu(self.scatter(torch.relu(self.scatter_up(x)))))
        y = self.back(self.channels(torch.relu(self.grouped(self.norm(self.conv(x.transpose(1, 2)[..., None]))))))
        return self.out(y.mean(dim=(2, 3)))


SPLITS = {
    "ids": Split.row,
    "features": Split.column,
    "mix": Split.row,
    "up": Split.column,
    "drop": Split.local,
    "down": Split.row,
}


SPLITS |= {
    "scatter_up": Split.column,
    "scatter": Split.row_scatter,
    "again": Split.row,
    "conv": Split.column,
    "norm": Split.local,
}


SPLITS |= {"grouped": Split.local, "channels": Split.local, "back": Split.row, "out": Split.classes}


def pair(mesh: Any, build: Callable[[], nn.Module], splits: Mapping[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A model, whole and divided, with the same numbers and masks."""
    from dtf.distributed.sharding import slice_of
    from dtf.model.seeded_dropout import SeededDropout
    from dtf.strategies.sharded_init import lay_out
    from dtf.strategies.tensor_parallel.divide import divide
    from dtf.strategies.tensor_parallel.slices import slices_of

    torch.manual_seed(0)
    whole = build().double()
    with torch.device("meta"):
        parts = build().double()
    divide(parts, splits, mesh)
    lay_out(parts, Precision(param=Format.fp64, compute=Format.fp64), torch.device("cpu"))
    state = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*parts.named_parameters(), *parts.named_buffers()]:
            tensor.copy_(slice_of(tensor, slices_of(parts).get(name)).take(state[name]))
    for model in (whole, parts):
        model.__dict__["masks"] = SeededDropout(model, 0, torch.device("cpu"))
        model.__dict__["masks"].begin_micro_batch(0, 0)
    return whole, parts


def every(rank: int, size: int) -> list[Any]:
    """Losses, ranks of the right class and every gradient of the chain, divided and whole."""
    from dtf.distributed.sharding import slice_of
    from dtf.model import losses
    from dtf.strategies.tensor_parallel.slices import slices_of

    whole, parts = pair(World(Place(rank=rank, size=size)).mesh({"tp": size}), Every, SPLITS)
    ids, targets = torch.arange(44).view(4, 11) * 5 % 11, torch.tensor([0, 4, 2, 3])
    found = []
    for model in (whole, parts):
        scores = model(ids)
        loss = losses.cross_entropy(scores, targets, label_smoothing=0.1)
        loss.sum().backward()
        with torch.no_grad():
            found.append([loss, losses.target_rank(scores, targets)])
    worst = max(float((a - b).abs().max()) for a, b in zip(found[0][:2], found[1][:2], strict=True))
    averages, divided = dict(parts.named_buffers()), slices_of(parts)
    for name, buffer in whole.named_buffers():
        part = slice_of(averages[name], divided.get(name)).take(buffer)
        torch.testing.assert_close(part, averages[name], rtol=1e-12, atol=1e-12)
    gradients = dict(parts.named_parameters())
    for name, parameter in whole.named_parameters():
        mine = gradients[name]
        assert parameter.grad is not None and mine.grad is not None, name
        difference = (slice_of(mine, divided.get(name)).take(parameter.grad) - mine.grad).abs()
        assert not difference.numel() or float(difference.max()) < 1e-12, name
    return [worst, float(found[0][0].sum())]


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_of_layer_computes_as_if_whole(size: int) -> None:
    """Divided by 3, features come in 4, 4 and 2, classes in 2, 2 and 1: uneven slices, biases, masks, padding ids,
    scattered sums.
    """
    for worst, loss in ranks(size, "tests.laws.test_tensor_layers:every", shared=True):
        assert worst < 1e-12 < loss


COLUMN_LOCAL_ROW = {"0": Split.column, "1": Split.local, "2": Split.row}


CHAINS: dict[str, tuple[Callable[[], nn.Module], dict[str, Split], tuple[int, ...]]] = {
    "a mask for each position of a sequence": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout1d(), nn.Linear(6, 3)),
        COLUMN_LOCAL_ROW,
        (5, 7, 4),
    ),
    "more channels than before the groups": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 1), nn.Conv1d(8, 16, 1, groups=4), nn.Dropout1d(), nn.Conv1d(16, 3, 1)),
        {"0": Split.column, "1": Split.local, "2": Split.local, "3": Split.row},
        (5, 4, 2),
    ),
    "one channel a rank, flattened": (
        lambda: nn.Sequential(nn.Conv1d(4, 2, 1), nn.Sequential(nn.Flatten(), nn.Dropout()), nn.Linear(6, 3)),
        {"0": Split.column, "1.1": Split.local, "2": Split.row},
        (5, 4, 3),
    ),
}


def dropped(rank: int, size: int) -> dict[str, Any]:
    """How far a divided chain is from the whole one, or why it is refused."""
    mesh, found = World(Place(rank=rank, size=size)).mesh({"tp": size}), {}
    for name, (build, splits, shape) in CHAINS.items():
        whole, parts = pair(mesh, build, splits)
        x = torch.randn(shape, dtype=torch.float64)
        try:
            found[name] = float((parts(x) - whole(x)).detach().abs().max())
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_a_mask_is_cut_along_the_channels_or_the_layout_is_refused() -> None:
    for found in ranks(2, "tests.laws.test_tensor_layers:dropped", shared=True):
        sequence, groups, flattened = found.values()
        assert sequence < 1e-12
        assert groups < 1e-12
        assert (
            "splits 1.1 as local, but axis 1 of its input has 3 elements and not the 1 that are this rank's of the 2 "
            "channels" in flattened
        )


def forgetful(rank: int, size: int) -> dict[str, Any]:
    """By kind of rematerialisation: gradients, and bytes that a block with both kinds of sums keeps for a row."""
    from dtf.model.activation_checkpointing import apply_activation_checkpointing
    from dtf.model.seeded_dropout import SeededDropout

    def build() -> nn.Module:
        scattered = [
            nn.Linear(4, 6),
            nn.Tanh(),
            nn.Linear(6, 10),
            nn.Tanh(),
            nn.Linear(10, 8),
            nn.LayerNorm(8),
            nn.Tanh(),
        ]
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*scattered), nn.Linear(8, 3))

    mesh, found = World(Place(rank=rank, size=size)).mesh({"tp": size}), {}
    for kind in Remat:
        _, parts = pair(mesh, build, {"1.0": Split.column, "1.2": Split.row_scatter, "1.4": Split.row})
        apply_activation_checkpointing(parts, ["1"], kind, SeededDropout(parts, 0, torch.device("cpu")))
        kept = []
        # gloo's threads hold the tensors of a collective until they take up another: what is kept may look like more,
        # never like less
        for _ in range(5):
            parts.zero_grad()
            with Footprint() as footprint:
                parts(torch.arange(400.0, dtype=torch.float64).view(100, 4).cos()).square().sum().backward()
                for _ in range(4):
                    dist.all_reduce(torch.zeros(1))
            kept.append(footprint.saved_bytes / 100 / 8)
        found[kind.value] = [[p.grad.tolist() for p in parts.parameters() if p.grad is not None], min(kept)]
    return found


def test_selective_keeps_sums_and_not_what_they_are_of() -> None:
    for found in ranks(2, "tests.laws.test_tensor_layers:forgetful", shared=True):
        plain, blocks, selective = (found[kind.value] for kind in Remat)
        assert plain[0] == blocks[0] == selective[0]
        # the column's slice, the slice of the sum, the sum
        assert selective[1] - blocks[1] == pytest.approx(3 + 5 + 8, abs=0.1)


def strangers(rank: int, size: int) -> dict[str, Any]:
    """What comes of ids outside a divided table, and of targets that are no class with whole and divided scores."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from dtf.adapters.transformers_heads import Tokens
    from dtf.model import losses

    mesh = World(Place(rank=rank, size=size)).mesh({"tp": size})
    _, table = pair(mesh, lambda: nn.Sequential(nn.Embedding(7, 2)), {"0": Split.row})
    scores, targets = (
        torch.tensor([[3.0, 1.0, 2.0, 2.0, torch.nan]]).repeat(8, 1),
        torch.tensor([0, 1, 2, 3, 4, losses.IGNORED, -1, 5]),
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[0, 4, losses.IGNORED, 2], [1, 1, 3, losses.IGNORED]])
    of_tokens = []
    for given in (tokens, *(distribute_tensor(tokens, mesh, [Shard(axis)]) for axis in (1, 2))):
        loss = losses.cross_entropy(given.requires_grad_(), labels, label_smoothing=0.1)
        (loss.sum() + losses.cross_entropy(given[:, :-1], labels[:, 1:]).square().sum()).backward()
        assert given.grad is not None
        gradient = given.grad.full_tensor() if given is not tokens else given.grad  # type: ignore[attr-defined]
        head, batch = Tokens(None), Batch(None, labels, torch.ones(2), np.arange(2))
        plain, _ = head.loss(given.detach(), labels)
        measured = head.measure(given.detach(), batch, plain)
        of_tokens.append(
            (loss.detach(), gradient, losses.target_rank(given.detach()[:, 1:], labels[:, 1:]), plain, measured)
        )
    return {
        "tokens": max(
            float((a - b).abs().max()) for other in of_tokens[1:] for a, b in zip(of_tokens[0], other, strict=True)
        ),
        "token_loss": of_tokens[0][0].tolist(),
        "rows": table(torch.tensor([0, -1, 6, 7, 3])).isnan().any(dim=1).tolist(),
        "ranks": [
            losses.target_rank(given, targets).tolist()
            for given in (scores, distribute_tensor(scores, mesh, [Shard(1)]))
        ],
    }


def test_what_is_in_no_table_and_no_class() -> None:
    """An id beyond the table is NaN and not zero; a row without a class has the worst rank, whole and divided. Tokens
    of a row have their losses, gradients and ranks where their scores are divided, too.
    """
    for found in ranks(3, "tests.laws.test_tensor_layers:strangers", shared=True):
        assert found["tokens"] < 1e-14 and found["token_loss"][0][2] == found["token_loss"][1][3] == 0
        assert min(found["token_loss"][0][:2] + found["token_loss"][1][:3]) > 0
        assert found["rows"] == [False, True, False, True, False]
        assert found["ranks"] == [[2, 5, 4, 4, 5, 5, 5, 5]] * 2


def test_a_bad_id_is_not_blamed_on_the_layout() -> None:
    table = nn.Embedding(3, 2)
    with pytest.raises(IndexError), name_failing_module(table):
        table(torch.tensor([3]))


def refused(rank: int, size: int, splits: dict[str, str]) -> str:
    from dtf.strategies.tensor_parallel.divide import divide

    with torch.device("meta"):
        model = Every()
        model.features = nn.Embedding(5, 6)
        model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    try:
        divide(
            model,
            {name: Split[split] for name, split in splits.items()},
            World(Place(rank=rank, size=size)).mesh({"tp": size}),
        )
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"norm": "row"}, "splits norm as row, which BatchNorm2d cannot be"),
        ({"grouped": "classes"}, "the last layer grouped is Conv2d, and only a Linear is divided by classes"),
        ({"grouped": "column"}, "splits grouped as column, which Conv2d cannot be"),
        ({"grouped": "local"}, "grouped has 6 groups of channels, which 4 ranks do not divide"),
        ({"out": "column"}, "out has 5 channels, of which a split over 4 ranks leaves one none"),
        ({"normed": "row"}, "splits normed, whose weight is no parameter of it but made from others"),
        ({"features": "row"}, "features has 5 rows, of which a split over 4 ranks leaves one none"),
    ],
)
def test_what_cannot_be_divided_is_named(splits: dict[str, str], words: str) -> None:
    """By all ranks alike, also those that would have something."""
    first, *others = ranks(4, "tests.laws.test_tensor_layers:refused", shared=True, splits=splits)
    assert words in first
    assert others == [first] * 3
