"""A process that has torch imported and forks ranks from itself, so that a rank starts in 0.1 s instead of seconds.

Both ends: `ForkServer` in the launching process, `serve` in the server. They exchange JSON over a socket pair that
keeps message boundaries, with file descriptors beside it; nothing is pickled. What a rank does after the fork is in
`rank_process`. Linux only (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from dtf.launch.rank_process import MESSAGE_BYTES

_PR_SET_PDEATHSIG = 1
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal or a scheduler sends them to all processes; the launching one decides."""


class ForkServer:
    """The launching process's handle.

    `socket` becomes readable when a rank has started or ended, and when the server has ended.

    Messages: {"started": rank, "pid"}, {"ended": rank, "status"} (as of os.waitpid), {"error", "traceback"} when an
    import failed.
    """

    def __init__(self, preload: list[str], environment: dict[str, str]) -> None:
        """Start it; `environment` comes on top of this process's."""
        self.environment = environment
        self.used = False  # a rank was asked for
        self._starter = threading.current_thread()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps(
            {
                "fd": theirs.fileno(),
                "parent": os.getpid(),
                "path": [os.path.abspath(part) for part in sys.path],
                "preload": preload,
            }
        )
        code = (
            "import json, sys; order = json.loads(sys.argv[1]); sys.path[:] = order['path']; from "
            "dtf.launch.forkserver import serve; serve(order)"
        )
        command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code, order]  # type: ignore[attr-defined]
        # until it ignores them: one that came before would end it, and the run would seem to have lost all ranks
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, **environment}
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def alive(self) -> bool:
        """False also where the thread has ended that started it: the kernel kills it with that one."""
        return self._starter.is_alive() and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def import_package(self, name: str) -> None:
        """Have the server import all modules of a package, for the ranks that are asked for after this. What needs an
        extra that is not installed is left out. Returns at once.
        """
        self._send({"package": name})

    def fork(self, order: dict[str, Any], fds: list[int]) -> None:
        """Ask for a rank; `order` and `fds` are for `rank_process.begin`.

        Returns at once; the message {"started"} follows.
        """
        self.used = True
        self._send({"fork": order}, fds)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, if it lives.

        The server is its parent, so the process cannot be mistaken for another.
        """
        self._send({"signal": number, "rank": rank})

    def receive(self) -> dict[str, Any] | None:
        """The next message; blocks when there is none. None when the server is gone."""
        data = b""
        for _ in range(2):  # a reset arrives before the last message
            with contextlib.suppress(ConnectionError):
                data = self.socket.recv(MESSAGE_BYTES)
                break
        return json.loads(data) if data else None

    def wake(self) -> None:
        """Continue the server, in case it was stopped by a signal. Every request does so too."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and every rank it still has."""
        self._process.kill()
        self._process.wait()
        self.socket.close()

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        self.wake()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server is gone: `receive` says so
            socket.send_fds(self.socket, [json.dumps(message).encode()], fds or [])


def serve(order: dict[str, Any]) -> None:
    """Run the server until the launching process closes its end or dies."""
    die_with(order["parent"])
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)  # they were blocked until here
    control = socket.socket(fileno=order["fd"])
    control.set_inheritable(False)
    gc.disable()  # imports make no garbage worth looking for: a quarter of their time
    _import(control, order["preload"])
    try:
        _loop(control, {})
    finally:
        os._exit(0)  # nothing to tidy up, and torch's extensions complain when the interpreter does


def _import(control: socket.socket, names: Iterable[str]) -> None:
    """Import modules for the ranks to come; where that fails, say so and end."""
    try:
        for name in names:
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  the launching process says what it means
        control.send(
            json.dumps(
                {"error": f"{type(error).__name__}: {error}"[:4000], "traceback": traceback.format_exc()[-16_000:]}
            ).encode()
        )
        os._exit(1)
    gc.freeze()  # a collection in a rank shall not touch, and so copy, every page shared with the server


def _modules_of(package: str) -> Iterator[str]:
    """Its modules, but for those that need an extra which is not installed: a recipe that needs it says so."""
    yield package
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module.name)
            yield module.name


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process `parent`, which made it, dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _loop(control: socket.socket, ranks: dict[int, int]) -> None:
    """Fork and signal on request, report ends. `ranks`: process id -> rank."""
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        while True:
            ready, _, _ = select.select([control, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                for pid, status in _ended():
                    control.send(json.dumps({"ended": ranks.pop(pid), "status": status}).encode())
            if control not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            request = json.loads(data)
            if "package" in request:
                _import(control, _modules_of(request["package"]))
                continue
            if "signal" in request:
                for pid, rank in ranks.items():
                    if rank == request["rank"]:
                        os.kill(pid, request["signal"])
                continue
            server = os.getpid()
            # one that comes right after the fork waits until it can end the rank
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in (woken, waker, control.detach()):
                    os.close(fd)
                _become_rank(server, request["fork"], fds)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            ranks[pid] = request["fork"]["place"]["rank"]
            for fd in fds:
                os.close(fd)
            control.send(json.dumps({"started": ranks[pid], "pid": pid}).encode())
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)


def _ended() -> list[tuple[int, int]]:
    """(process id, status) of the children that have ended since the last call."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended.append((pid, status))


def _become_rank(server: int, order: dict[str, Any], fds: list[int]) -> None:
    code = 1
    try:
        die_with(server)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        from dtf.launch.rank_process import begin

        code = begin(order, fds)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  must not return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(code)
