"""What a rank did, for those who check it: sample ids and digests in JSON lines."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from dtf.core.files import replace_text


class Record:
    """Evidence of what this rank did, in JSON lines: the sample ids of each step, and at the end a digest of each
    parameter it holds.
    """

    def __init__(self, folder: Path, rank: int, start: int) -> None:
        path = folder / f"record_rank_{rank}.jsonl"
        if path.exists():  # steps that the killed attempt did after its last checkpoint are done again
            complete = [line for line in path.read_text().splitlines() if line.endswith("}")]
            replace_text(path, "".join(f"{line}\n" for line in complete if json.loads(line).get("step", start) < start))
        self._file = path.open("a")

    def write(self, step: int, ids: np.ndarray) -> None:
        self._file.write(json.dumps({"step": step, "ids": [i for i in ids.tolist() if i >= 0]}) + "\n")
        self._file.flush()

    def close(self, copies: list[dict[str, torch.Tensor]], step: int) -> None:
        """`copies`: what this rank holds after `step` steps."""
        for held in copies:
            digests = {
                name: zlib.crc32(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                for name, t in held.items()
            }
            self._file.write(json.dumps({"held": digests, "after": step}) + "\n")
        self._file.close()
