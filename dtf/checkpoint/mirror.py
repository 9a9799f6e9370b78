"""A second copy of a run's checkpoints in another place, made beside training. Torch-free."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dtf.checkpoint import storage
from dtf.checkpoint.line import Line
from dtf.checkpoint.manifest import Manifest, Objective, encode
from dtf.checkpoint.places import OWNER, Place
from dtf.checkpoint.retention import Retention
from dtf.checkpoint.suspects import forget_suspects, suspects_after
from dtf.core.errors import BusyError, DataError
from dtf.core.run_record import is_live, launches
from dtf.core.text import bytes_text


class Known(NamedTuple):
    """What tells a checkpoint from another of the same step, how good it is, and which launch wrote it."""

    digest: str
    objective: Objective | None
    run_id: str

    @classmethod
    def of(cls, manifest: Manifest) -> Known:
        return cls(hashlib.sha256(encode(manifest)).hexdigest(), manifest.objective, manifest.run_id)


class Mirror:
    """Keeps the checkpoints of a run in another place as well. Rank 0 has it.

    A thread sends what the place lacks, the newest first, and removes what the rule does not keep: of the checkpoints
    here and there together. A failure is told and tried again after the next save, and at the end.

    `folder`: the run's `checkpoints`. `attempt`: how many restarts this run has had. `warn` and `say` get what people
    should know, perhaps from the thread.
    """

    def __init__(
        self,
        place: Place,
        folder: Path,
        run_id: str,
        attempt: int,
        warn: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.place, self._folder, self._run_id, self._attempt = place, folder, run_id, attempt
        self._warn, self._say = warn, say
        self._there: dict[int, Known] = {}  # complete checkpoints of the place
        self._useless: set[int] = set()  # of the place: nothing can be loaded from them
        self._spared: Collection[Path] = frozenset()
        self._rule = Retention(1, 0, ("", "min"))
        self._changed = threading.Condition()
        self._woken = self._idle = self._taken = False
        self._thread: threading.Thread | None = None
        self._failed, self._failures = "", 0
        self._lost = ""  # why it is this run's no more
        self.taken = False
        """Whether another run has taken the place."""
        self._origin: tuple[str, int] | None = None  # who wrote what this launch goes on from, and its step
        self.owner: dict[str, Any] = {}
        """Who wrote there before this run."""
        self._damaged: set[Path] = set()  # checkpoints here that cannot be sent
        self.longest_s = 0.0
        """That a checkpoint took which was sent."""
        self.sending: Path | None = None
        """The checkpoint that is being read now: it must stay."""

    # ------------------------------------------------------------ at the start

    def look(self) -> list[int]:
        """The steps of the checkpoints there that the run may go on from, newest first. Changes none of them.

        A restarted run whose place is another run's by now goes on from none. OSError when the place fails, or cannot
        be written to. BusyError when another run that writes there is known to live, or when the checkpoints there and
        here are not of one line of training.
        """
        self.owner, self._there = self.place.read_owner(), {}
        owner = self.owner.get("run", self._run_id)
        another = owner not in {self._run_id} | launches(self._folder.parent)
        if another and not self._attempt:
            self._refuse_live()
        self.place.probe(f"probe-{self._run_id}")
        if self._attempt and owner not in self.known_runs():
            return []
        for step in self.place.steps():
            try:
                self._there[step] = Known.of(self.place.read_manifest(step))
            except DataError as error:
                if step not in self._useless:
                    self._warn(f"{storage.step_name(step)} of the mirror {self.place.name} counts for nothing: {error}")
                self._useless.add(step)
        for step in self._useless:
            self._there.pop(step, None)
        if another and self._there:
            self._refuse_another_line()
        return sorted(self._there.keys() - self._suspect(), reverse=True)

    def known_runs(self) -> set[str]:
        """The ids of the launches that this run folder knows: its own, and those that wrote its checkpoints."""
        return {self._run_id} | launches(self._folder.parent) | {known.run_id for known in self._complete().values()}

    def writer(self) -> str:
        """Who wrote there before this run."""
        run, host, process = (ascii(self.owner.get(key, "?"))[:80].strip("'") for key in ("run", "host", "process"))
        return f"run {run}, process {process} on host {host}"

    def _refuse_live(self) -> None:
        folder = self.owner.get("folder")
        if isinstance(folder, str) and is_live(Path(folder), str(self.owner.get("run"))):
            raise BusyError(
                f"checkpoint.mirror={self.place.name} is in use by a live run ({self.writer()}, in {folder!a}); "
                "give each run a checkpoint.mirror of its own, or stop that run to go on with its checkpoints"
            )

    def _refuse_another_line(self) -> None:
        """Raise BusyError for a run that has checkpoints, where those of the place are of another run whose folder is
        here as well, or of another line of training, as far as that is known.
        """
        here, line = self._complete(), Line.of(self.owner)
        step = max(here, default=0)
        if not here:
            return
        mirror = "give the run a checkpoint.mirror of its own"
        where, newest = self.owner.get("folder"), max(self._there)
        folder = Path(where) if isinstance(where, str) else None
        if folder and newest > step and self.owner.get("run") in launches(folder):
            raise BusyError(
                f"checkpoint.mirror={self.place.name} holds {storage.step_name(newest)} of {self.writer()}, which has "
                f"a run folder of its own, {ascii(str(folder))[1:-1]}; {mirror}, or go on there"
            )
        if line and not line.holds(here[step].run_id, step):
            raise BusyError(
                f"checkpoint.mirror={self.place.name} holds checkpoints of another line of training than "
                f"{self._folder / storage.step_name(step)}: those of {self.writer()}; to go on from the mirror with "
                f"this command, move what is later than its line out of {self._folder}; to keep it, {mirror}"
            )

    def forget(self, step: int) -> None:
        """This checkpoint of the place is damaged there: it is replaced, or removed. Before `wake`."""
        self._there.pop(step, None)
        self._useless.add(step)

    # ------------------------------------------------------------ in the background

    def wake(self, rule: Retention, spared: Collection[Path] = frozenset()) -> None:
        """There may be something to send, or to remove by this rule. Returns at once. The first time, the run takes the
        place. `spared`: checkpoints here that count for nothing.
        """
        with self._changed:
            self._rule, self._spared, self._woken, self._idle = rule, frozenset(spared), True, False
            self._changed.notify_all()
        if self._origin is None:
            try:
                complete = self._complete()
            except OSError as error:  # the disk fails: the next save may find it well
                self._tell(error)
                return
            others = {step: known.run_id for step, known in complete.items() if known.run_id != self._run_id}
            step = max(others, default=0)
            self._origin = (others.get(step, self._run_id), step)
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no more threads now
                self._tell(error)
            else:
                self._thread = thread

    def is_done(self, timeout_s: float) -> bool:
        """Wait until everything was sent or has failed, no longer than this; whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or self._thread is None, timeout_s)

    def missing(self) -> tuple[str, str]:
        """The newest checkpoint that the place should have and lacks, and why. Empty: none. Without waiting."""
        try:
            path = self._next()
        except OSError as error:
            return str(self._folder), error.strerror or str(error)
        if path is None and (damaged := sorted(path for path in self._damaged if path.exists())):
            return damaged[-1].name, "it is damaged here"
        return (path.name, self._lost or self._failed or "it was not sent yet") if path else ("", "")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken)
                self._woken = False
            try:
                if self._lost:
                    raise OSError(self._lost)  # people are told again and again
                self._bring_up_to_date()
                self._failed, self._failures = "", 0
            except Exception as error:  # noqa: BLE001 - training goes on, and people are told
                self._tell(error)
            with self._changed:
                self._idle = not self._woken
                self._changed.notify_all()

    def _tell(self, error: Exception) -> None:
        self._failed = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        self._failures += 1
        if not self._failures & (self._failures - 1):  # the first time, the second, the fourth
            self._warn(
                f"the mirror {self.place.name} cannot be brought up to date: {self._failed}; training goes on, and "
                f"{'nothing more is sent' if self._lost else 'the next save tries again'}"
            )

    def _bring_up_to_date(self) -> None:
        if not self._taken:
            self._take()
            self.look()  # another run may have written since
            self._taken = True
        self._remove(self._suspect())
        forget_suspects(self._folder)
        while path := self._next():
            self._send(path)
        self._remove(self._there.keys() - self._rule.kept(self._goals()))
        self._remove(self._useless)

    def _take(self) -> None:
        """From now on the place is this run's, unless another run has taken it since the start of this one. A restart
        does not take it from another run.
        """
        owner, folder = self.place.read_owner(), str(self._folder.parent.absolute())
        run = owner.get("run", self._run_id)
        if run in self.known_runs() or (not self._attempt and run == self.owner.get("run")):
            who = {"run": self._run_id, "host": socket.gethostname(), "process": os.getpid(), "folder": folder}
            line = Line.of(owner).then(self._run_id, *(self._origin or (self._run_id, 0)))
            self.place.write_owner(who | {"line": line.plain()})
        self._check_owner()
        self.place.clean()

    def _send(self, path: Path) -> None:
        """Send a checkpoint, unless it is damaged or is being removed."""
        started, self.sending = time.perf_counter(), path
        try:
            manifest = storage.read_manifest(path)
            self.place.send(path, manifest, lambda: self._allow(path))
        except (DataError, FileNotFoundError) as error:
            if not path.exists():  # it was removed or set aside meanwhile
                return
            if isinstance(error, FileNotFoundError):  # of the place
                raise
            self._damaged.add(path)
            self._warn(f"checkpoint {path} is not mirrored: {error}")
            return
        finally:
            self.sending = None
        self._there[manifest.step] = Known.of(manifest)
        self._useless.discard(manifest.step)
        size = sum(file.size for file in manifest.files.values())
        seconds = time.perf_counter() - started
        self.longest_s = max(self.longest_s, seconds)
        self._say(f"mirrored {path.name} to {self.place.name}: {bytes_text(size)} in {seconds:.2f} s")

    def _allow(self, path: Path) -> None:
        """Raise OSError when another run has taken the place, DataError when the checkpoint has left the run."""
        self._check_owner()
        if not path.exists():
            raise DataError("it was removed")

    def _check_owner(self) -> None:
        owner = self.place.read_owner()
        if owner.get("run") != self._run_id:
            self.taken = "run" in owner
            who = f"run {str(owner.get('run'))[:64]!r} on host {str(owner.get('host'))[:64]!r} mirrors to it now"
            self._lost = (
                f"{who}; give each run a checkpoint.mirror of its own" if self.taken else f"its {OWNER} was removed"
            )
            raise OSError(self._lost)

    def _remove(self, steps: Collection[int]) -> None:
        """Remove checkpoints from the place."""
        for step in list(steps):
            self._check_owner()
            self.place.remove(step)
            self._there.pop(step, None)
            self._useless.discard(step)

    def _suspect(self) -> set[int]:
        """The steps of the place that may hold wrong numbers: later ones than the last without a difference, unless the
        same checkpoint is here.
        """
        after, here = suspects_after(self._folder), self._complete()
        return {
            step
            for step, known in self._there.items()
            if after is not None and step > after and here.get(step) != known
        }

    def _next(self) -> Path | None:
        """The newest checkpoint here that the place should have and lacks."""
        here = self._complete()
        steps = [
            step for step in self._rule.kept(self._goals()) if step in here and here[step] != self._there.get(step)
        ]
        return self._folder / storage.step_name(max(steps)) if steps else None

    def _goals(self) -> dict[int, Objective | None]:
        """How good the checkpoints here and there are."""
        return {step: known.objective for step, known in (self._there | self._complete()).items()}

    def _complete(self) -> dict[int, Known]:
        """The complete checkpoints here."""
        found: dict[int, Known] = {}
        for path in storage.checkpoints(self._folder):
            if path in self._damaged or path in self._spared:
                continue
            with suppress(DataError, OSError):  # it is being removed, or is for a person to look at
                status = (path / storage.MANIFEST).stat()
                found[storage.step_of(path.name) or 0] = _known(path, status.st_ino, status.st_mtime_ns)
        return found


@lru_cache(maxsize=64)
def _known(path: Path, inode: int, changed_ns: int) -> Known:
    """Of a checkpoint here. `inode`, `changed_ns`: of its manifest, which is read once while it is the same."""
    return Known.of(storage.read_manifest(path))
