"""What programs with sparse tables on disk do with the batch after the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.strategy import Program
from dtf.core.types import Batch

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables


class ReadsAhead(Program):
    """A program whose tables may lie on disk."""

    _tables: ShardedTables | None

    @property
    def reads_ahead(self) -> bool:
        return self._tables is not None and self._tables.has_files

    def expect(self, batch: Batch | None) -> None:
        if self._tables is not None:
            self._tables.expect(batch)
