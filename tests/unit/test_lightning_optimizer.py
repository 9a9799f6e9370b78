"""What `configure_optimizers` returns, as an optimizer and a learning rate for each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtf.adapters.lightning_optimizer import Configured


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, tuple[Any, str, int]]:
    lr = torch.optim.lr_scheduler
    return {
        "step": (lr.StepLR(optimizer, 2, 0.5), "epoch", 1),
        "cosine": (lr.CosineAnnealingLR(optimizer, 7), "step", 1),
        "lambda": (lr.LambdaLR(optimizer, lambda step: min(1.0, step / 5)), "step", 2),
        "every other epoch": (lr.ExponentialLR(optimizer, 0.9), "epoch", 2),
        "one cycle": (lr.OneCycleLR(optimizer, 0.3, total_steps=24), "step", 1),
        "warm-up": (
            lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, 9)], [4]), "step", 1,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["step", "cosine", "lambda", "every other epoch", "one cycle", "warm-up"])
def test_rates_are_those_of_the_scheduler(name: str) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, tuple[Any, str, int]]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(
            [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.2, momentum=0.9
        )
        kinds = schedulers(optimizer) if name != "one cycle" else {
            name: (torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.03], total_steps=24), "step", 1)
        }  # fmt: skip
        if name != "one cycle":  # each scheduler changes the optimizer when it is made
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(
                [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.2, momentum=0.9
            )
            kinds = {name: one_scheduler(name, optimizer)}
        return model, optimizer, kinds[name]

    _, optimizer, (scheduler, interval, frequency) = make()
    expected = []
    for epoch in range(4):
        for index in range(6):
            expected.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
            optimizer.step()
            if interval == "step" and (index + 1) % frequency == 0 and len(expected) < 24:
                scheduler.step()
        if interval == "epoch" and (epoch + 1) % frequency == 0:
            scheduler.step()
    model, optimizer, (scheduler, interval, frequency) = make()
    returned = {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": interval, "frequency": frequency},
    }
    found = Configured(returned, model, 6)
    for step, ((lr, momentum), (other, _)) in enumerate(expected):
        assert found.rate(step) == pytest.approx(lr, rel=1e-12)
        assert found.rate(step) * found.lr_factors["bias"] == pytest.approx(other, rel=1e-9)
        assert not found.cycles or found.momenta(step)["momentum"] == momentum


def one_scheduler(name: str, optimizer: torch.optim.Optimizer) -> tuple[Any, str, int]:
    lr = torch.optim.lr_scheduler
    if name == "step":
        return lr.StepLR(optimizer, 2, 0.5), "epoch", 1
    if name == "cosine":
        return lr.CosineAnnealingLR(optimizer, 7), "step", 1
    if name == "lambda":
        return lr.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)), "step", 2
    if name == "every other epoch":
        return lr.ExponentialLR(optimizer, 0.9), "epoch", 2
    parts = [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, 9)]
    return lr.SequentialLR(optimizer, parts, [4]), "step", 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.01}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.01}),
    ],
)
def test_the_optimizer_has_the_numbers_of_torchs(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    one = torch.nn.Linear(7, 5).double()
    other = torch.nn.Linear(7, 5).double()
    other.load_state_dict(one.state_dict())
    theirs = kind([{"params": [one.weight]}, {"params": [one.bias], "weight_decay": 0.0}], lr=0.05, **options)
    given = kind([{"params": [other.weight]}, {"params": [other.bias], "weight_decay": 0.0}], lr=0.05, **options)
    found = Configured(given, other, 10)
    bound = found.inner.bind({name: p.detach() for name, p in other.named_parameters()})
    for step in range(20):
        gradients = [torch.randn_like(p) for p in one.parameters()]
        for parameter, gradient in zip(one.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        theirs.step()
        bound.apply(gradients, found.rate(step), None)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-15)
