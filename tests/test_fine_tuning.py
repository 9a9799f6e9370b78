"""Laws of fine-tuning: weights to start from, frozen parts, learning-rate factors and averages give the reference's numbers under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dtf.build import draw_model, sketch
from dtf.errors import ConfigError, DataError
from dtf.options import FineTuning
from dtf.weights import fitted, open_weights
from tests.harness import difference, meshes, reference, spread, variants
from tests.toy import Toy

CASES: dict[str, dict[str, Any]] = {
    "ema": {"ema": 0.9},
    "frozen": {"freeze": ["0", "1", "4.weight"]},
    "factors": {"lr_factors": {"10": 10.0, "*.bias": 0.5}},
    "all": {"ema": 0.99, "freeze": ["[01]"], "lr_factors": {"10": 10.0}, "optimizer": "adamw"},
}


@pytest.mark.parametrize("case", ["frozen", "all"])
@pytest.mark.parametrize(("strategy", "options"), [*variants(), *meshes()], ids=str)
def test_every_strategy_follows_the_reference(strategy: str, options: dict, case: str) -> None:
    assert difference(reference(**CASES[case]), spread(strategy, 4, options=options, **CASES[case])) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("strategy", "options"), variants(), ids=str)
def test_every_strategy_in_every_case(strategy: str, options: dict, case: str, processes: int) -> None:
    assert difference(reference(**CASES[case]), spread(strategy, processes, options=options, **CASES[case])) <= 1e-10
