"""Law: a checkpoint that an earlier version wrote goes on, to the numbers that version would have reached.

`data/checkpoints_0.1` holds, for each way to spread a run, the checkpoints of steps 4 and 8 that the commit before
dtf's modules moved into packages wrote: 24 rows a step, fp64, two processes, the options below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf.runs.recorded_run import checkpoint_tensors

WRITTEN = Path(__file__).parent / "data" / "checkpoints_0.1"
OPTIONS = [
    "launcher.processes=2", "launcher.threads=1", "precision=fp64", "lr=constant", "lr.peak=0.05", "step.batch_size=24",
    "step.micro_batch_rows=6", "train.steps=8", "train.eval_every=4", "train.log_every=2", "checkpoint.every_steps=4",
    "checkpoint.keep_last=9", "checkpoint.keep_best=0", "observer=[jsonl]",
]  # fmt: skip
TOY = ["plugins=[tests.support.toy]", "recipe=toy"]
SPARSE = ["plugins=[tests.support.sparse_toy]", "recipe=tabled"]
RUNS = {
    "ddp": [*TOY, "strategy=ddp"],
    "fsdp": [*TOY, "strategy=fsdp"],
    "tensor": [*TOY, "strategy=tensor"],
    "pipeline": [*TOY, "strategy=pipeline"],
    "pserver": [*TOY, "strategy=pserver"],
    "sparse": [*SPARSE, "strategy=ddp"],
    "sparse_pserver": [*SPARSE, "strategy=pserver", "strategy.servers=2"],
}

USUAL = ("ddp", "pipeline", "sparse_pserver")
"""Those that run by default: an update of each kind."""


def machine() -> dict[str, str]:
    """What decides the last bits of a sum."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "torch": torch.__version__.partition("+")[0],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": model[1] if model else "",
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in RUNS])
def test_it_goes_on_as_the_version_that_wrote_it_did(name: str, run_dtf: Callable[..., Any]) -> None:
    """Bit for bit on such a machine as wrote them; elsewhere to fp64's rounding."""
    done = run_dtf(*RUNS[name], *OPTIONS, f"checkpoint.resume={WRITTEN / name / 'step_000004'}")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert min(line["step"] for line in lines if line.get("split") == "train") == 6, "it began anew"
    expected = checkpoint_tensors(WRITTEN / name / "step_000008")
    reached = checkpoint_tensors(done.folder / "checkpoints" / "step_000008")
    assert expected.keys() == reached.keys() and len(expected) > 6
    exact = machine() == json.loads((WRITTEN / "machine.json").read_text())
    for tensor, values in expected.items():
        if exact:
            assert np.array_equal(values, reached[tensor], equal_nan=True), tensor
        else:
            np.testing.assert_allclose(reached[tensor], values, rtol=1e-11, atol=1e-13, err_msg=tensor)
    before = checkpoint_tensors(WRITTEN / name / "step_000004")
    moved = [tensor for tensor in before if not np.array_equal(before[tensor], expected[tensor])]
    assert moved, "the steps in between change nothing, so that nothing is shown"
