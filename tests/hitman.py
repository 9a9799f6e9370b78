"""A plugin for tests: an observer that sends signals to ranks of launcher=local, or to the launcher, when training has come to certain steps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from dtf import warm
from dtf.observer import Observer
from dtf.registry import option, register
from dtf.values import Event, Measured


@register("observer", "hitman")
class Hitman(Observer):
    """Each order is STEP:RANK:SIGNAL; rank -1 is the launcher. Carried out once; when is appended to the `book`."""

    orders: list[str] = option(factory=list, doc="whom to send what, and when")
    book: str = option(default="", doc="file that gets the wall time of each order and its text; empty: none")

    def see(self, event: Event) -> None:
        if not isinstance(event, Measured) or event.split != "train":
            return
        left = self.__dict__.setdefault("left", list(self.orders))
        for order in [order for order in left if int(order.split(":")[0]) <= event.step]:
            left.remove(order)
            _, rank, name = order.split(":")
            pid = os.getpid() if int(rank) < 0 else pids().get(int(rank), 0)
            if self.book:
                with open(self.book, "a") as book:
                    book.write(f"{time.time()} {order} {pid}\n")
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[name])


def pids() -> dict[int, int]:
    """Process of each rank that lives, as its log says."""
    server, found = warm.warm({}).pid, {}
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with contextlib.suppress(OSError):
            if rank := re.search(r"rank_(\d+)", os.readlink(f"/proc/{child}/fd/1")):
                found[int(rank[1])] = int(child)
    return found
