"""Unmodified LightningModules: the numbers of Lightning's own Trainer in one process, and those of one process under
ddp and fsdp. Needs Lightning and torchmetrics.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf.runs.recorded_run import RecordedRun

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.slow

from tests.support.lit.plugin import EXAMPLES  # noqa: E402  after the skip

ROOT = Path(__file__).parents[2]
NINE = list(EXAMPLES)[:9]
STEPS = 20
BATCH = {"lit_glue": 32, "lit_tokens": 32, "lit_padded": 32}
"""Of loaders whose class has no argument batch_size."""


def dtf_run(name: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    more = [f"step.batch_size={BATCH[name]}"] if name in BATCH else []
    command = [sys.executable, "-m", "dtf", "plugins=[tests.support.lit.plugin]", f"recipe={name}", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [*command, f"run.dir={folder / 'run'}", *overrides],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def without_dropout(name: str) -> dict[str, Any]:
    module = importlib.import_module("tests.support.lit.modules")
    return {"dropout": 0.0} if "dropout" in getattr(module, EXAMPLES[name][0]).__init__.__code__.co_varnames else {}


class Replayed:
    """A batch sampler that gives recorded batches, epoch after epoch."""

    def __init__(self, batches: list[list[int]], per_epoch: int) -> None:
        self._batches, self._per_epoch, self._epoch = batches, per_epoch, 0

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * self._per_epoch
        self._epoch += 1
        yield from self._batches[first : first + self._per_epoch]


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))


def by_lightning(name: str, batches: list[list[int]]) -> tuple[Any, list[float], dict[str, float]]:
    """The module after `STEPS` steps of Lightning's Trainer, the losses, and the metrics of a validation."""
    modules, data = (importlib.import_module(f"tests.support.lit.{part}") for part in ("modules", "data"))
    module_name, data_name = EXAMPLES[name]
    torch.manual_seed(0)
    source = getattr(data, data_name)()
    if hasattr(source, "train_dataloader"):
        source.setup("fit")
        train, last = source.train_dataloader(), source.val_dataloader()
    else:
        train, last = source
    torch.manual_seed(0)
    module = getattr(modules, module_name)(**without_dropout(name))
    per_epoch = len(train)
    rows = torch.utils.data.DataLoader(
        train.dataset,
        batch_sampler=Replayed(batches, per_epoch),
        collate_fn=train.collate_fn,  # type: ignore[arg-type]
    )
    losses = Losses()
    trainer = pl.Trainer(
        max_epochs=math.ceil(STEPS / per_epoch), max_steps=STEPS, precision="64-true", accelerator="cpu", devices=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[losses], limit_val_batches=0, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, rows)
    metrics = {}
    if "validation_step" in vars(type(module)):
        validator = pl.Trainer(
            accelerator="cpu", devices=1, precision="64-true", logger=False, enable_progress_bar=False
        )
        (metrics,) = validator.validate(module, last, verbose=False)
    return module.double(), losses.losses, dict(metrics)


@pytest.mark.parametrize("name", NINE)
def test_steps_equal_those_of_lightnings_trainer(name: str, tmp_path: Path) -> None:
    off = [f"recipe.model.{key}={value}" for key, value in without_dropout(name).items()]
    done = dtf_run(
        name, tmp_path, *off, f"train.steps={STEPS}", "train.log_every=1", "train.record=true", "precision=fp64",
        "launcher=inline", "strategy=dp", f"train.eval_every={STEPS}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = RecordedRun.read(tmp_path / "run")
    batches = [list(chain(*run.ids[step])) for step in sorted(run.ids)]
    module, losses, metrics = by_lightning(name, batches)
    assert len(losses) == STEPS
    mine = [run.metrics[step]["loss"] for step in sorted(run.metrics)]
    np.testing.assert_allclose(mine, losses, rtol=1e-10, atol=0)
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if key not in run.tensors and f"model/{key}" not in run.tensors:
            assert "num_batches_tracked" in key, key
            continue
        own = run.tensors.get(key, run.tensors.get(f"model/{key}"))
        theirs = tensor.detach().double().numpy()
        assert np.abs(own - theirs).max() <= 1e-10 * max(1e-300, np.abs(theirs).max()), key
    evaluated = run.evaluated[max(run.evaluated)]
    for key, value in metrics.items():
        # states of torchmetrics are of fp32
        assert evaluated[key] == pytest.approx(value, rel=2e-5), key


@pytest.mark.parametrize("name", [*NINE, "lit_vae", "lit_augmented"])
def test_strategies_give_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    """With dropout, augmentation and draws."""
    more = [f"job.batch_size={BATCH[name]}"] if name in BATCH else []
    done = dtf_run(
        name,
        tmp_path,
        "job=verify",
        "train.steps=8",
        "job.strategies=[ddp,fsdp]",
        "job.processes=[2]",
        "job.precisions=[fp64]",
        *more,
    )
    assert done.returncode == 0 and "refused" not in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert any(line.startswith("ddp") for line in lines) and any(line.startswith("fsdp") for line in lines), done.stdout
