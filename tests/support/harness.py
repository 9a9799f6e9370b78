"""Train the toy recipe on a given number of ranks without a launcher: what the law tests run on warm ranks."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dtf.api.lr import Constant
from dtf.api.options import FineTuning, Remat, StepOptions
from dtf.api.precision import Cast, Format, Precision
from dtf.api.registry import lookup, registered
from dtf.api.sampler import Tail
from dtf.api.task import Task
from dtf.checkpoint.checkpointer import Checkpointer, Every
from dtf.config.settings import load_parts
from dtf.core.types import Box, Measured, Place, Saved, Shard, State
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential, Shuffle
from dtf.distributed.world import World
from dtf.engine.clock import Plan, PlannedClock
from dtf.engine.loop import Loop, fit
from dtf.model.ema import with_ema
from dtf.model.forward import zero_rows_for_tables
from dtf.model.init import build_on_meta
from dtf.model.pretrained import match_weights, open_weights
from dtf.runs.compare import in_order
from dtf.strategies.buffers import SHARE
from dtf.strategies.pipeline import cost_model
from tests.support.in_process_servers import HelperThreads, KillableTransport, connect
from tests.support.lossy_network import LossyTransport
from tests.support.ranks import ranks
from tests.support.sparse_toy import Tabled  # noqa: F401 (registers itself)
from tests.support.toy import Toy  # noqa: F401

PRECISIONS = {
    "fp64": Precision(param=Format.fp64, compute=Format.fp64),
    "fp32": Precision(),
    "bf16": Precision(compute=Format.bf16, cast=Cast.autocast),
    "bf16_params": Precision(param=Format.bf16, compute=Format.bf16),
    "bf16_master": Precision(compute=Format.bf16),
    "fp16": Precision(compute=Format.fp16, cast=Cast.autocast, loss_scale=2.0**16),
}


class Halt(Exception):
    """The run ends here, as if killed."""


def train(
    rank: int,
    size: int,
    strategy: str = "ddp",
    options: dict[str, Any] | None = None,
    slots: int = 0,
    steps: int = 6,
    save_every: int = 0,
    halt: bool = False,
    start: str = "",
    folder: str = "",
    micro_batch_rows: int = 5,
    optimizer: str = "sgd",
    precision: str = "fp64",
    tail: str = "partial",
    clip_norm: float = 1.0,
    eval_every: int = 4,
    log_every: int = 1,
    recipe: dict[str, Any] | None = None,
    skip_nonfinite: int = 0,
    plugin: str = "",
    remat: str = "none",
    ema: float = 0.0,
    freeze: list[str] | None = None,
    weights: str = "",
    lr_factors: dict[str, float] | None = None,
    sparse: str = "adagrad",
    sparse_options: dict[str, Any] | None = None,
    network: int | None = None,
    deaths: int | None = None,
) -> dict[str, Any]:
    """All `steps` of a run, from the checkpoint `start` if given; saves to `folder` if given; `halt`: dies after the
    first save; `network`: the seed of a bad one between processes of several roles, whose misdeeds are counted in
    `met`; `deaths`: the seed of those of trainers, which are counted in `died`.

    By default one epoch of five steps, and the first of the next.
    Returns metrics by split and step, sample ids by step, and every box of the state that this rank writes: global
    shape, offset, nested lists.
    """
    torch.set_num_threads(1)
    cost_model.MOST_ROUNDS = 2  # any cut will do
    load_parts([plugin] if plugin else [])
    values = {"name": "toy", "rows": 100, **(recipe or {})}
    toy = lookup("recipe", values.pop("name"))(**values)
    if freeze or weights:
        toy.model = FineTuning(weights=weights, freeze=freeze or [])
    step = StepOptions(
        batch_size=24, micro_batch_rows=micro_batch_rows, clip_norm=clip_norm, remat=Remat(remat), ema=ema
    )
    start_from = (
        match_weights(open_weights(weights, "weights"), toy, build_on_meta(toy), "weights")[0] if weights else None
    )
    stepper = with_ema(lookup("optimizer", optimizer)(lr_factors=lr_factors or {}), ema)
    task = Task(
        toy,
        stepper,
        PRECISIONS[precision],
        step,
        0,
        weights=start_from,
        rows=lookup("sparse", sparse)(**(sparse_options or {})),
    )
    options = options or {}
    if "servers" in options and stepper.by_tensor:
        options = {key: value for key, value in options.items() if key != "min_block"} | {"slice_parameters": False}
    chosen = lookup("strategy", strategy)(**_enums(lookup("strategy", strategy), options))
    world = World(Place(rank=rank, size=size, slots=slots or size))
    training, evaluation = toy.open_data("train", 0), toy.open_data("eval", 0)
    task = replace(task, sample=lambda rows: zero_rows_for_tables(training.fetch(np.arange(rows), 0)[0], toy.tables()))
    chosen.check(task, slots or size, "cpu")
    several = len(chosen.roles(1)) > 1
    networks: list[LossyTransport] = []

    def between(client: Any) -> Any:
        if network is not None:
            client = LossyTransport(client, seed=network + 1000 * len(networks))
            networks.append(client)
        return client if deaths is None else KillableTransport(client)

    if several:
        # of a region's request the second one is refused, and handlers have to bear it
        connect(between, 0 if network is None or network % 2 else 1 << 30)
    program = chosen.setup(task, world)
    epochs, eval_epochs = (
        Epochs(Shuffle(tail=Tail[tail]), len(training), 24, 0),
        Epochs(Sequential(), len(evaluation), 24, 0),
    )
    result: dict[str, Any] = {
        "train": {},
        "eval": {},
        "ids": {},
        "tensors": {},
        "micro_batch_rows": program.micro_batch_rows,
    }
    saver = Checkpointer(Path(folder or "unused"), Every(), world, "test", toy.objective, strategy) if folder else None

    def rows(split: str, shard: Shard | None, micro_batch_rows: int) -> Loader:
        return Loader(*{"train": (training, epochs), "eval": (evaluation, eval_epochs)}[split], shard, micro_batch_rows)

    def run_helper() -> HelperThreads | None:
        return HelperThreads(chosen, task, slots or size, rows, program, deaths) if several and rank == 0 else None

    first = next(iter(chosen.roles(1)))
    assistants = run_helper() if first == "trainer" else None  # whoever computes asks them for rows
    loader = rows("train", program.shard, program.micro_batch_rows)
    program.warmup(program.prepare(loader.get(0, 0)))
    state, carried = None, None
    if start:
        reader = Checkpointer(Path(start), Every(resume=start), world, "test", toy.objective, strategy)
        path = reader.find(0)
        assert path is not None
        source = reader.load(path)
        state, carried, source.scalars = source.scalars["clock"], source.scalars["window"], source.scalars["program"]
        program.load(source)
    world.barrier()  # all servers can be found
    assistants = assistants or run_helper()
    clock = PlannedClock(
        Plan(steps, log_every, eval_every, save_every, objective=toy.objective), epochs, Constant(peak=0.1), state
    )

    def see(event: Any) -> None:
        if isinstance(event, Measured):
            result[event.split][str(event.step)] = {
                key: value for key, value in event.values.items() if key != "rows_per_s"
            }
        if halt and isinstance(event, Saved):
            raise Halt

    loop = Loop(
        program=program,
        clock=clock,
        train=loader,
        evaluation=rows("eval", program.shard, -(-24 // program.shares)),
        evaluation_rows=len(evaluation),
        recipe=toy,
        world=world,
        saver=saver,
        see=see,
        scalars={},
        steps_per_epoch=epochs.batches,
        skip_nonfinite=skip_nonfinite,
        record=lambda step, ids: result["ids"].setdefault(str(step), []).extend(i for i in ids.tolist() if i >= 0),
        carried=carried,
        averages=bool(ema),
    )
    with suppress(Halt):
        fit(loop)
    program.sync()
    left = program.state()
    for box in [*left.boxes, *_others(left)]:
        tensor = box.tensor if box.name.endswith("/ids") else box.tensor.double()
        result["tensors"].setdefault(box.name, []).append([list(box.shape), list(box.offset), tensor.tolist()])
    program.end()
    if assistants:
        assistants.join()
        result |= {"met": sum((each.met for each in networks), Counter()), "died": assistants.died}
    return result


def _others(state: State) -> list[Box]:
    """What other processes write for this rank."""
    found: list[Box] = []
    if state.others:
        with tempfile.TemporaryDirectory(prefix="dtf-others-") as folder:
            for part in state.others(Path(folder)):
                tensors = load_file(Path(folder, part["file"]))
                found += [
                    Box(name, tensors[key], tuple(shape), tuple(offset))
                    for name, _, shape, key, offset, _ in part["boxes"]
                ]
    return found


def _enums(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Option texts as the class's enum members."""
    defaults = cls()
    return {
        key: type(default)(value) if isinstance(default := getattr(defaults, key), Enum) else value
        for key, value in options.items()
    }


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Every registered strategy with its defaults, and the options that change how numbers are made."""
    load_parts([])
    extra = [
        ("dp", {"reduce": "all"}),
        ("ddp", {"shard_optimizer": True}),
        ("ddp", {"static_graph": True, "bucket_mb": 0.0001}),
        ("fsdp", {"unit": "layer", "reshard_after_forward": False, "prefetch": 0}),
        ("pipeline", {"schedule": "gpipe", "balance": "flops"}),
        ("pserver", {"servers": 2, "min_block": 1}),
    ]
    # tests register faulty ones
    own = [name for name, cls in registered("strategy").items() if cls.__module__.startswith("dtf.")]
    return [(name, {}) for name in own] + extra


def meshes() -> list[tuple[str, dict[str, Any]]]:
    """Combinations of a strategy with data parallelism, for even numbers of processes."""
    return [
        ("fsdp", {"replicate": 2}),
        ("fsdp", {"replicate": 2, "unit": "stage"}),
        ("tensor", {"degree": 2}),
        ("pipeline", {"degree": 2}),
    ]


def spread(strategy: str, processes: int, **case: Any) -> dict[str, Any]:
    """`train` on the ranks that the strategy starts for `processes`; metrics of rank 0, ids and tensors of all."""
    chosen = lookup("strategy", strategy)
    size = next(iter(chosen(**_enums(chosen, case.get("options") or {})).roles(processes).values()))
    results = ranks(size, "tests.support.harness:train", strategy=strategy, slots=processes, **case)
    merged = _whole(results)
    for other in results[1:]:
        for step, ids in other["ids"].items():
            merged["ids"][step] = merged["ids"][step] + ids
    return merged


def _whole(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rank's result with every tensor put together from all ranks' boxes, each element exactly once."""
    parts: dict[str, list[Any]] = {}
    for result in results:
        for name, boxes in result["tensors"].items():
            parts.setdefault(name, []).extend(boxes)
    tensors = {}
    for name, boxes in parts.items():
        whole, times = np.zeros(boxes[0][0], np.int64 if name.endswith("/ids") else np.float64), np.zeros(boxes[0][0])
        for _, offset, value in boxes:
            place = tuple(slice(at, at + size) for at, size in zip(offset, np.shape(value), strict=True))
            whole[place] = value
            times[place] += 1
        assert (times == 1).all(), name
        tensors[name] = whole
    return results[0] | {"tensors": {name: tensor.tolist() for name, tensor in in_order(tensors).items()}}


@lru_cache(maxsize=32)
def _reference(case: str) -> dict[str, Any]:
    return _whole(ranks(1, "tests.support.harness:train", **json.loads(case)))


def reference(**case: Any) -> dict[str, Any]:
    """The one-process run that all others must equal; made once in the session."""
    return dict(_reference(json.dumps(case, sort_keys=True)))


def difference(a: dict[str, Any], b: dict[str, Any], without: tuple[str, ...] = ()) -> float:
    """Largest max|a - b| / max|a| over metrics and tensors but those named `without`; the same names and sample ids are
    asserted.
    """
    assert a["ids"] == b["ids"]
    names, others = ({name for name in run["tensors"] if not name.startswith((SHARE, *without))} for run in (a, b))
    assert names == others
    pairs = [(a["tensors"][name], b["tensors"][name]) for name in names]
    for split in ("train", "eval"):
        assert a[split].keys() == b[split].keys()
        pairs += [(list(a[split][step].values()), list(b[split][step].values())) for step in a[split]]
    assert all(np.shape(x) == np.shape(y) for x, y in pairs)
    # NaN stays NaN
    return float(
        np.max(
            [np.abs(np.asarray(x) - np.asarray(y)).max() / max(np.abs(x).max(), 1e-30) for x, y in pairs if np.size(x)]
        )
    )
