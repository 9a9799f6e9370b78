"""What depends on how a batch is cut is told at the start."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from dtf.api.options import StepOptions
from dtf.data.map_style import map_style
from dtf.engine.mixed_rows import cut_row, mixed_rows
from dtf.model.freeze import freeze

PAIRS = TensorDataset(torch.zeros(8, 3), torch.zeros(8))
STACKED, PADDED = map_style(PAIRS), map_style(PAIRS, collate_fn=lambda items: default_collate(items))


def test_what_computes_rows_together() -> None:
    norms = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    assert mixed_rows(norms, STACKED) == ["statistics of 1 (BatchNorm1d) and 1 more"]
    assert len(mixed_rows(norms.eval(), STACKED)) == 1, "as models come from a file: steps put them into training mode"
    assert not norms[1].training
    freeze(norms, ["1", "3"])
    assert mixed_rows(norms.train(), STACKED) == [], "they are frozen: their statistics are what they keep"
    assert mixed_rows(nn.Linear(3, 3), PADDED) == ["the padding of rows of several shapes"]


def test_it_is_told_where_the_number_of_ranks_cuts_the_batch() -> None:
    step = replace(StepOptions(), batch_size=64, micro_batch_rows=0)
    told = cut_row(["a", "b"], step, 32)
    assert told == {"depends on": "the number of ranks: a and b; with step.micro_batch_rows=32 any gives these numbers"}
    assert not cut_row([], step, 32)
    assert not cut_row(["a"], step, 64), "one rank computes all"
    assert not cut_row(["a"], replace(step, micro_batch_rows=32), 32)
