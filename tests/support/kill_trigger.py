"""A plugin for tests: an observer that sends signals to ranks of launcher=local, or to the launcher, when training has
come to certain steps.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.observer import Observer
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.core.types import Event, Measured
from dtf.launch import forkserver_cache
from tests.support.toy import Rows, Toy

if TYPE_CHECKING:
    import numpy as np
    import torch

PROOF, DELAY_S = 3, 0.03


@register("observer", "kill_trigger")
class KillTrigger(Observer):
    """Send signals. Each order is STEP:RANK:SIGNAL; rank -1 is the launcher.

    An order is carried out once, as soon as the rank is alive. The `log` gets each order with the seconds until PROOF
    more steps were made.
    """

    orders: list[str] = option(factory=list, doc="which signals to send, to which rank, at which step")
    log: str = option(default="", doc="file for the orders that were carried out; empty: none")

    def see(self, event: Event) -> None:
        if not isinstance(event, Measured) or event.split != "train":
            return
        if not hasattr(self, "pending"):
            self.pending, self.sent = list(self.orders), list[tuple[float, int, str]]()
        for when, step, order in [entry for entry in self.sent if event.step >= entry[1]]:
            self.sent.remove((when, step, order))
            if self.log:
                with open(self.log, "a") as log:
                    log.write(f"{order} {time.monotonic() - when:.3f}\n")
        for order in [order for order in self.pending if int(order.split(":")[0]) <= event.step]:
            _, rank, name = order.split(":")
            if pid := os.getpid() if int(rank) < 0 else pids().get(int(rank), 0):
                self.pending.remove(order)
                self.sent.append((time.monotonic(), event.step + PROOF, order))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[name])


@register("recipe", "slow_toy")
class SlowToy(Toy):
    """The toy recipe with steps of DELAY_S."""

    def open_data(self, split: str, seed: int) -> Dataset:
        return SlowRows(self.rows, split, -1) if split == "train" else super().open_data(split, seed)


class SlowRows(Rows):
    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(DELAY_S)
        return super().fetch(ids, epoch)


def pids() -> dict[int, int]:
    """Rank -> process id, of ranks that are alive: their output goes to files named after them."""
    server, by_rank = forkserver_cache.fork_server({}).pid, {}
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with contextlib.suppress(OSError):
            if rank := re.search(r"rank_(\d+)", os.readlink(f"/proc/{child}/fd/1")):
                by_rank[int(rank[1])] = int(child)
    return by_rank
