"""The engine against a loop that knows nothing of dtf: the reference of all other laws must itself be right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dtf.api.layout import Layout
from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.recipe import Dataset
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.data.batches import Epochs
from dtf.data.samplers import Shuffle
from dtf.distributed.world import World
from dtf.model.init import init_model
from dtf.model.metrics import weighted_sums
from dtf.optim.optimizers import Sgd
from dtf.strategies.ddp import Ddp
from dtf.strategies.dp import Dp
from tests.support.harness import BATCH, reference, spread
from tests.support.toy import EVAL_ROWS, Rows, Toy


def test_the_reference_is_what_one_would_write_by_hand() -> None:
    """100 rows, batch 19, a partial last batch, momentum, clipping: losses, norms, evaluation and weights to
    rounding.
    """
    case = {
        "recipe": {"rows": 100, "batch_norm": False, "dropout": 0.0},
        "micro_batch_rows": BATCH,
        "steps": 12,
        "eval_every": 12,
    }
    found = spread("ddp", 1, **case)
    toy = Toy(rows=100, batch_norm=False, dropout=0.0)
    model = init_model(toy, 0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, epochs = toy.open_data("train", 0), Epochs(Shuffle(), 100, BATCH, 0)
    for step in range(12):
        inputs, targets = data.fetch(epochs.ids(*divmod(step, epochs.batches)), 0)
        outputs = model(inputs.double())
        loss = cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        logged = found["train"][str(step + 1)]
        assert logged["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
        assert logged["top1"] == pytest.approx((outputs.argmax(-1) == targets).double().mean().item(), abs=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            torch.tensor(found["tensors"][f"model/{name}"], dtype=torch.float64),
            parameter.detach(),
            rtol=1e-12,
            atol=1e-13,
        )
    inputs, targets = toy.open_data("eval", 0).fetch(torch.arange(EVAL_ROWS).numpy(), 0)
    assert found["eval"]["12"]["loss"] == pytest.approx(
        cross_entropy(model(inputs.double()), targets).item(), rel=1e-12
    )


def test_batch_norm_and_dropout_are_torchs_own() -> None:
    """With one micro-batch per step the running averages are those of nn.BatchNorm1d, and dropout is on average
    nothing.
    """
    found = reference(micro_batch_rows=BATCH, steps=5)
    assert found["tensors"]["model/1.num_batches_tracked"] == 5
    assert all(math.isfinite(v) for v in found["tensors"]["model/1.running_var"])


class Table(nn.Module):
    order: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("order", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, self.order])


class Own(Toy):
    """The toy recipe with another model."""

    made: type[nn.Module]
    mean = False

    def layout(self, model: nn.Module) -> Layout:
        return Layout()

    def build_model(self) -> nn.Module:
        return self.made()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().loss(outputs, targets)
        return loss[:, None] if self.mean else loss


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(input), 0.5, self.training)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)
        self.requires_grad_(False)


class Counting(nn.Linear):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input)


def warmup(made: type[nn.Module], strategy: Ddp | Dp, rows: int = 2, mean: bool = False) -> None:
    recipe = Own()
    recipe.made, recipe.mean = made, mean
    task = Task(recipe, Sgd(), Precision(), StepOptions(batch_size=8), 0)
    from dtf.core.types import Place

    program = strategy.setup(task, World(Place(slots=2)))
    data: Dataset = Rows(8, "train", -1)
    inputs, targets = data.fetch(torch.arange(rows).numpy(), 0)
    program.warmup(Batch(inputs, targets, torch.ones(rows), torch.arange(rows).numpy()))


@pytest.mark.parametrize(
    ("made", "strategy", "message", "more"),
    [
        (Frozen, Ddp(), "nothing to train", {}),
        (Counting, Dp(replicas=2), "changes the buffer calls", {}),
        (
            lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)),
            Ddp(),
            "1 row is too small for batch normalisation",
            {"rows": 1},
        ),
        (
            lambda: nn.Linear(8, 4),
            Ddp(),
            r"Own.loss returned shape \(2, 1\); it must return a loss per row, \(2,\), or sums and counts",
            {"mean": True},
        ),
    ],
)
def test_what_cannot_keep_the_laws_is_refused_before_the_first_step(
    made: type[nn.Module], strategy: Ddp | Dp, message: str, more: dict
) -> None:
    with pytest.raises(ConfigError, match=message):
        warmup(made, strategy, **more)


@pytest.mark.parametrize(
    ("made", "strategy"),
    [
        (Noisy, Ddp()),
        (Noisy, Dp(replicas=2)),
        (Noisy, Dp(replicas=1)),
        (Counting, Ddp()),
        (Table, Dp(replicas=2)),
    ],
)
def test_what_may_run(made: type[nn.Module], strategy: Ddp | Dp) -> None:
    warmup(made, strategy)


def test_weighted_sums_of_padding_are_zero() -> None:
    weight = torch.zeros(3)
    assert weighted_sums(weight, torch.ones(3)).tolist() == [0.0, 0.0]
