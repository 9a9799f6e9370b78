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


@register("observer", "hitman")
class Hitman(Observer):
    """Each order is STEP:RANK:SIGNAL; rank -1 is the launcher. Carried out once, as soon as the rank lives; the `book`
    gets each with the seconds that went by until PROOF more steps were made."""

    orders: list[str] = option(factory=list, doc="whom to send what, and when")
    book: str = option(default="", doc="file for what was done; empty: none")

    def see(self, event: Event) -> None:
        if not isinstance(event, Measured) or event.split != "train":
            return
        if not hasattr(self, "left"):
            self.left, self.out = list(self.orders), list[tuple[float, int, str]]()
        for when, step, order in [entry for entry in self.out if event.step >= entry[1]]:
            self.out.remove((when, step, order))
            if self.book:
                with open(self.book, "a") as book:
                    book.write(f"{order} {time.monotonic() - when:.3f}\n")
        for order in [order for order in self.left if int(order.split(":")[0]) <= event.step]:
            _, rank, name = order.split(":")
            if pid := os.getpid() if int(rank) < 0 else pids().get(int(rank), 0):
                self.left.remove(order)
                self.out.append((time.monotonic(), event.step + PROOF, order))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[name])


@register("recipe", "dawdling")
class Dawdling(Toy):
    """The toy recipe with steps that take a while."""

    def open_data(self, split: str, seed: int) -> Dataset:
        return Slow(self.rows, split, -1) if split == "train" else super().open_data(split, seed)


class Slow(Rows):
    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(DELAY_S)
        return super().fetch(ids, epoch)


def pids() -> dict[int, int]:
    """Process of each rank that lives, as its log says."""
    server, found = forkserver_cache.fork_server({}).pid, {}
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with contextlib.suppress(OSError):
            if rank := re.search(r"rank_(\d+)", os.readlink(f"/proc/{child}/fd/1")):
                found[int(rank[1])] = int(child)
    return found
