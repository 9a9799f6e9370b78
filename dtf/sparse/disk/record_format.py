"""How a row lies in memory and on disk. Pages and their sizes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from dtf.core.errors import ConfigError

PAGE_BYTES = 4096
_KINDS = ("float32", "float64", "bfloat16")
_LAYOUT = struct.Struct("<5I")
_HEAD = 512  # more than a header with the largest numbers has


@dataclass(frozen=True)
class RecordFormat:
    """A record: id (8 bytes), `width` values, `states` numbers, `extra` bytes.

    `values`: float32, float64 or bfloat16 on disk. In memory bfloat16 is a float32 that was rounded to it, so that row
    optimizers compute in float32 and no number depends on where its row lies. States are float32, beside values of
    float64 they are float64 too: a row and its state are one array in memory. ConfigError for a record that does not
    fit into a page.
    """

    width: int
    states: int
    values: str = "float32"
    extra: int = 0
    page_bytes: int = PAGE_BYTES
    dtype: np.dtype = field(init=False)  # of a row and its state in memory
    narrow: int = field(init=False)  # values that are kept as bfloat16
    size: int = field(init=False)  # bytes of a record

    def __post_init__(self) -> None:
        if self.values not in _KINDS:
            raise ConfigError(f"values={self.values} of a table on disk must be one of {', '.join(_KINDS)}")
        dtype = np.dtype(np.float64 if self.values == "float64" else np.float32)
        narrow = self.width if self.values == "bfloat16" else 0
        size = 8 + dtype.itemsize * self.stride - 2 * narrow + self.extra
        for name, value in (("dtype", dtype), ("narrow", narrow), ("size", size)):
            object.__setattr__(self, name, value)
        if size > self.page_bytes - 8:
            raise ConfigError(
                f"a row of {self.width} numbers and {self.states} of state takes {size} bytes on disk, and at most "
                f"{self.page_bytes - 8} fit into a page; use a narrower table"
            )

    @property
    def stride(self) -> int:
        return self.width + self.states

    @property
    def per_page(self) -> int:
        """Records of a full page; its last 8 bytes are a checksum."""
        return (self.page_bytes - 8) // self.size

    @property
    def head_bytes(self) -> int:
        """Of the header of a file, before its pages, which lie at multiples of their size."""
        return -(-_HEAD // self.page_bytes) * self.page_bytes

    def pages(self, rows: int) -> int:
        return -(-rows // self.per_page)

    def layout(self) -> bytes:
        """The same for all that read each other's files."""
        return _LAYOUT.pack(self.width, self.states, _KINDS.index(self.values), self.extra, self.page_bytes)

    @staticmethod
    def of_layout(layout: bytes) -> RecordFormat:
        """Inverse of `layout`. ValueError for what it cannot have given."""
        width, states, kind, extra, page_bytes = _LAYOUT.unpack(layout)
        if kind >= len(_KINDS) or page_bytes < 8:
            raise ValueError("no layout of rows")
        return RecordFormat(width, states, _KINDS[kind], extra, page_bytes)


LAYOUT_BYTES = _LAYOUT.size
