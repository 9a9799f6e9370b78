"""A model and its sparse tables as one module that needs no dtf: learnt rows are tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from dtf.api.sparse_table import Pooling, Table
from dtf.sparse.sharded_tables import ShardedTables
from dtf.sparse.store import SparseTable
from dtf.sparse.table_inputs import TableInputs


class InferenceModule(nn.Module):
    """`model`, called with ids (B, F) int64 in place of rows (B, F, width), and with the values and lengths of
    `dtf.Bags`, or a dict of these two, in place of pooled rows.

    The row of an id that was never trained is zeros, the mean of new rows.
    """

    def __init__(
        self, model: nn.Module, tables: Mapping[str, tuple[Tensor, Tensor]], specs: Mapping[str, Table]
    ) -> None:
        super().__init__()
        self.model, self._specs = model, dict(specs)
        # names of modules have no dots, and are no attributes
        keys = {
            name: name
            if name.isidentifier() and not hasattr(nn.ModuleDict, name)
            else f"{number}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"
            for number, name in enumerate(specs)
        }
        self.tables = nn.ModuleDict({keys[name]: _InferenceTable(*tables[name], specs[name].pooling) for name in specs})
        self._key_of = {key: keys[name] for name, spec in specs.items() for key in spec.inputs or (name,)}

    @classmethod
    def of(
        cls, model: nn.Module, tables: ShardedTables, kept: Callable[[SparseTable], np.ndarray] | None = None
    ) -> InferenceModule:
        """With copies of all rows, or of those whose ids `kept` gives, in the dtype that the model computes in."""
        like = next(parameter for parameter in model.parameters())
        learnt = {name: (ids, rows.to(like.dtype)) for name, (ids, rows) in tables.learnt(kept).items()}
        return cls(model, learnt, tables.specs())

    def bare(self, model: nn.Module) -> InferenceModule:
        """The same around another model, with tables of the same sizes and without learnt rows."""
        tables: Any = self.tables.values()
        sizes = [(torch.zeros_like(table.ids), torch.zeros_like(table.rows[: len(table.ids)])) for table in tables]
        return InferenceModule(model, dict(zip(self._specs, sizes, strict=True)), self._specs)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        found = {name: self.tables[key](inputs[name]) for name, key in self._key_of.items()}
        return self.model(inputs | found)


class LookupModule(nn.Module):
    """`InferenceModule.of` with all rows, of which each call copies those that it asks for."""

    def __init__(self, model: nn.Module, tables: ShardedTables) -> None:
        super().__init__()
        self.model, self._tables = model, tables

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        def asked(store: SparseTable) -> np.ndarray:
            ids = TableInputs(inputs, store.spec.inputs or (store.name,), store.spec.pooling).distinct
            return np.sort(ids[store.has(ids)])

        return InferenceModule.of(self.model, self._tables, asked)(inputs)


class _InferenceTable(nn.Module):
    """Rows (n, width) of ascending ids (n,). `count`: n."""

    ids: Tensor
    rows: Tensor

    def __init__(self, ids: Tensor, rows: Tensor, pooling: Pooling | None) -> None:
        super().__init__()
        self.count = len(ids)
        if not self.count:  # torch.export cannot save tensors without numbers
            ids, rows = ids.new_full((1,), -1), rows.new_zeros(1, rows.shape[1])
        self.register_buffer("ids", ids)
        self._pooling = pooling
        # zeros of all other ids and, where there are bags, of -1, which counts for nothing
        zeros = rows.new_zeros(1 if pooling is None else 2, rows.shape[1])
        self.register_buffer("rows", torch.cat([rows, zeros]))

    def forward(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return self.rows[self._at(value)]
        values, lengths = (value["values"], value["lengths"]) if isinstance(value, dict) else value
        assert self._pooling is not None
        none, flat = len(self.ids) + 1, lengths.reshape(-1)
        at = torch.where(values == -1, none, self._at(values))
        pooled = embedding_bag(at, self.rows, flat.cumsum(0) - flat, mode=self._pooling.value, padding_idx=none)
        return pooled.view(*lengths.shape, self.rows.shape[1])

    def _at(self, ids: Tensor) -> Tensor:
        """The row of each id."""
        last = len(self.ids)
        at = torch.searchsorted(self.ids, ids).clamp(max=last - 1)
        return torch.where(self.ids[at] == ids, at, last)
