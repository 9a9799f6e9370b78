"""One rank of a run of an entry, for `ranks`. It writes its boxes to files: some models are too large for JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dtf.pserver.trainer.compute import TrainerModel
from tests.support.checkpoints import boxes_of_others
from tests.support.harness import Case, _Run
from tests.support.in_process_servers import draw_in_turn, in_turn
from tests.zoo.entries import load_zoo

PLUGIN = "tests.zoo.recipe"
MICRO_BATCH_ROWS = 5
# Trainers are threads of one rank here, and these models draw. As processes each would have a global generator.
draw_in_turn()
for _name in ("forward_backward", "evaluate"):
    setattr(TrainerModel, _name, in_turn(getattr(TrainerModel, _name)))


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
    boxes = [*state.boxes, *boxes_of_others(state, run.task)]
    tensors = {str(i): box.tensor.detach().contiguous().clone() for i, box in enumerate(boxes)}
    save_file(tensors, Path(folder, f"{rank}.safetensors"))
    run.program.leased.end()
    if run.helpers:
        run.helpers.join()
    return run.found | {"boxes": [[box.name, list(box.shape), list(box.offset)] for box in boxes]}
