"""`job=describe`: every key of every option, without training anything."""

from __future__ import annotations

import shutil
from enum import Enum
from typing import TYPE_CHECKING

from dtf.errors import Exit
from dtf.job import Job
from dtf.registry import option, register

if TYPE_CHECKING:
    from dtf.config import Composed


class Output(Enum):
    text = "text"
    json = "json"


@register("job", "describe")
class Describe(Job):
    """List the options of every group and the keys outside groups, each with type, default, unit and help."""

    group: str = option(default="", doc="only this group, e.g. strategy")
    format: Output = option(default=Output.text, doc="`text` to read, `json` for programs")
    option: str = option(default="", doc="only this option of the group, e.g. ddp")  # last: the name hides the function

    def run(self, composed: Composed) -> int:
        from dtf.describe import as_json, as_text, catalogue

        found = catalogue(composed.composer, self.group, self.option)
        print(as_json(found) if self.format is Output.json else as_text(found, shutil.get_terminal_size().columns - 1))
        return Exit.OK
