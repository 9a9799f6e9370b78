"""Running statistics and dropout masks act per micro-batch, whoever computes it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dtf.core.errors import ConfigError
from dtf.core.types import Shard
from dtf.data.batches import micro_batches_of
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.seeded_dropout import SeededDropout


def simulate(
    micro_batches: list[torch.Tensor], ranks: int, steps: int, momentum: float | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Running mean and variance after `steps` steps over the same micro-batches, averaged over ranks."""
    layers = [nn.BatchNorm1d(3, momentum=momentum).double() for _ in range(ranks)]
    statistics = [BatchNormStatistics(layer) for layer in layers]
    for _ in range(steps):
        for rank, (layer, running) in enumerate(zip(layers, statistics, strict=True)):
            first, last = micro_batches_of(len(micro_batches), Shard(rank, ranks))
            running.begin(last - first, len(micro_batches), ranks)
            if first == last:
                layer(torch.full((4, 3), 1e6, dtype=torch.float64))  # padding must leave no trace
            for j in range(last - first):
                running.begin_micro_batch(j)
                layer(micro_batches[first + j])
            running.end()
    means, variances = zip(*(running.tensors() for running in statistics), strict=True)
    return torch.stack(means).mean(0), torch.stack(variances).mean(0), statistics[0].counters()[".num_batches_tracked"]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    ranks=st.integers(1, 6),
    steps=st.integers(1, 4),
    momentum=st.sampled_from([0.1, 0.5, 0.01, None]),
)
def test_one_update_per_step_of_the_mean_over_all_micro_batches(
    count: int, ranks: int, steps: int, momentum: float | None
) -> None:
    generator = torch.Generator().manual_seed(count * 100 + ranks)
    micro_batches = [torch.randn(4, 3, generator=generator, dtype=torch.float64) + k for k in range(count)]
    mean = torch.stack([b.mean(0) for b in micro_batches]).mean(0)
    variance = torch.stack([b.var(0) for b in micro_batches]).mean(0)
    expected_mean, expected_variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step in range(1, steps + 1):
        m = momentum or 1 / step
        expected_mean, expected_variance = (
            (1 - m) * expected_mean + m * mean,
            (1 - m) * expected_variance + m * variance,
        )
    found_mean, found_variance, counted = simulate(micro_batches, ranks, steps, momentum)
    torch.testing.assert_close(found_mean, expected_mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found_variance, expected_variance, rtol=1e-9, atol=1e-9)
    assert counted == steps


def test_momentum_returns_to_its_own_after_accumulation() -> None:
    layer = nn.BatchNorm1d(3)
    running = BatchNormStatistics(layer)
    for own in (3, 1):
        running.begin(own, own, 1)
        for j in range(own):
            running.begin_micro_batch(j)
        running.end()
    assert layer.momentum == pytest.approx(0.1)


def dropout(kind: type[nn.Module] = nn.Dropout, name: str = "drop", seed: int = 0) -> tuple[nn.Module, SeededDropout]:
    model = nn.ModuleDict({name: kind(0.4)})
    return model[name], SeededDropout(model, seed, torch.device("cpu"))


def test_masks_depend_on_seed_step_micro_batch_and_name_only() -> None:
    x = torch.ones(64, 8)

    def draw(seed: int, step: int, k: int, name: str) -> torch.Tensor:
        layer, masks = dropout(name=name, seed=seed)
        torch.rand(int(torch.randint(1, 9, ())))  # whatever else drew before
        masks.begin_micro_batch(step, k)
        return layer(x)

    base = draw(0, 5, 2, "a")
    assert torch.equal(base, draw(0, 5, 2, "a"))
    for other in ((1, 5, 2, "a"), (0, 6, 2, "a"), (0, 5, 3, "a"), (0, 5, 2, "b")):
        assert not torch.equal(base, draw(*other))


def test_a_copy_that_a_pass_makes_of_a_layer_draws_another_mask() -> None:
    layer, masks = dropout()
    masks.begin_micro_batch(0, 0)
    x = torch.ones(64, 8)
    assert not torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (400, 50)),
        (nn.Dropout1d, (200, 50, 4)),
        (nn.Dropout2d, (200, 50, 2, 2)),
        (nn.Dropout3d, (200, 50, 2, 2, 1)),
    ],
)
def test_dropout_keeps_its_mean_and_its_share(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    layer, masks = dropout(kind)
    masks.begin_micro_batch(0, 0)
    out = layer(torch.ones(shape))
    assert {round(v, 5) for v in out.unique().tolist()} == {0.0, round(1 / 0.6, 5)}
    assert out.mean().item() == pytest.approx(1.0, abs=0.05)
    if len(shape) > 2:  # whole channels
        assert torch.equal(out.amax(tuple(range(2, len(shape)))), out.amin(tuple(range(2, len(shape)))))
    layer.eval()
    assert torch.equal(layer(torch.ones(shape)), torch.ones(shape))


def test_functional_randomness_follows_the_micro_batch_too() -> None:
    _, masks = dropout()
    masks.begin_micro_batch(3, 1)
    first = torch.rand(5)
    masks.begin_micro_batch(3, 1)
    assert torch.equal(first, torch.rand(5))


def test_a_users_own_dropout_keeps_its_forward() -> None:
    class Tripled(nn.Dropout):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 3 * input

    layer, masks = dropout(Tripled)
    masks.begin_micro_batch(0, 0)
    assert torch.equal(layer(torch.ones(3)), 3 * torch.ones(3))
    assert isinstance(dropout()[0], nn.Dropout)


def test_layers_that_talk_to_other_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch|Batch"):
        BatchNormStatistics(nn.Sequential(nn.SyncBatchNorm(3)))


@pytest.mark.parametrize("eager", [True, False])
def test_a_layer_with_a_forward_pass_of_its_own_is_left_as_it_is(eager: bool) -> None:
    class Counting(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.num_batches_tracked += 1  # type: ignore[operator]
            return super().forward(input)

    def layer() -> nn.BatchNorm1d:
        if eager:
            return Counting(3)
        made = nn.BatchNorm1d(3)
        made.forward = lambda input: nn.BatchNorm1d.forward(made, 2 * input)
        return made

    plain, taken = layer(), layer()
    running = BatchNormStatistics(taken)
    for j in range(4):
        if j % 2 == 0:
            running.begin(2, 2, 1)
        running.begin_micro_batch(j % 2)
        rows = torch.randn(4, 3)
        plain(rows)
        taken(rows)
        running.end()
        running.finish(torch.tensor(True))
    assert not len(running) and taken.momentum == 0.1
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, taken.get_buffer(name)), name


def test_the_model_can_read_how_many_steps_a_layer_has_seen() -> None:
    layer = nn.BatchNorm1d(3)
    running, seen = BatchNormStatistics(layer), []
    for _ in range(2):
        running.begin(2, 2, 1)
        for j in range(2):
            running.begin_micro_batch(j)
            before = int(layer.num_batches_tracked)  # type: ignore[arg-type]
            layer(torch.randn(4, 3))
            seen.append((before, int(layer.num_batches_tracked)))  # type: ignore[arg-type]
        running.end()
        running.finish(torch.tensor(True))
    assert seen == [(0, 1), (0, 1), (1, 2), (1, 2)] and int(layer.num_batches_tracked) == 2  # type: ignore[arg-type]
    running.restore(7)
    assert int(layer.num_batches_tracked) == 7  # type: ignore[arg-type]


def test_a_frozen_layer_keeps_its_averages_on_uneven_shares() -> None:
    layer = nn.BatchNorm1d(3).eval()
    running = BatchNormStatistics(layer)
    for _ in range(3):
        running.begin(2, 5, 2)
        for j in range(2):
            running.begin_micro_batch(j)
            layer(torch.randn(4, 3))
        running.end()
    assert [t.tolist() for t in running.tensors()] == [[0.0] * 3, [1.0] * 3]
