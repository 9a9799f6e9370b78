"""Models of transformers: the numbers of its own Trainer in one process, those of one process under strategies that
divide rows, kills, and the way back to `from_pretrained`. Needs transformers, datasets and accelerate.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import dtf
from dtf.core.errors import Exit
from dtf.runs.recorded_run import RecordedRun

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

from tests.support.hf.plugin import EXAMPLES  # noqa: E402  after the skip

ROOT = Path(__file__).parents[2]
STEPS, BATCH, RATE, DECAY = 20, 16, 1e-3, 0.05
DRAWS = "hf_masked"
"""Its collator draws, from other numbers than the Trainer's."""

IN_FP32 = 1e-5
"""Where a part of the model, or its loss, computes in fp32 in every precision."""

NEXT_WORDS = ("hf_language", "hf_llama")  # their loss is of fp32
FP32_MODELS = ("hf_llama",)  # normalisation, softmax, rotary positions


def dtf_run(name: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`name`: of the recipe; empty: the command names a run."""
    chosen = [f"recipe={name}", f"lr.peak={RATE}", f"step.batch_size={BATCH}"] if name else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "dtf", "plugins=[tests.support.hf.plugin]", *chosen, *overrides],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def parts_of(name: str) -> tuple[Any, Any, Any]:
    """Its model without dropout, its rows to train on, and what makes a batch of them."""
    found = []
    for part, given in zip(EXAMPLES[name], ({"dropout": 0.0}, {}, {}), strict=True):
        module, _, target = part.partition(":")
        torch.manual_seed(0)
        found.append(getattr(importlib.import_module(f"tests.support.hf.{module}"), target)(**given))
    model, data, collate = found
    return model, data["train"] if isinstance(data, dict) else data[0], collate


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


def loss_in_double(name: str) -> Callable[..., torch.Tensor]:
    """Of language models and classifiers, for all micro-batches of a step together: transformers' own are of fp32."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        logits = outputs.logits
        assert logits.dtype is torch.float64
        if name in NEXT_WORDS:
            logits, labels = logits[:, :-1], labels[:, 1:]
        sums = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
        return sums / num_items_in_batch

    return loss


def by_trainer(name: str, batches: list[list[int]], folder: Path, accumulated: bool) -> tuple[Any, list[float]]:
    """The model after `STEPS` steps of transformers' Trainer, and the losses. `accumulated`: two micro-batches a step,
    and a loss in fp64; else its own.
    """
    model, rows, collate = parts_of(name)
    if name in NEXT_WORDS:
        model.loss_type = "ForCausalLM"  # else the Trainer counts the first words too, for the class of GPT-2
    losses: list[float] = []
    passes = 2 if accumulated else 1
    micro = [batch[first : first + BATCH // passes] for batch in batches for first in range(0, BATCH, BATCH // passes)]

    def of_doubles(items: list[Any]) -> Any:  # torch's losses of numbers compute in the format of labels
        batch = collate(items)
        return {key: each.double() if each.is_floating_point() else each for key, each in batch.items()}

    class Recorded(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            sampler: Any = Replayed(micro, len(rows) // BATCH * passes)
            own = self._get_collator_with_removed_columns(of_doubles)
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=own)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=STEPS, per_device_train_batch_size=BATCH // passes,
        gradient_accumulation_steps=passes, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=DECAY,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, optim="adamw_torch",
    )  # fmt: skip
    more = {"compute_loss_func": loss_in_double(name)} if accumulated else {}
    Recorded(model.double(), arguments, data_collator=collate, train_dataset=rows, **more).train()
    return model, [sum(losses[step : step + passes]) for step in range(0, len(losses), passes)]


def compare_with_trainer(name: str, folder: Path, bound: float, accumulated: bool) -> None:
    """20 steps of the same batches in fp64. The Trainer clips gradients to 1 unless it is told otherwise."""
    done = dtf_run(
        name, folder, f"run.dir={folder / 'run'}", "recipe.model.dropout=0.0", f"train.steps={STEPS}",
        "train.log_every=1", "train.record=true", "precision=fp64", "launcher=inline", "strategy=dp", "lr=constant",
        f"optimizer.weight_decay={DECAY}", "optimizer.decay_norm_and_bias=false", "step.clip_norm=1",
        f"step.micro_batch_rows={BATCH // 2 if accumulated else 0}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = RecordedRun.read(folder / "run")
    batches = [list(chain(*run.ids[step])) for step in sorted(run.ids)]
    model, losses = by_trainer(name, batches, folder, accumulated)
    mine = [run.metrics[step]["loss"] for step in sorted(run.metrics)]
    assert len(losses) == len(mine) == STEPS
    np.testing.assert_allclose(mine, losses, rtol=bound, atol=0)
    for key, tensor in model.named_parameters():
        theirs = tensor.detach().double().numpy()
        assert np.abs(run.tensors[f"model/{key}"] - theirs).max() <= bound * max(1e-3, np.abs(theirs).max()), key


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != DRAWS])
def test_steps_equal_those_of_transformers_trainer(name: str, tmp_path: Path) -> None:
    """Nothing of the Trainer is changed but the order of its batches."""
    compare_with_trainer(name, tmp_path, IN_FP32 if name in NEXT_WORDS else 1e-10, accumulated=False)


@pytest.mark.parametrize("name", ["hf_classifier", "hf_tagger", "hf_language", "hf_llama"])
def test_micro_batches_of_many_lengths_count_by_their_labels(name: str, tmp_path: Path) -> None:
    compare_with_trainer(name, tmp_path, IN_FP32 if name in FP32_MODELS else 1e-10, accumulated=True)


@pytest.mark.parametrize(("name", "processes"), [*((name, "2") for name in EXAMPLES), ("hf_language", "4")])
def test_strategies_give_the_numbers_of_one_process(name: str, processes: str, tmp_path: Path) -> None:
    """With dropout, also in attention, and rows of many lengths."""
    done = dtf_run(
        name, tmp_path, f"run.dir={tmp_path / 'run'}", "job=verify", "job.strategies=[ddp,fsdp]", "train.steps=8",
        f"job.processes=[{processes}]", "job.precisions=[fp64]", f"job.batch_size={BATCH + 2}",
    )  # fmt: skip
    assert done.returncode == 0 and "refused" not in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "4 of 4 runs have the reference's numbers" in done.stdout, done.stdout


def test_killed_ranks_and_launchers_change_no_number(tmp_path: Path) -> None:
    legs = "['ddp processes=2 kill=rank','fsdp processes=4 kill=launcher','ddp processes=4 kill=rank']"
    done = dtf_run(
        "hf_language", tmp_path, f"run.dir={tmp_path / 'run'}", "job=relay", f"job.legs={legs}", "job.steps=20"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    """On two ranks whose micro-batches have other numbers of labels."""
    values = []
    for precision in ("fp32", "bf16"):
        done = dtf_run(
            "hf_language", tmp_path, f"run.dir={tmp_path / precision}", "train.steps=20", f"precision={precision}",
            "strategy=fsdp", "launcher.processes=2", "step.micro_batch_rows=3", "lr.peak=1e-2",
            "lr.warmup=0",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        values.append(float(done.stdout.rpartition(" perplexity=")[2].split()[0]))
    assert values[0] < 50 and abs(values[1] / values[0] - 1) < 0.01, values


def test_a_trained_model_is_one_of_transformers_again(tmp_path: Path) -> None:
    """It is called, generates and is saved as one, and `from_pretrained` gives it back, ties too."""
    run = tmp_path / "run"
    done = dtf_run("hf_language", tmp_path, f"run.dir={run}", "train.steps=3", "launcher=inline", "strategy=dp")
    assert done.returncode == 0, done.stderr[-3000:]
    model: Any = dtf.load_model(run, plugins=["tests.support.hf.plugin"])
    initial, rows, collate = parts_of("hf_language")
    batch = collate([dict(rows[number]) for number in range(4)])
    with torch.no_grad():
        assert math.isfinite(float(model(**batch).loss))
    model.save_pretrained(tmp_path / "saved")
    loaded, report = type(initial).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert type(loaded) is type(initial) and loaded.lm_head.weight is loaded.transformer.wte.weight
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert not torch.equal(loaded.lm_head.weight, initial.lm_head.weight)
    words = batch["input_ids"][:1, :4]
    given = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(words, **given), loaded.generate(words, **given))


def test_weights_of_a_folder_are_what_a_run_starts_from(tmp_path: Path) -> None:
    """Ties and a format of 16 bits too: as transformers evaluates them, on two ranks."""
    model, _, collate = parts_of("hf_language")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    done = dtf_run(
        "hf_loaded", tmp_path, f"recipe.model.folder={tmp_path / 'saved'}", "train.steps=1", "lr=constant",
        "lr.peak=1e-30", "optimizer.weight_decay=0", "launcher.processes=2", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = type(model).from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    rows = importlib.import_module("tests.support.hf.taught").texts()["validation"]
    with torch.no_grad():
        expected = float(loaded(**collate([dict(row) for row in rows])).loss)
    assert float(done.stdout.rpartition(" loss=")[2].split()[0]) == pytest.approx(expected, abs=1e-4)


def test_classes_are_predicted_and_words_are_not(tmp_path: Path) -> None:
    for name in ("hf_classifier", "hf_language"):
        run = tmp_path / name
        done = dtf_run(name, tmp_path, f"run.dir={run}", "train.steps=2", "launcher=inline", "strategy=dp")
        assert done.returncode == 0, done.stderr[-3000:]
    done = dtf_run("", tmp_path, "job=predict", f"job.model={tmp_path / 'hf_classifier'}", f"run.dir={tmp_path / 'p'}")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "p" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 40 and '"class": "' in lines[0]
    done = dtf_run("", tmp_path, "job=predict", f"job.model={run}")
    assert done.returncode == Exit.CONFIG and "dtf.load_model(RUN)" in done.stderr
