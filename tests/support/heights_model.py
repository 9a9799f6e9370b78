"""The model of `tests.support.heights`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Heights(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.line = form, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        found = self.line(x)
        return {"flat": found[:, 0], "column": found, "dict": {"height": found}}[self.form]
