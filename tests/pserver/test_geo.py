"""Mode geo against the reference: one step a lease, by an update that is linear in gradients."""

from __future__ import annotations

import pytest

from dtf.config.settings import load_parts
from dtf.pserver.options import Mode
from tests.support.harness import difference, reference, spread

load_parts([])


@pytest.mark.parametrize(("processes", "servers"), [(1, 1), (3, 1), (2, 2)])
def test_differences_of_one_step_add_up_to_the_step_of_all(processes: int, servers: int) -> None:
    """Descent with momentum, no clipping: the mean difference, weighted by rows, is the update by the mean gradient."""
    options = {"mode": Mode.geo.value, "geo_steps": 1, "staleness": 0, "servers": servers, "min_block": 1}
    alone, apart = reference(clip_norm=0.0), spread("pserver", processes, options=options, clip_norm=0.0)
    for run in (alone, apart):  # nobody knows the norm of the whole gradient
        run["train"] = {step: values | {"grad_norm": 0.0} for step, values in run["train"].items()}
    assert difference(alone, apart) <= 1e-10
