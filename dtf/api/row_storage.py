"""Where the rows of sparse tables are kept, and in which number format: the part of the config node `sparse` that all
row optimizers have. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dtf.api.registry import option
from dtf.api.schema import KeyProblem
from dtf.host.scratch import remove_scratch

FOLDERS = "dtf-rows-"
"""What names begin with in the folder `disk`: each table of each process has a folder of its own."""

MOST_RECORD_BYTES = 4096 - 8
"""Of a row on disk with its id and state: it lies in one page, beside a checksum."""


class Values(Enum):
    param = "param"
    bf16 = "bf16"


@dataclass(kw_only=True)
class RowStorage:
    """Where rows are kept. With the defaults all of them are in memory, in the format of the model's parameters."""

    disk: str = option(
        default="",
        doc="a folder of a local disk for rows that find no room in `memory_gb`; a run keeps them there while it goes "
        "on, best on the file system of the run folder, where a checkpoint links them; empty: all rows are in memory",
    )
    memory_gb: float = option(
        default=0.0,
        least=0,
        most=1_000_000,
        doc="with `disk`: memory for the rows of all tables in one process; the rows of one step must fit",
        unit="GB",
    )
    values: Values = option(
        default=Values.param,
        doc="in which number format rows are kept. `param`: that of parameters (precision.param); `bf16`: rounded to "
        "bfloat16 after each step, which takes half as much room on disk; steps and states are float32",
    )

    def check_storage(self) -> None:
        """Raise KeyProblem for options that contradict each other, or a folder that cannot be written to."""
        if self.memory_gb and not self.disk:
            raise KeyProblem(
                "sparse.memory_gb",
                f"sparse.memory_gb={self.memory_gb:g} bounds the memory of rows, and sparse.disk says not where the "
                "others go; give sparse.disk=FOLDER too",
            )
        if not self.disk:
            return
        if not self.memory_gb:
            raise KeyProblem(
                "sparse.memory_gb",
                f"sparse.disk={self.disk} keeps on disk what finds no room in memory, and sparse.memory_gb says not "
                "how much there is; give it too, as sparse.memory_gb=2",
            )
        if "://" in self.disk:
            raise KeyProblem(
                "sparse.disk",
                f"sparse.disk={self.disk} is no folder of a local disk; give one, as sparse.disk=/data/rows",
            )
        folder = Path(self.disk).expanduser()
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise KeyProblem("sparse.disk", f"sparse.disk={self.disk}: {there} is no folder that can be written to")

    def storage_text(self) -> str:
        """For the start-up table; empty for the defaults."""
        texts = [f"{self.memory_gb:g} GB a process in memory, the others in {self.disk}"] if self.disk else []
        texts += ["rounded to bfloat16"] if self.values is Values.bf16 else []
        return "; ".join(texts)


@contextmanager
def rows_removed(config: dict[str, Any]) -> Iterator[None]:
    """A context in which the ranks of this host run. Afterwards nothing is left of the rows that they kept on disk,
    however they ended.
    """
    try:
        yield
    finally:
        if disk := config.get("sparse", {}).get("disk"):
            remove_scratch(FOLDERS, Path(disk).expanduser())
