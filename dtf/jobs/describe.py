"""`job=describe`: every key of every option, without training anything."""

from __future__ import annotations

import shutil
from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, Exit

if TYPE_CHECKING:
    from dtf.config.compose import Composed


class Output(Enum):
    text = "text"
    json = "json"
    yaml = "yaml"


@register("job", "describe")
class Describe(Job):
    """List the options of every group and the keys outside groups, each with type, default, unit and help.

    Options chosen beside it are described alone: `job=describe recipe=ctr_clicks optimizer=adam`.
    """

    group: str = option(
        default="",
        doc="only this group, e.g. strategy; empty: those that the command line chooses options of, else all",
    )
    format: Output = option(
        default=Output.text,
        doc="`text` to read, `json` for programs, `yaml`: the option's file, to edit in a folder of --config-dir",
    )
    key: str = option(
        default="",
        doc="instead: where this key, or each key of this node, gets its value, such as step.batch_size or lr",
    )
    layout: bool = option(
        default=False,
        doc="instead: build the recipe's model and write its blocks as a `layout()` in Python, to paste into a recipe",
    )
    option: str = option(
        default="",
        doc="only this option of the group, e.g. ddp; empty: the one that the command line chooses, else all",
    )  # last: the name hides the function

    def run(self, composed: Composed) -> int:
        from dtf.config.describe import as_json, as_text, as_yaml, catalogue
        from dtf.config.provenance import explain

        if self.layout:
            if self.key or self.group or self.option or self.format is not Output.text:
                raise ConfigError("job.layout=true writes Python; leave the other keys of job=describe out")
            from dtf.strategies.pipeline.flow_order import layout_code

            print(layout_code(composed.settings.recipe))
            return Exit.OK
        if self.key and (self.group or self.option or self.format is not Output.text):
            raise ConfigError(
                f"job.key={self.key} says where one key gets its value, as text; leave job.group, job.option and "
                "job.format out"
            )
        if self.key:
            print("\n".join(explain(composed.config, composed.sources, self.key)))
            return Exit.OK
        group = self.group
        chosen = {name: options for name, options in composed.chosen().items() if name != "job" and group in ("", name)}
        if self.format is Output.yaml:
            print(as_yaml(composed.composer, group, self.option, chosen), end="")
            return Exit.OK
        described = catalogue(composed.composer, group, self.option, {} if self.option else chosen)
        print(
            as_json(described)
            if self.format is Output.json
            else as_text(described, shutil.get_terminal_size().columns - 1)
        )
        return Exit.OK
