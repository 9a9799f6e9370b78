"""A second copy of a run's checkpoints in another place, made beside training. Torch-free."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from dtf.checkpoint import storage
from dtf.checkpoint.manifest import Objective
from dtf.checkpoint.places import OWNER, Place
from dtf.checkpoint.retention import Retention
from dtf.core.errors import DataError
from dtf.core.text import bytes_text


class Mirror:
    """Keeps the checkpoints of a run in another place as well. Rank 0 has it.

    A thread sends what the place lacks, the newest first, and removes what the rule does not keep: of the checkpoints
    here and there together. A failure is told and tried again after the next save, and at the end.

    `folder`: the run's `checkpoints`. `warn` and `say` get what people should know, perhaps from the thread.
    """

    def __init__(
        self, place: Place, folder: Path, run_id: str, warn: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        self.place, self._folder, self._run_id, self._warn, self._say = place, folder, run_id, warn, say
        self._rule = Retention(1, 0, ("", "min"))
        self._there: dict[int, Objective | None] = {}  # complete checkpoints of the place
        self._changed = threading.Condition()
        self._woken = self._idle = False
        self._thread: threading.Thread | None = None
        self._failed, self._failures = "", 0
        self._lost = ""  # who took the place
        self._damaged: set[Path] = set()  # checkpoints here that cannot be sent
        self.sending: Path | None = None
        """The checkpoint that is being read now: it must stay."""

    # ------------------------------------------------------------ at the start

    def open(self) -> list[int]:
        """Take the place for this run. Returns the steps of the checkpoints there, newest first.

        Checkpoints that this run has set aside are removed there. OSError when the place fails.
        """
        self.place.write_owner({"run": self._run_id, "host": socket.gethostname(), "process": os.getpid()})
        self.place.clean()
        for step in self.place.steps():
            try:
                self._there[step] = self.place.read_manifest(step).objective
            except DataError as error:
                self._warn(f"{storage.step_name(step)} of the mirror {self.place.name} is left alone: {error}")
        self._remove(self._set_aside())
        return sorted(self._there, reverse=True)

    # ------------------------------------------------------------ in the background

    def wake(self, rule: Retention) -> None:
        """There may be something to send, or to remove by this rule. Returns at once."""
        with self._changed:
            self._rule, self._woken, self._idle = rule, True, False
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()

    def is_done(self, timeout_s: float) -> bool:
        """Wait until everything was sent or has failed, no longer than this; whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or self._thread is None, timeout_s)

    def missing(self) -> tuple[str, str]:
        """The newest checkpoint that the place should have and lacks, and why. Empty: none. Once all is done."""
        path = self._next()
        return (path.name, self._lost or self._failed or "it was not sent yet") if path else ("", "")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken)
                self._woken = False
            self._bring_up_to_date()
            with self._changed:
                self._idle = not self._woken
                self._changed.notify_all()

    def _bring_up_to_date(self) -> None:
        if self._lost:
            return
        try:
            self._remove(self._set_aside())
            while path := self._next():
                self._send(path)
            self._remove(self._there.keys() - self._rule.kept(self._there | self._complete()))
            self._failed, self._failures = "", 0
        except OSError as error:
            self._failed = error.strerror or str(error)
            self._failures += 1
            if not self._failures & (self._failures - 1):  # the first time, the second, the fourth
                self._warn(
                    f"the mirror {self.place.name} cannot be brought up to date: {self._failed}; training goes on, and "
                    f"{'nothing more is sent' if self._lost else 'the next save tries again'}"
                )

    def _send(self, path: Path) -> None:
        started, self.sending = time.perf_counter(), path
        try:
            manifest = storage.read_manifest(path)
            self.place.send(path, manifest, self._run_id, lambda: self._allow(path))
        except DataError as error:
            if path.exists():  # else it was removed or set aside meanwhile
                self._damaged.add(path)
                self._warn(f"checkpoint {path} is not mirrored: {error}")
            return
        finally:
            self.sending = None
        self._there[manifest.step] = manifest.objective
        size = sum(file.size for file in manifest.files.values())
        seconds = time.perf_counter() - started
        self._say(f"mirrored {path.name} to {self.place.name}: {bytes_text(size)} in {seconds:.2f} s")

    def _allow(self, path: Path) -> None:
        """Raise OSError when another run has taken the place, DataError when the checkpoint has left the run."""
        owner = self.place.read_owner()
        if owner.get("run") != self._run_id:
            who = f"run {str(owner['run'])[:64]!r} on host {str(owner.get('host'))[:64]!r} mirrors to it now"
            self._lost = (
                f"{who if 'run' in owner else f'its {OWNER} was removed'}; give each run a checkpoint.mirror of its own"
            )
            raise OSError(self._lost)
        if not path.exists():
            raise DataError("it was removed")

    def _remove(self, steps: Collection[int]) -> None:
        """Remove checkpoints from the place."""
        for step in steps:
            self._allow(self._folder)
            self.place.remove(step)
            del self._there[step]

    def _set_aside(self) -> list[int]:
        """The steps of the place whose checkpoints here were set aside, as they may hold wrong numbers."""
        return [
            step
            for step in self._there
            if any(self._folder.glob(f"{storage.step_name(step)}.suspect-*")) and not self._here(step).exists()
        ]

    def _next(self) -> Path | None:
        """The newest checkpoint here that the place should have and lacks."""
        here = self._complete()
        steps = self._rule.kept(self._there | here) & (here.keys() - self._there.keys())
        return self._here(max(steps)) if steps else None

    def _complete(self) -> dict[int, Objective | None]:
        """The complete checkpoints here, and how good they are."""
        found: dict[int, Objective | None] = {}
        for path in storage.checkpoints(self._folder):
            with suppress(DataError, OSError):  # it is being removed, or is for a person to look at
                status = (path / storage.MANIFEST).stat()
                if path not in self._damaged:
                    found[storage.step_of(path.name) or 0] = _objective(path, status.st_ino, status.st_mtime_ns)
        return found

    def _here(self, step: int) -> Path:
        return self._folder / storage.step_name(step)


@lru_cache(maxsize=64)
def _objective(path: Path, inode: int, changed_ns: int) -> Objective | None:
    """Of a checkpoint. `inode`, `changed_ns`: of its manifest, which need not be read again while it is the same."""
    return storage.read_manifest(path).objective
