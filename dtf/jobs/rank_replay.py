"""What the rank of `job=verify job.replay=RUN` does: apply the recorded updates of a run with parameter servers again,
and compare the result with the original.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dtf.api.precision import Format, set_switches
from dtf.api.recipe import Recipe
from dtf.api.task import Source, Task
from dtf.checkpoint.boxes import StoredCheckpoint
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.options import Every
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.config.settings import parse_settings
from dtf.core.errors import ConfigError, DataError, Exit, Preempted
from dtf.core.json_lines import rows
from dtf.core.text import count_text
from dtf.core.types import Box, Event, Failed, Note, Place
from dtf.data.splits import Splits
from dtf.engine.inference import Pace
from dtf.engine.rank import stop_signals
from dtf.host.heartbeat import beat
from dtf.model.ema import with_ema
from dtf.model.init import construct
from dtf.model.pretrained import Weights, match_weights, open_weights
from dtf.pserver.record.recorder import read
from dtf.pserver.record.replay import Replay
from dtf.pserver.strategy import Pserver
from dtf.runs.compare import FP32_BOUND, FP64_BOUND, relative
from dtf.runs.recorded_run import checkpoint_tensors, in_order

RESULT = "replay.json"


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """An entry, see `rank_process.Entry`. `config`: the recorded run's, with `run.dir` its folder.

    Writes RESULT into `folder`.
    """
    with stop_signals() as signals:
        try:
            _replay(config, Path(folder), place, send, lambda: bool(signals))
        except Preempted as stopped:
            send(Failed(place.rank, 0, int(stopped.exit), str(stopped), ""))
            return stopped.exit
    return Exit.OK


def _replay(
    config: dict[str, Any], folder: Path, place: Place, send: Callable[[Event], None], stop: Callable[[], bool]
) -> None:
    """Apply the recorded updates in their order, in this process, and write into `folder` how far the result is from
    the run's last checkpoint.
    """
    run, settings = Path(config["run"]["dir"]), parse_settings(config)
    strategy = settings.strategy
    if not isinstance(strategy, Pserver) or not strategy.record:
        raise ConfigError(f"job.replay={run} is no run with strategy=pserver and strategy.record=PATH")
    _refuse_gathered(run)
    torch.set_num_threads(place.threads)
    set_switches(settings.precision)
    final = resolve_checkpoints(str(run), "job.replay")[0]
    start, recorded, events = read(run / strategy.record, strategy.servers)
    rows = Splits(settings.recipe, settings.sampler, settings.step.batch_size, settings.seed, pin=False)
    rows.cut()
    task = Task(
        settings.recipe,
        with_ema(settings.optimizer, settings.step.ema),
        settings.precision,
        settings.step,
        settings.seed,
        rows.sample,
        _weights(settings.recipe, final),
        replace(settings.sparse, disk="", memory_gb=0.0),  # rows have the same bits in memory, and are compared there
    )
    world = json.loads((run / "run.json").read_text())["world"]
    trainers = strategy.count_trainers(world.get("roles", {}).get("trainer", world["processes"]))
    replay = Replay(task, strategy, strategy.sync_mode(task), trainers, rows.loader, _start_checkpoint(run, start))
    pace, total = Pace(send, "updates", min(recorded)), max(recorded)
    send(
        Note(
            "info",
            f"replay of {count_text(total, 'update')} from step {start} in one process of "
            f"{count_text(place.threads, 'thread')}",
        )
    )

    def report(updates: int) -> None:
        beat("step", updates)
        if stop():
            raise Preempted(
                f"asked to stop after {updates:,} of {total:,} updates; a replay keeps nothing; start again to do all "
                "of it"
            )
        pace.report(updates)

    replay.run(events, report)
    updates = [state.applied for state in replay.server_state]
    result = {"checkpoint": str(final), "start": start, "updates": updates}
    result |= _compare(final, _merged(replay.boxes()), exact=settings.precision.param is Format.fp64)
    (folder / RESULT).write_text(json.dumps(result | {"losses": _first_and_last_loss(run, config)}))


def _refuse_gathered(run: Path) -> None:
    """Raise ConfigError for a run of an earlier version whose updates were made of another number of pushes."""
    saved = yaml.safe_load((run / "config.yaml").read_text())
    if gather := saved["strategy"].get("gather"):
        raise ConfigError(
            f"job.replay={run} was recorded with strategy.gather={gather}, which this version has no more; replay it "
            "with the version that recorded it"
        )


def _compare(final: Path, replayed: dict[str, np.ndarray], exact: bool) -> dict[str, Any]:
    """How far the replayed tensors are from those of the checkpoint `final`: the largest relative difference, which
    tensor has it, and how many are beyond the bound. DataError when the tensors are not the same ones.
    """
    expected = checkpoint_tensors(final)
    if expected.keys() != replayed.keys():
        raise DataError(
            f"{final} and its replay hold other tensors: {', '.join(sorted(expected.keys() ^ replayed.keys())[:5])}"
        )
    differences = {name: relative(expected[name], replayed[name]) for name in expected}
    worst = max(sorted(differences), key=lambda name: differences[name])
    bound = FP64_BOUND if exact else FP32_BOUND
    beyond = sum(not value <= bound for value in differences.values())
    return {
        "tensor": differences[worst],
        "worst": worst,
        "beyond": beyond,
        "tensors": len(differences),
        "bound": bound,
        "ok": not beyond,
    }


def _first_and_last_loss(run: Path, config: dict[str, Any]) -> list[float]:
    """Training losses that the recorded run reported; empty where it reported none."""
    file = run / Path(config["observer"].get("jsonl", {}).get("path", "metrics.jsonl")).name
    losses = [
        row["loss"] for row in rows(file, {"split": str}) if row["split"] == "train" and row.get("loss") is not None
    ]
    return [losses[0], losses[-1]] if losses else []


def _weights(recipe: Recipe, final: Path) -> Weights | None:
    """The weights that the run started from; None where it drew them. DataError when their files have changed."""
    place, key = recipe.fine_tuning.weights, "recipe.model.weights"
    if not place:
        return None
    weights = match_weights(open_weights(place, key), recipe, construct(recipe), key)[0]
    if weights.digest() != StoredCheckpoint(final).scalars.get(key):
        raise DataError(f"{key}={place} has changed since the run started from it, so that nothing can be replayed")
    return weights


def _start_checkpoint(run: Path, start: int) -> Source | None:
    """The checkpoint that the recorded attempt started from; None at step 0. DataError when it is gone."""
    if not start:
        return None
    path = run / "checkpoints" / f"step_{start:06d}"
    if not path.is_dir():
        raise DataError(
            f"the recorded attempt began with {path}, which is gone; keep more of them with checkpoint.keep_last"
        )
    reader = Checkpointer(run / "checkpoints", Every(), _NoPeers(), "", ("loss", "min"), "pserver").load(path)
    reader.scalars = reader.scalars["program"]
    return reader


class _NoPeers:
    """The peers of a process that runs alone."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


def _merged(boxes: list[Box]) -> dict[str, np.ndarray]:
    """Whole tensors by name. Rows of a table that several servers hold are in order of ids."""
    tables: dict[str, list[np.ndarray]] = {}
    merged: dict[str, np.ndarray] = {}
    for box in boxes:
        values = box.tensor.detach().cpu()
        array = values.numpy() if values.dtype is torch.int64 and box.name.endswith("/ids") else values.double().numpy()
        if box.name.startswith("table/"):
            tables.setdefault(box.name, []).append(array)
            continue
        whole = merged.setdefault(box.name, np.full(box.shape, np.nan))
        whole[tuple(slice(at, at + n) for at, n in zip(box.offset, array.shape, strict=True))] = array
    for name, parts in tables.items():
        merged[name] = np.concatenate(parts) if parts[0].ndim else parts[0]
    # each server counts its own rows only
    for name in [name for name in merged if name.startswith("table/") and name.endswith("/count")]:
        merged[name] = np.asarray(float(len(merged[name.removesuffix("count") + "ids"])))
    return in_order(merged)
