"""Trials of a sweep side by side on this host: a process for each place, a slot, which runs one after the other.

A slot has its share of the cores and devices, and a fork server of its own. It dies with this process. See
`slot_process` for its end.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dtf.api.trials import TrialEnd, TrialOrder
from dtf.config.compose import Composed
from dtf.core.errors import ConfigError, Exit, error_line
from dtf.host import devices
from dtf.host.signals import Stop
from dtf.launch.rank_process import MESSAGE_BYTES

LOG = "trial.log"
"""In a trial's folder: what it has said."""

_CODE = (
    "import json, sys; order = json.loads(sys.argv[1]); sys.path[:] = order['path']; from dtf.cli.slot_process import "
    "serve; serve(order)"
)
_MEASURED = re.compile(r"(\w+ )?step=")
"""A line of the console observer, which the trial's log has whole."""
SIDE_BY_SIDE = ("local", "inline")
"""Launchers whose trials need this host alone."""


def share_of_cores(count: int) -> list[list[int]]:
    """The cores of each of `count` slots. ConfigError where there are too few."""
    usable, parts = devices.cores(), devices.parted_cores(count)
    if not parts or usable < count:
        raise ConfigError(
            f"sweep.parallel={count} needs a core for each trial, there {'is' if usable == 1 else 'are'} {usable}; use "
            f"sweep.parallel={usable}"
        )
    if usable < sum(map(len, parts)):  # a quota: threads follow from the cores
        parts = [part[: usable // count] for part in parts]
    return parts


def share_of_devices(launcher: Mapping[str, Any], slot: int, count: int) -> str:
    """`launcher.devices` of a trial in one of `count` slots: GPUs that no other slot has. ConfigError where these
    trials cannot run side by side.
    """
    name = launcher["name"]
    if name not in SIDE_BY_SIDE:
        raise ConfigError(
            f"sweep.parallel={count} runs trials beside each other on this host, and launcher={name} starts processes "
            "elsewhere; use launcher=local, or sweep.parallel=1"
        )
    chosen = devices.choose(launcher["devices"])
    if chosen.kind == "cpu":
        return launcher["devices"]
    there, processes = len(chosen.indices), launcher["processes"]
    each = there // count if processes == "auto" else processes
    if each < 1 or each * count > there:
        of = f"{each} for each" if each else "one for each"
        raise ConfigError(
            f"sweep.parallel={count} needs {max(1, each) * count} GPUs, {of} trial, there are {there}; lower "
            f"sweep.parallel or launcher.processes={processes}"
        )
    return ",".join(map(str, chosen.indices[slot * each : (slot + 1) * each]))


@dataclass
class _Slot:
    """A process, and the trial that it runs."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    order: TrialOrder | None = None
    asked: int = 0  # to stop
    said: bytes = b""  # of the trial, not yet printed: half a line
    unlogged: bytes = b""  # printed, and not yet in the trial's folder

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


def send_order(control: socket.socket, order: dict[str, Any]) -> None:
    """Send a trial to a slot, as a file in memory: a config may be longer than a message."""
    with open(os.memfd_create("trial"), "wb") as file:
        file.write(json.dumps(order).encode())
        file.flush()
        socket.send_fds(control, [b"trial"], [file.fileno()])


def receive_order(control: socket.socket) -> dict[str, Any] | None:
    """Wait for a trial; None: the sweep has closed its end."""
    data, descriptors, _, _ = socket.recv_fds(control, 16, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        return json.loads(file.read())


class SlotExecutor:
    """Runs as many trials at once as there are slots, which are started when they are needed. See `TrialExecutor`.

    While it is open, signals to stop are passed on to the slots.
    """

    def __init__(self, count: int) -> None:
        self.places = count
        self._cores = share_of_cores(count)
        self._slots: list[_Slot | None] = [None] * count
        self._stop, self._passed_on = Stop(), 0

    def __enter__(self) -> Self:
        self._stop.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self._stop.__exit__(*exception)

    def start(self, order: TrialOrder) -> None:
        number = next(number for number, slot in enumerate(self._slots) if slot is None or slot.order is None)
        assert isinstance(order.composed, Composed)
        config = dict(order.composed.config)
        launcher = config["launcher"]
        config["launcher"] = launcher | {"devices": share_of_devices(launcher, number, self.places)}
        if price := config["budget"]["cost_per_hour"]:  # of the machine, and this is a share of it
            config["budget"] = config["budget"] | {"cost_per_hour": price / self.places}
        slot = self._slots[number] = self._slots[number] or self._started(number, launcher["name"] == "local")
        slot.order = replace(order, composed=replace(order.composed, config=config))
        message = {
            "command": order.composed.command,
            "typed": order.composed.composer.typed,
            "config": config,
            "folder": str(order.folder or ""),
        }
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `wait` says so
            send_order(slot.control, message)

    def wait(self) -> TrialEnd:
        while True:
            self._pass_on()
            with selectors.DefaultSelector() as selector:
                selector.register(self._stop.socket, selectors.EVENT_READ)
                for slot in filter(None, self._slots):
                    selector.register(slot.control, selectors.EVENT_READ, slot)
                    assert slot.process.stdout is not None
                    selector.register(slot.process.stdout, selectors.EVENT_READ, slot)
                ready = selector.select()
            for key, _ in ready:
                if key.data is None:
                    self._stop.socket.recv(64)
                    continue
                self._show(key.data)
                if key.fileobj is key.data.control and (end := self._ended(key.data)) is not None:
                    return end

    def stop(self) -> None:
        self._ask(1)

    def close(self) -> None:
        for number, slot in enumerate(self._slots):
            if slot is not None:
                slot.close()
                self._slots[number] = None

    def _pass_on(self) -> None:
        while self._passed_on < self._stop.count:
            self._passed_on += 1
            self._ask(self._passed_on)

    def _ask(self, times: int) -> None:
        """Have each slot that runs a trial asked so often to stop. The second time ends ranks that still save."""
        for slot in filter(None, self._slots):
            if slot.order is not None and slot.asked < times:
                slot.asked += 1
                slot.process.send_signal(signal.SIGTERM)

    def _started(self, number: int, forks: bool) -> _Slot:
        """A new process, in a session of its own: signals of a terminal come by way of this one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            "fd": theirs.fileno(),
            "parent": os.getpid(),
            "path": [os.path.abspath(part) for part in sys.path],
            "cores": self._cores[number],
            "forks": forks,
        }
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", _CODE, json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                bufsize=0,
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return _Slot(process, ours)

    def _ended(self, slot: _Slot) -> TrialEnd | None:
        """What the message of a slot says, or its end."""
        data = b""
        with suppress(ConnectionError):
            data = slot.control.recv(MESSAGE_BYTES)
        order, slot.order = slot.order, None
        self._show(slot, order)
        if data:
            assert order is not None
            said = json.loads(data)
            return TrialEnd(order.number, said["code"], tuple(said["best"]) if said["best"] else None)
        code = slot.process.wait()
        slot.close()
        self._slots[self._slots.index(slot)] = None
        if order is None:
            return None
        if self._stop.count:  # it was asked to stop while it started
            return TrialEnd(order.number, Exit.PREEMPTED)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = f"the process of trial {order.number} {how}; the same sweep started again runs the trial once more"
        print(error_line(Exit.PEER, text), file=sys.stderr, flush=True)
        return TrialEnd(order.number, Exit.PEER)

    def _show(self, slot: _Slot, order: TrialOrder | None = None) -> None:
        """Print what a slot has said, each line with the number of its trial, and append it to the trial's log.

        `order`: of the trial that has just ended.
        """
        ended, order = order is not None, order or slot.order
        assert slot.process.stdout is not None
        while data := slot.process.stdout.read(1 << 16):
            slot.said += data
        *lines, slot.said = slot.said.split(b"\n")
        if ended and slot.said:
            lines, slot.said = [*lines, slot.said], b""
        head = f"trial {order.number}: " if order else ""
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        for line in lines:
            print(shown(head, line.decode(errors="replace"), columns), flush=True)
        slot.unlogged += b"".join(line + b"\n" for line in lines)
        if order is None or order.folder is None or not (order.folder / "run.json").exists():
            slot.unlogged = b"" if ended else slot.unlogged
            return
        if slot.unlogged:
            _append(order.folder / LOG, slot.unlogged)
            slot.unlogged = b""


def shown(head: str, line: str, columns: int) -> str:
    """A line of a trial as it is printed: what a carriage return has overwritten is left out. On a terminal of so many
    columns (0: on none) a line of measurements is cut to one row, and all others stay whole.
    """
    whole = head + line.rstrip("\r").rpartition("\r")[2]
    return whole if not columns or len(whole) <= columns or not _MEASURED.match(line) else f"{whole[: columns - 3]}..."


def _append(path: Path, data: bytes) -> None:
    """A full disk is the checkpoint's to report."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
