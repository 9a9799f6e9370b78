"""Whether tensors that ranks should have alike are so: what shows, and what does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtf.model.fingerprint import projections

BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 3e-2}


def apart(a: Tensor, b: Tensor, tolerance: float) -> float:
    """By how many times what they may be."""
    found = projections(a, tolerance), projections(b, tolerance)
    return float((found[0] - found[1])[:-1].abs().max() / torch.maximum(*found)[-1])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (300, 4096), (1 << 20, 2)], ids=str)  # one row, one part, several
def test_elements_in_other_places_show_and_rounding_does_not(shape: tuple[int, int], dtype: torch.dtype) -> None:
    whole, bound = torch.randn(shape, generator=torch.Generator().manual_seed(0)), BOUNDS[dtype]
    x = whole.to(dtype)
    assert apart(x, x.clone(), bound) == 0
    assert apart(x, x.T.contiguous().T, bound) == 0
    assert apart(x, whole, bound) < 0.5
    assert apart(x, x.flip(0), bound) > 10
    assert apart(x, x.flip(1), bound) > 10
    assert apart(x, -x, bound) > 10


def test_nothing_and_zeros_are_alike() -> None:
    for x in (torch.zeros(2, 0, 3), torch.zeros(2, 3)):
        assert projections(x, 1e-3).tolist() == [0.0] * 9
