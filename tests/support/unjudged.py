"""Runs in which passes must not be needed to tell whether replicas have gone astray."""

from __future__ import annotations

from typing import Any

from dtf.strategies import dp_program, spmd
from dtf.strategies.pipeline import program
from tests.support.harness import train


def train_unjudged(rank: int, size: int, **case: Any) -> dict[str, Any]:
    """As `train`. Fails where replicas look as if they had gone astray, so that passes have to tell."""

    def judge(*_: Any) -> None:
        raise AssertionError("replicas look astray")

    modules = (dp_program, spmd, program)
    before = [module.differing_module for module in modules]
    try:
        for module in modules:
            setattr(module, "differing_module", judge)  # noqa: B010
        return train(rank, size, **case)
    finally:
        for module, function in zip(modules, before, strict=True):
            setattr(module, "differing_module", function)  # noqa: B010
