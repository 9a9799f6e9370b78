"""What computes a row together with the other rows of its micro-batch. It depends on how many ranks there are where
each has its share of the batch as one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dtf.api.options import StepOptions
from dtf.api.recipe import Dataset
from dtf.model.batch_statistics import trained_parts


def mixed_rows(model: nn.Module, rows: Dataset) -> list[str]:
    """Short texts: batch normalisations that train, and rows that are padded to the longest of a micro-batch."""
    norms = [
        f"{name} ({type(module).__name__})"
        for name, module in trained_parts(model).items()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    found = [f"statistics of {norms[0]}{f' and {len(norms) - 1} more' * (len(norms) > 1)}"] if norms else []
    return found + ["the padding of rows of several shapes"] * rows.shapes_vary


def cut_row(mixed: Iterable[str], step: StepOptions, rows: int) -> dict[str, str]:
    """For the start-up table; empty where nothing depends on the number of ranks. `rows`: of a micro-batch."""
    listed = " and ".join(mixed)
    if not listed or step.micro_batch_rows or rows >= step.batch_size:
        return {}
    return {"depends on": f"the number of ranks: {listed}; with step.micro_batch_rows={rows} any gives these numbers"}
