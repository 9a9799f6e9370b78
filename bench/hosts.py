"""Two hosts without a scheduler: from `kill -9` to the next step, launcher=static beside launcher=torchrun.

    python -m bench.hosts [--rounds 10] [--only rank|host]

The hosts are network namespaces of this machine with a cable between them, one rank on each. The default recipe's
network trains; a checkpoint follows every 10th step. After step 25 the second host loses its rank; or its launching
process, and is started again at once with the same command. A round in which no step follows within two minutes is
counted and has no figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.commands import Command, dtf_run, started
from bench.peers import Absent
from bench.rounds import alternating, starts
from bench.rows import Row, table, with_ratios

if TYPE_CHECKING:
    from tests.support.namespaces import Host

KILL_AFTER, PATIENCE_S = 25, 120.0
PORT = 29500
LOSSES = {"rank": "kill -9 of a rank", "host": "kill -9 of a host's launching process, which is started again"}
LAUNCHERS = ("static", "torchrun")


def once(launcher: str, loss: str) -> float:
    """Seconds from the loss to the next step. Absent where none follows."""
    from tests.support.namespaces import two_hosts

    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dtf-bench-hosts-")))
        running = [stack.enter_context(_start(launcher, host, node, folder)) for node, host in enumerate(hosts)]
        events = _events(folder / "run" / "events.jsonl", running)
        for event in events:
            if _is_step(event) and event["step"] >= KILL_AFTER:
                break
        lost = running[1].pid if loss == "host" else running[1].ranks()[-1]
        os.kill(lost, signal.SIGKILL)
        killed = time.monotonic()
        if loss == "host":
            del running[1]
            running.append(stack.enter_context(_start(launcher, hosts[1], 1, folder)))
        begun = False
        for event in events:
            begun = begun or (event["event"] == "Started" and event["monotonic"] > killed)
            if begun and _is_step(event):
                return event["monotonic"] - killed
        raise Absent("the events end")


def _start(launcher: str, host: Host, node: int, folder: Path) -> Any:
    from tests.support.namespaces import ADDRESSES

    where = f"{ADDRESSES[0]}:{PORT}"
    place = [f"launcher.address={where}", f"launcher.node_rank={node}"]
    command = dtf_run(
        1, 1_000_000, "train.steps=1000000", "checkpoint.every_steps=10", "observer=[events]", f"launcher={launcher}",
        "launcher.nodes=2", "launcher.devices=cpu", "launcher.threads=1", f"run.dir={folder}/run",
        *(place if launcher == "static" else [f"launcher.rendezvous={where}"]),
    )  # fmt: skip
    return started(host.command(*command), folder, {"GLOO_SOCKET_IFNAME": None})


def _events(path: Path, running: list[Command]) -> Iterator[dict[str, Any]]:
    """The lines of the file as they come. Absent where a command ends, or nothing comes for so long."""
    read, rest, since = 0, b"", time.monotonic()
    while time.monotonic() < since + PATIENCE_S:
        for one in running:
            if not one.lives():
                raise one.ended()
        data = path.read_bytes()[read:] if path.exists() else b""
        read += len(data)
        *lines, rest = (rest + data).split(b"\n")
        since = time.monotonic() if lines else since
        yield from map(json.loads, lines)
        time.sleep(0.005)
    raise Absent(f"no step in {PATIENCE_S:.0f} s")


def _is_step(event: dict[str, Any]) -> bool:
    return event["event"] == "Measured" and event["split"] == "train"


def measure(quick: bool, rounds: int = 10, only: str = "") -> list[Row]:
    rounds, rows = 1 if quick else rounds, []
    for loss, text in LOSSES.items():
        if only not in ("", loss):
            continue
        found: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
        failed: dict[str, list[str]] = {launcher: [] for launcher in LAUNCHERS}
        for number, launcher in alternating(rounds, LAUNCHERS):
            if number == 0:
                starts(f"{launcher}: {text}")
            try:
                found[launcher].append(once(launcher, loss))
            except Absent as error:
                failed[launcher].append(str(error))
        for launcher, values in found.items():
            settings = f"launcher={launcher}"
            if failed[launcher]:
                settings += f"; in {len(failed[launcher])} of {rounds} rounds no step followed: {failed[launcher][0]}"
            work = f"from {text} to the next step"
            rows.append(Row(work, launcher, "s", values, settings=settings, not_run="" if values else settings))
    return with_ratios(rows, "static")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=LOSSES, default="")
    options = parser.parse_args()
    print(table(measure(False, options.rounds, options.only)))
