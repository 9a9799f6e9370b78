"""Networks of timm: the numbers of timm's own way of training in one process, and those of one process under ddp and
fsdp. Needs timm.

The original trainer is the loop of timm's script train.py, with timm's model, task, optimizer and schedule. With
TIMM_TRAIN=PATH it is `train_one_epoch` of that script itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtf.runs.recorded_run import RecordedRun

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS, BATCH, PIXELS, CLASSES = 20, 16, 32, 8

SGD = {"opt": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 2e-5}
ADAMW = {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05}
RMSPROP = {"opt": "rmsproptf", "lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-5, "eps": 1e-3}
EXAMPLES: dict[str, dict[str, Any]] = {
    "resnet10t": SGD,
    "regnetx_002": SGD,
    "mobilenetv3_small_050": RMSPROP,
    "convnext_atto": ADAMW,
    "mobilevit_xxs": ADAMW,
    "vit_tiny_patch16_224": ADAMW,
}
"""Residual, grouped and depthwise convolutions, a convolutional network with layer norms, attention, and both."""
KEYS: dict[str, list[str]] = {  # timm's own defaults, said in dtf's words
    "sgd": ["optimizer=sgd", "optimizer.nesterov=true"],
    "adamw": ["optimizer=adamw"],
    "rmsproptf": ["optimizer=rmsproptf", "optimizer.eps=1e-3", "optimizer.alpha=0.9"],
}


def made(name: str) -> nn.Module:
    """The network as timm's script makes it."""
    torch.manual_seed(0)
    sized = {"img_size": PIXELS} if name.startswith("vit") else {}
    return timm.create_model(name, num_classes=CLASSES, **sized)


def keys(name: str) -> list[str]:
    """Overrides that say the same as `EXAMPLES`."""
    options = EXAMPLES[name]
    words = [f"recipe.model.arch=timm/{name}", f"recipe.data.pixels={PIXELS}", f"step.batch_size={BATCH}"]
    words += [*KEYS[options["opt"]], "lr=cosine", f"lr.peak={options['lr']}"]
    words += [f"optimizer.{key}={options[key]}" for key in ("momentum", "weight_decay") if key in options]
    words += ["optimizer.decay_norm_and_bias=false", f"train.steps={STEPS}", "train.epochs=null"]
    model = made(name)
    free = sorted({*getattr(model, "no_weight_decay", set)()} & {*dict(model.named_parameters())})
    return [*words, f"optimizer.weight_decays={{{','.join(f'{part}:0' for part in free)}}}"]


SMALL_STEPS = "lr.peak=1e-4"
"""Statistics over micro-batches of four rows make much of a rounding, and large steps make more of it."""


def dtf_run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtf", "plugins=[tests.support.timm_drops]", f"run.dir={folder / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [*command, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=460
    )


class Recorded(nn.Module):
    """timm's default loss, which keeps its values."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.losses = nn.CrossEntropyLoss(), list[float]()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(outputs, targets)
        self.losses.append(loss.item())
        return loss


def by_timm(name: str, batches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, list[float]]:
    """The network after an epoch of these batches, in fp64, and the losses."""
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.task import ClassificationTask

    device, criterion = torch.device("cpu"), Recorded()
    model = made(name).double()
    task = ClassificationTask(model, criterion=criterion, device=device, dtype=torch.float64)
    optimizer = create_optimizer_v2(model, **EXAMPLES[name])
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=1, updates_per_epoch=len(batches), step_on_epochs=False
    )
    assert scheduler is not None
    if path := os.environ.get("TIMM_TRAIN"):
        spec = importlib.util.spec_from_file_location("timm_train", path)
        assert spec is not None and spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        script.train_one_epoch(
            0, model, batches, optimizer, defaults(script), task=task, device=device, lr_scheduler=scheduler,
            amp_autocast=nullcontext, model_dtype=torch.float64,
        )  # fmt: skip
    else:
        model.train()
        for number, (images, labels) in enumerate(batches):
            task(images, labels)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step_update(num_updates=number + 1)
    return model, criterion.losses


def defaults(script: Any) -> Namespace:
    """The script's options as its parser makes them, for one process without a prefetcher."""
    args = script.parser.parse_args([])
    args.prefetcher, args.distributed, args.rank, args.world_size = False, False, 0, 1
    args.log_interval = 10**9
    return args


def batches_of(run: RecordedRun) -> list[tuple[Tensor, Tensor]]:
    """The rows that a run took, in its order, in fp64."""
    from dtf.recipes.resnet.recipe import ResnetShapes

    recipe = ResnetShapes()
    recipe.data.pixels, recipe.data.flip, recipe.data.train_rows = PIXELS, False, STEPS * BATCH
    recipe.model.classes = CLASSES
    data = recipe.open_data("train", 0)
    found = []
    for step in sorted(run.ids):
        images, labels = data.fetch(np.array(list(chain(*run.ids[step]))), 0)
        found.append((recipe.receive(images).double(), labels))
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_steps_equal_those_of_timms_loop(name: str, tmp_path: Path) -> None:
    rows = ["recipe=resnet_shapes", "recipe.data.flip=false", f"recipe.data.train_rows={STEPS * BATCH}"]
    done = dtf_run(
        tmp_path, *rows, *keys(name), "precision=fp64", "launcher=inline", "strategy=dp", "train.log_every=1",
        "train.eval_every=0", "train.record=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = RecordedRun.read(tmp_path / "run")
    model, losses = by_timm(name, batches_of(run))
    assert len(losses) == STEPS
    mine = [run.metrics[step]["loss"] for step in sorted(run.metrics)]
    worst = max(abs(a - b) / abs(b) for a, b in zip(mine, losses, strict=True))
    furthest = 0.0
    for key, tensor in model.named_parameters():
        theirs = tensor.detach().numpy()
        furthest = max(furthest, np.abs(run.tensors[f"model/{key}"] - theirs).max() / max(1.0, np.abs(theirs).max()))
    print(f"{name}: losses {worst:.1e}, parameters {furthest:.1e}")
    assert worst <= 1e-10 and furthest <= 1e-10


@pytest.mark.parametrize("name", EXAMPLES)
def test_strategies_give_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    """With dropout, stochastic depth and images mirrored by chance."""
    done = dtf_run(
        tmp_path, "recipe=timm_drops", *keys(name), SMALL_STEPS, "job=verify", "job.strategies=[ddp,fsdp]",
        "job.processes=[2]", "job.precisions=[fp64]", f"job.batch_size={BATCH}",
    )  # fmt: skip
    assert done.returncode == 0 and "refused" not in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "4 of 4 runs have the reference's numbers" in done.stdout, done.stdout
    print(done.stdout)
