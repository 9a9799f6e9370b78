"""A model and its sparse tables as one module that needs no dtf: learnt rows are tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from dtf.sparse.sharded_tables import ShardedTables
from dtf.sparse.store import SparseTable


class InferenceModule(nn.Module):
    """`model`, called with ids (B, F) int64 in place of rows (B, F, width).

    The row of an id that was never trained is zeros, the mean of new rows.
    """

    def __init__(self, model: nn.Module, tables: dict[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.model = model
        self.tables = nn.ModuleDict({name: _InferenceTable(*table) for name, table in tables.items()})

    @classmethod
    def of(
        cls, model: nn.Module, tables: ShardedTables, kept: Callable[[SparseTable], np.ndarray] | None = None
    ) -> InferenceModule:
        """With copies of all rows, or of those whose ids `kept` gives, in the dtype that the model computes in."""
        like = next(parameter for parameter in model.parameters())
        return cls(model, {name: (ids, rows.to(like.dtype)) for name, (ids, rows) in tables.learnt(kept).items()})

    def bare(self, model: nn.Module) -> InferenceModule:
        """The same around another model, with tables of the same sizes and without learnt rows."""
        return InferenceModule(
            model,
            {
                name: (torch.zeros_like(table.ids), torch.zeros_like(table.rows[:-1]))  # type: ignore[arg-type,index,union-attr]
                for name, table in self.tables.items()
            },
        )  # type: ignore[union-attr,index]

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model(
            {name: self.tables[name](value) if name in self.tables else value for name, value in inputs.items()}
        )


class _InferenceTable(nn.Module):
    """Rows (n, width) of ascending ids (n,)."""

    ids: Tensor
    rows: Tensor

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        # the last one of all other ids
        self.register_buffer("rows", torch.cat([rows, rows.new_zeros(1, rows.shape[1])]))

    def forward(self, ids: Tensor) -> Tensor:
        last = len(self.rows) - 1
        if not last:
            return self.rows[torch.zeros_like(ids)]
        at = torch.searchsorted(self.ids, ids).clamp(max=last - 1)
        return self.rows[torch.where(self.ids[at] == ids, at, last)]
