"""What the last stage of a cut model gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtf.strategies.pipeline.graph_split import GraphSplit


@dataclass
class Answer:
    scores: Tensor
    penalty: Tensor


class Answering(nn.Sequential):
    def forward(self, x: Tensor) -> Answer:
        y = self[1](self[0](x))
        return Answer(scores=y, penalty=y.square().mean())


def test_an_output_is_made_by_the_names_of_its_fields() -> None:
    model, x = Answering(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    split = GraphSplit(model, (("0",), ("1",)), fine=False)
    found = split.segment(1, 2)(*split.segment(0, 1)(x))
    assert found.scores.equal(model(x).scores)
    assert found.penalty.equal(model(x).penalty)
