"""One rank of a run of an entry, for `ranks`. It writes its boxes to files: some models are too large for JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dtf.model import init
from dtf.pserver.trainer import compute
from tests.support.checkpoints import boxes_of_others
from tests.support.harness import Case, _Run
from tests.zoo.entries import load_zoo

PLUGIN = "tests.zoo.recipe"
MICRO_BATCH_ROWS = 5
_alone = threading.RLock()


def _locked(function: Callable[..., Any]) -> Callable[..., Any]:
    """One call at a time."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with _alone:
            return function(*arguments, **named)

    return call


_seeded = init._seeded


@contextmanager
def _seeded_alone(seed: int) -> Iterator[None]:
    """As dtf seeds the building of a model, one at a time."""
    with _alone, _seeded(seed):
        yield


init._seeded = _seeded_alone
# Trainers are threads of one rank here. As processes they would have a global generator each.
compute.TrainerModel.__init__ = _locked(compute.TrainerModel.__init__)
compute.TrainerModel.warmup = _locked(compute.TrainerModel.warmup)
compute.TrainerModel.forward_backward = _locked(compute.TrainerModel.forward_backward)
compute.TrainerModel.evaluate = _locked(compute.TrainerModel.evaluate)
compute.TrainerModel.trial_eval = _locked(compute.TrainerModel.trial_eval)


def train(rank: int, size: int, folder: str, which: str, **case: Any) -> dict[str, Any]:
    """Train an entry as one rank; metrics by split and step, sample ids by step, names and places of boxes.

    `case`: further fields of Case. Boxes are in `folder`, in a file of this rank. Collective.
    """
    torch.set_num_threads(1)
    entry = load_zoo()[which]
    fields: dict[str, Any] = {
        "plugin": PLUGIN,
        "recipe": {"name": "zoo", "which": which},
        "micro_batch_rows": MICRO_BATCH_ROWS,
        "precision": entry.precision,
    }
    run = _Run(rank, size, Case(**fields | case))
    run.fit()
    run.program.sync()
    state = run.program.state()
    boxes = [*state.boxes, *boxes_of_others(state)]
    tensors = {str(i): box.tensor.detach().contiguous().clone() for i, box in enumerate(boxes)}
    save_file(tensors, Path(folder, f"{rank}.safetensors"))
    run.program.end()
    if run.helpers:
        run.helpers.join()
    return run.found | {"boxes": [[box.name, list(box.shape), list(box.offset)] for box in boxes]}
