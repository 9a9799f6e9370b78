"""`job=cancel`: ends the run of a folder with notice, so that it saves: by its scheduler, or on this host."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.cluster import record
from dtf.core.errors import ConfigError, DataError, Exit
from dtf.core.run_record import LOCK
from dtf.runs.standing import standing

if TYPE_CHECKING:
    from dtf.config.compose import Composed


@register("job", "cancel")
class Cancel(Job):
    """End a run: it saves and can go on later."""

    run_folder: str = option(doc="the folder of the run, or of the sweep that was submitted")

    def run(self, composed: Composed) -> int:
        folder = Path(self.run_folder)
        if not folder.is_dir():
            raise DataError(f"job.run_folder={folder} does not exist; give the folder of a run")
        known = record.find(folder)
        if known is not None and known.platform.state(known.handle).state.is_live:
            known.platform.cancel(known.handle)
            print(f"dtf: {known.title} was asked to end")
            return Exit.OK
        found = standing(folder)
        if found is None or not found.live:
            print(f"dtf: nothing to end: no run lives in {folder}")
            return Exit.OK
        holder = (folder / LOCK).read_text(errors="replace")
        process = re.fullmatch(r"process ([0-9]+) on (.*)\n", holder)
        if process is None or process[2] != socket.gethostname():
            raise ConfigError(f"{folder} is in use by a live run ({holder.strip()}); end it there")
        os.kill(int(process[1]), signal.SIGTERM)
        print(f"dtf: {process[0].strip()} was asked to end")
        return Exit.OK
