"""The host has little memory left, and a model tells when it is built. A plugin.

In the environment, `LEFT`: bytes that the host has left. `FOLDER`: where the file `built` gets a line at the begin and
the end of each construction. `UNTIL`: a file; the first construction that is not given up waits until it is there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.registry import register
from dtf.host import memory
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn

_known = memory.available_bytes
memory.available_bytes = lambda: int(os.environ["LEFT"]) if "LEFT" in os.environ else _known()


@register("recipe", "told")
class Told(Toy):
    def build_model(self) -> nn.Module:
        path = Path(os.environ["FOLDER"]) / "built"

        def tell(what: str) -> None:
            with path.open("a") as file:
                file.write(f"{what} {os.getpid()}\n")

        tell("begin")
        until = os.environ.get("UNTIL")
        lines = path.read_text().splitlines()
        while until and lines.count(f"begin {os.getpid()}") > 1 and len(lines) == 3 and not Path(until).exists():
            time.sleep(0.01)
        model = super().build_model()
        tell("end")
        return model
