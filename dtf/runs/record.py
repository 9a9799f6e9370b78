"""Records of a rank that comparisons of runs read: sample ids and digests, as JSON lines."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from dtf.core.files import open_private, replace_text
from dtf.runs.recorded_run import records


class Outputs(Protocol):
    def close(self) -> dict[str, list[float]]: ...  # see `ModuleOutputs`


class Record:
    """Writes the sample ids of each step of this rank, and at the end a digest of each parameter that it holds.

    `size`: how many ranks write such records. `start`: the step at which this attempt starts; lines of later steps are
    removed. `outputs`: sums over outputs of modules, written after the first step; `reads`: whether this rank reads
    rows itself.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        start: int,
        outputs: Sequence[Outputs] = (),
        reads: bool = True,
    ) -> None:
        self._outputs, self._reads = outputs, reads
        path = folder / f"record_rank_{rank}.jsonl"
        if path.exists():  # steps of a killed attempt after its last checkpoint are repeated
            _remove_from(path, start)
        if not rank:  # also those of ranks that an earlier attempt had, under another strategy, and this one has not
            for other, path_of_other in records(folder).items():
                if other >= size:
                    _remove_from(path_of_other, start)
        self._file = open_private(path, "a")

    def write(self, step: int, ids: np.ndarray) -> None:
        self._file.write(json.dumps({"step": step, "ids": [i for i in ids.tolist() if i >= 0]}) + "\n")
        for outputs in self._outputs:
            self._file.write(json.dumps({"step": step, "outputs": outputs.close(), "reads": self._reads}) + "\n")
        self._outputs = ()
        self._file.flush()

    def close(self, copies: list[dict[str, torch.Tensor]], step: int) -> None:
        """Write the digests and close. `copies`: the parameters of each replica on this rank, after `step` steps."""
        for held in copies:
            digests = {
                name: zlib.crc32(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                for name, t in held.items()
            }
            self._file.write(json.dumps({"held": digests, "after": step}) + "\n")
        self._file.close()


def _remove_from(path: Path, start: int) -> None:
    """Remove lines of this step and later ones, and half a line."""
    complete = [line for line in path.read_text().splitlines() if line.endswith("}")]
    replace_text(path, "".join(f"{line}\n" for line in complete if json.loads(line).get("step", start) < start))
