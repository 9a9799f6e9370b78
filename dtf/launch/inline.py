"""This process becomes the only rank: for a debugger, a profiler, or a run that one process can do."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from dtf.api.launcher import WORK, Launcher, check_one_role, report
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError
from dtf.core.types import Event, Failed, Place
from dtf.host import devices
from dtf.host.deadline import deadline
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS
from dtf.launch.one_run import one_run

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun
    from dtf.api.strategy import Strategy


_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask whether there is a GPU without starting CUDA."""

_is_rank = threading.Lock()
"""Two runs at a time would share torch's threads, formats and signals."""


@register("launcher", "inline")
class Inline(Launcher):
    """Train in this process: breakpoints, print and Ctrl-C work; nothing is watched or restarted."""

    in_this_process = True

    processes: int | Literal["auto"] = option(
        default=1,
        least=1,
        most=MOST_PROCESSES,
        doc="how far to spread; more than 1 only for strategies that use threads; `auto`: as many as GPUs, without "
        "GPUs 2",
    )
    devices: str = option(
        default="auto",
        doc="`auto`: a GPU if there is one; `cpu`; `cuda`; or numbers of GPUs, as in launcher.devices='\"0,2\"'",
    )
    threads: int = option(default=0, least=0, most=MOST_THREADS, doc="intra-op threads; 0: all cores")

    def devices_kind(self) -> str:
        return devices.choose(self.devices).kind

    def count(self) -> int:
        return devices.processes(self.processes, devices.choose(self.devices))

    def check(self, strategy: Strategy) -> None:
        slots = self.count()
        check_one_role("inline", strategy, slots)
        size = sum(strategy.roles(slots).values())
        if size != 1:
            raise ConfigError(
                f"launcher=inline is one process, launcher.processes={slots} needs {size} with this strategy; use 1, "
                "or launcher=local"
            )

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        with one_run(_is_rank, "use launcher=local"):
            given = os.environ.get(_NVML_CHECK)
            os.environ.setdefault(_NVML_CHECK, "1")
            try:
                from dtf.model.process_state import process_state_kept

                with process_state_kept():
                    return self._become_rank(run, see, entry)
            finally:
                if given is None:
                    os.environ.pop(_NVML_CHECK, None)

    def _become_rank(self, run: LaunchedRun, see: Callable[[Event], None], entry: str) -> int:
        slots, chosen = self.count(), devices.choose(self.devices)
        failed: list[tuple[Failed, BaseException | None]] = []

        def observe(event: Event) -> None:
            if isinstance(event, Failed):
                failed.append((event, sys.exception()))  # it is told while it is handled
            see(event)

        from dtf.launch.rank_process import entry as function

        all_devices = tuple(devices.device_of(slot, slots, chosen) for slot in range(slots))
        place = Place(
            slots=slots,
            device=all_devices[0],
            devices=all_devices,
            threads=self.threads or devices.cores(),
            prefix=f"{run.id}/0",
            deadline=deadline(os.environ),
        )
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            exit = function(entry)(run.config, str(run.folder), run.id, place, observe)
        finally:
            for number, handler in handlers.items():
                with contextlib.suppress(ValueError):  # not the main thread, where `work` sets none
                    signal.signal(number, handler)
        if failed:
            report(*failed[0])
        return exit
