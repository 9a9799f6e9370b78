"""Try an entry under a strategy: the numbers of one process, a refusal, or a fault."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dtf.api.layout import Layout, SplitBy
from dtf.api.registry import lookup
from dtf.config.settings import load_parts
from dtf.strategies.buffers import SHARE
from tests.support.harness import _enums
from tests.support.ranks import MORE, ranks
from tests.zoo import plain
from tests.zoo.causes import CAUSES, cause_of
from tests.zoo.entries import ZooModel, keys, load_zoo
from tests.zoo.recipe import LAYOUTS

if "tests.zoo.preload" not in MORE:
    MORE.append("tests.zoo.preload")
load_parts([])

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("dp", {}),
    "ddp": ("ddp", {}),
    "zero1": ("ddp", {"shard_optimizer": True}),
    "fsdp": ("fsdp", {}),
    "tensor": ("tensor", {}),
    "pipeline": ("pipeline", {}),
    "pserver": ("pserver", {}),
    "mesh zero=2": ("mesh", {"zero": 2}),
    "mesh tensor=2": ("mesh", {"tensor": 2}),
    "mesh pipeline=2 tensor=2": ("mesh", {"pipeline": 2, "tensor": 2}),
}
"""Name in the table -> strategy and options."""

CLEAN = ("dp", "ddp", "zero1", "fsdp", "pserver")
"""Strategies that should train nearly everything."""

STEPS = 4
BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "narrow": 1e-3}
"""By precision; `narrow`: of models that round by themselves, to bfloat16 or to eight bits."""
ROUNDING = 1e-4
SILENT_S = 60.0
"""How long a call of all ranks may take; for large models, five times as long."""


class Outcome(NamedTuple):
    """`kind`: same, refused, WRONG, CRASHED or SILENT. `cause`: of a refusal. `text`: what there is to read."""

    kind: str
    cause: str = ""
    text: str = ""

    @property
    def shown(self) -> str:
        return f"refused: {self.cause}" if self.kind == "refused" else self.kind


class Fault(Exception):
    """A run ended otherwise than it should have."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class Numbers(NamedTuple):
    """What a run came to."""

    metrics: dict[str, dict[str, dict[str, float]]]
    ids: dict[str, list[int]]
    tensors: dict[str, Tensor]


def train(which: str, strategy: str, processes: int, **case: Any) -> Numbers:
    """Train an entry on the ranks that a strategy starts. Fault when it is refused or fails."""
    name, options = STRATEGIES[strategy]
    kind = lookup("strategy", name)
    size = next(iter(kind(**_enums(kind, options)).roles(processes).values()))
    case = {"steps": STEPS, "eval_every": plain.EVAL_EVERY} | case
    case |= {"strategy": name, "options": options, "slots": processes}
    with tempfile.TemporaryDirectory(prefix="dtf-zoo-") as folder, _faults():
        patience_s = SILENT_S * (5 if load_zoo()[which].slow else 1)
        results = ranks(size, "tests.zoo.worker:train", patience_s, shared=True, folder=folder, which=which, **case)
        ids = results[0]["ids"]
        for other in results[1:]:
            for step, more in other["ids"].items():
                ids[step] = ids[step] + more
        tensors = _joined(folder, [result["boxes"] for result in results])
    return Numbers({split: results[0][split] for split in ("train", "eval")}, ids, tensors)


@contextmanager
def _faults() -> Iterator[None]:
    """A failed call of ranks, as a Fault that says how it failed."""
    try:
        yield
    except AssertionError as error:
        text = str(error)
        refusal = re.search(
            r"^(?:[\w.]*\.)?((?:Config|Layout)Error): (.*?)(?=\nits log:|\Z)", text, re.DOTALL | re.MULTILINE
        )
        if "no answer within" in text:
            raise Fault(Outcome("SILENT", text=text)) from error
        if refusal:
            said = " ".join(refusal[2].split())
            raise Fault(Outcome("refused", cause_of(said), said)) from error
        raise Fault(Outcome("CRASHED", text=_last_line(text))) from error


def _last_line(text: str) -> str:
    """The exception at the end of the traceback, and the place in dtf that it comes from."""
    lines = text.split("\nits log:")[0].strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File") and "/dtf/" in line]
    place = re.sub(r'File ".*?/(dtf/[^"]*)", line (\d+), in (\w+)', r"\1:\2 \3", places[-1]) if places else ""
    return f"{' '.join(lines[-3:])[-400:]} [{place}]"


def _joined(folder: str, boxes: list[list[Any]]) -> dict[str, Tensor]:
    """Tensors put together from the boxes of all ranks, each element once."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for rank, own in enumerate(boxes):
        parts = load_file(Path(folder, f"{rank}.safetensors"))
        for i, (name, shape, offset) in enumerate(own):
            part = parts[str(i)]
            if name not in whole:
                whole[name], times[name] = torch.zeros(shape, dtype=part.dtype), torch.zeros(shape, dtype=torch.int8)
            place = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
            whole[name][place] = part
            times[name][place] += 1
    for name, count in times.items():
        if not bool((count == 1).all()):
            raise Fault(Outcome("WRONG", text=f"{name} is written {int(count.min())} to {int(count.max())} times"))
    return whole


@lru_cache(maxsize=8)
def alone(which: str, steps: int = STEPS) -> Numbers | Outcome:
    """The run of one process; its outcome where it fails."""
    try:
        return train(which, "ddp", 1, steps=steps)
    except Fault as fault:
        return fault.outcome


def difference(a: Numbers, b: Numbers, precision: str = "fp64") -> tuple[float, str]:
    """The largest max|a - b| / max|a| over tensors and metrics, and the name of what differs most.

    What is nothing but rounding beside the other tensors of its kind has no relative bound: the gradient of a bias that
    a batch normalisation takes off again is 0 in exact arithmetic. In fp32 the parameters are compared as one vector.
    """
    if a.ids != b.ids:
        return float("inf"), "sample ids"
    mine, theirs = ({k: v for k, v in run.tensors.items() if not k.startswith(SHARE)} for run in (a, b))
    if mine.keys() != theirs.keys():
        return float("inf"), f"names of tensors: {sorted(mine.keys() ^ theirs.keys())[:4]}"
    if precision == "fp32":
        return _apart_as_a_whole(mine, theirs)
    worst, least = (0.0, ""), _least(mine)
    for name, tensor in mine.items():
        worst = max(worst, (_apart(tensor, theirs[name], least[_kind(name)]), name))
    for split, by_step in a.metrics.items():
        if by_step.keys() != b.metrics[split].keys():
            return float("inf"), f"steps of {split}"
        for step, values in by_step.items():
            for key, value in values.items():
                other = b.metrics[split][step][key]
                worst = max(worst, (_apart(torch.tensor(value), torch.tensor(other)), f"{split} {key} at step {step}"))
    return worst


def _apart_as_a_whole(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """The norm of the difference of all real tensors of the model by that of all of them."""
    names = [name for name, tensor in mine.items() if _kind(name) == "model" and tensor.is_floating_point()]
    norm = sum(float(mine[name].double().square().sum()) for name in names) ** 0.5
    off = sum(float((mine[name].double() - theirs[name].double()).square().sum()) for name in names) ** 0.5
    return off / max(norm, 1e-30) if np.isfinite(off) else float("inf"), "the whole model"


def _kind(name: str) -> str:
    """`model`, or which state of the optimizer."""
    kind, _, rest = name.partition("/")
    return kind if kind == "model" else f"{kind} {rest.rpartition('/')[2]}"


def _least(tensors: dict[str, Tensor]) -> dict[str, float]:
    """By kind, the size below which a tensor is rounding: a part of that of the largest."""
    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            largest[_kind(name)] = max(largest.get(_kind(name), 0.0), float(tensor.abs().max()))
    return {kind: largest.get(kind, 0.0) * ROUNDING for kind in map(_kind, tensors)}


def _apart(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    apart = float((a - b).abs().max() / a.abs().max().clamp(min=max(least, 1e-30)))
    return float("inf") if np.isnan(apart) else apart


def _bound(entry: ZooModel) -> float:
    return BOUNDS["narrow" if "narrow" in entry.tags else entry.precision]


def attempt(entry: ZooModel, strategy: str, processes: int) -> Outcome:
    """Whether a strategy gives the numbers of one process, evaluation included."""
    reference = alone(entry.name)
    if isinstance(reference, Outcome):  # nothing to compare with; under this strategy it has to be refused alike
        return reference
    try:
        found = train(entry.name, strategy, processes)
    except Fault as fault:
        return fault.outcome
    apart, where = difference(reference, found, entry.precision)
    if apart > _bound(entry):
        return Outcome("WRONG", text=f"{where} differs by {apart:.1e}")
    return Outcome("same", text=f"{apart:.1e}")


def processes_for(place: int, name: str) -> tuple[int, ...]:
    """How many processes an entry, the `place`-th of all, is tried on: two, a third of them three, and four where its
    author says both how to cut and how to split it.
    """
    layout = LAYOUTS.get(name, Layout())
    return 2, *((3,) if place % 3 == 0 else ()), *((4,) if layout.blocks and layout.splits else ())


def strategies_for(entry: ZooModel, strategies: Sequence[str], processes: int) -> list[str]:
    """Those that can be tried here on so many processes: trainers are threads of one rank, and each would need
    variables of modules of its own. On four processes what needs four is tried.
    """
    found = [strategy for strategy in strategies if strategy != "pserver" or "global variable" not in entry.tags]
    return [strategy for strategy in found if _fits(strategy, processes)]


def _fits(strategy: str, processes: int) -> bool:
    _, options = STRATEGIES[strategy]
    degree = options.get("pipeline", 1) * options.get("tensor", 1)
    return degree == processes if degree > 1 else processes < 4


def attempt_plain(entry: ZooModel) -> Outcome:
    """Whether one process starts and learns as plain torch does: initial tensors, losses and gradient norms."""
    reference = alone(entry.name)
    if isinstance(reference, Outcome):
        return reference
    batches = [rows for _, rows in sorted(reference.ids.items(), key=lambda each: int(each[0]))]
    expected = plain.run(entry, batches, 5)
    start = alone(entry.name, 0)
    if isinstance(start, Outcome):
        return start
    for name, tensor in expected.initial.items():
        found = start.tensors.get(f"model/{name}")
        if found is not None and not torch.equal(found, tensor.to(found.dtype)):
            return Outcome("WRONG", text=f"{name} does not start as its constructor made it")
    if entry.draws:
        return Outcome("same", text="initial tensors")
    apart, where = 0.0, ""
    for step, (loss, norm) in enumerate(zip(expected.losses, expected.norms, strict=True), 1):
        values = reference.metrics["train"][str(step)]
        for key, value in (("loss", loss), ("grad_norm", norm)):
            off = abs(values[key] - value) / max(abs(value), 1e-30)
            if not off <= apart:
                apart, where = off, f"{key} at step {step}"
    return Outcome("same" if apart <= _bound(entry) else "WRONG", text=f"{where} differs by {apart:.1e}")


def is_allowed(entry: ZooModel, strategy: str, processes: int, outcome: Outcome) -> bool:
    """Whether an entry says that a strategy may come to this outcome. What divides a model may ask for a layout, or for
    one of more blocks.
    """
    must, layout = entry.must_refuse(strategy), LAYOUTS.get(entry.name, Layout())
    name, options = STRATEGIES[strategy]
    parts = 1
    if name == "pipeline" or "pipeline" in options:
        parts = len(layout.blocks) // options.get("pipeline", processes)
    if name == "tensor" or "tensor" in options:
        heads = [by.groups or by.heads for by in layout.splits.values() if isinstance(by, SplitBy) and by.heads]
        enough = min(heads, default=processes) >= options.get("tensor", processes)
        parts = min(parts, len(layout.splits)) if enough else 0
    if not parts and outcome.kind == "refused" and outcome.cause in CAUSES:
        return True
    if must:
        return (outcome.kind, outcome.cause) == ("refused", must)
    may = [causes[key] for causes in (entry.refused, entry.may) for key in keys(strategy) if key in causes]
    return outcome.kind == "same" or (outcome.kind == "refused" and outcome.cause in may)


def is_allowed_alone(entry: ZooModel, outcome: Outcome) -> bool:
    """As `is_allowed`, of one process against plain torch."""
    if "*" in entry.refused:
        return (outcome.kind, outcome.cause) == ("refused", entry.refused["*"])
    return outcome.kind == "same" or (outcome.kind == "refused" and outcome.cause == entry.may.get("*"))
