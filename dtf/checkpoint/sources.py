"""What a run may go on from: checkpoints of its folder, of its mirror, or of another run. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dtf.checkpoint import storage
from dtf.checkpoint.mirror import Mirror
from dtf.checkpoint.options import Every
from dtf.checkpoint.place_names import is_url, reaching, refuse_inside
from dtf.checkpoint.places import Place, fetch, open_place
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.checkpoint.suspects import finish_set_aside
from dtf.core.errors import BusyError, ConfigError, DataError, SaveError
from dtf.host.waits import group_of, operation

_PATIENCE_S = 5.0
"""Until people hear that a place has not answered yet."""


class Candidate(NamedTuple):
    """A checkpoint to try."""

    path: str  # where it is, or is to be fetched to
    is_here: bool
    is_own: bool  # of this run, or of its mirror


class Sources:
    """The candidates of one run. Rank 0 has it.

    `folder`: the run's `checkpoints`. `note` gets what people should know, and `say` what is as it should be.
    """

    def __init__(
        self, folder: Path, options: Every, run_id: str, note: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        self._folder, self._options, self._run_id, self._note, self._say = folder, options, run_id, note, say
        self._foreign: Place | None = None  # of another run
        self.mirror: Mirror | None = None

    def candidates(self, attempt: int) -> list[Candidate]:
        """All of them, newest first, those that are here before those of the mirror. See `Checkpointer.find`."""
        self._clean()
        here = storage.checkpoints(self._folder)
        own = [Candidate(str(path), True, True) for path in here]
        there = self._mirrored(attempt, bool(here))
        own += [Candidate(str(self._folder / storage.step_name(step)), False, True) for step in there]
        own.sort(key=lambda one: (storage.step_of(Path(one.path).name) or 0, one.is_here), reverse=True)
        if own and attempt:
            return own
        resume = self._options.resume
        if resume == "never" and own:
            kind, where = ("run.dir", self._folder) if here else ("checkpoint.mirror", self._options.mirror)
            raise BusyError(
                f"checkpoint.resume=never, but {where} holds {Path(own[0].path).name}; a run folder is one run, and so "
                f"is its mirror: use checkpoint.resume=auto to go on, or another {kind}"
            )
        if resume in ("auto", "never") or (own and is_url(resume)):
            return own
        if is_url(resume):
            return self._of_another(resume)
        if own and not Path(resume).exists():
            return own  # of a machine that is lost
        given = resolve_checkpoints(resume, "checkpoint.resume")
        if given[0].resolve() in [path.resolve() for path in here[1:]]:
            raise BusyError(
                f"checkpoint.resume={resume} is older than {here[0].name} in the same run folder; "
                "a run folder is one run: use another run.dir to start from there"
            )
        return own or [Candidate(str(path), True, False) for path in given]

    def fetch(self, candidate: Candidate) -> str | None:
        """Copy a checkpoint of the mirror, or of another run, to its path. Returns why it cannot be loaded; None: it is
        there. SaveError when the place fails.
        """
        place = self._place(candidate)
        step, began = storage.step_of(Path(candidate.path).name) or 0, time.monotonic()
        known = self.mirror.known_runs() if self.mirror else set()
        self._say(f"fetching {storage.step_name(step)} from {place.name}")
        try:
            fetch(place, step, self._folder, self._run_id)
        except DataError as error:
            if candidate.is_own and self.mirror is not None:
                self.mirror.forget(step)
            return str(error)
        except OSError as error:
            text = f"{storage.step_name(step)} could not be fetched from {place.name}: {error.strerror or error}"
            raise SaveError(f"{text}; start again") from error
        self._say(f"fetched {storage.step_name(step)} in {time.monotonic() - began:.1f} s")
        if candidate.is_own and self.mirror is not None:
            self._tell_of_another(self.mirror, Path(candidate.path), known)
        return None

    def _tell_of_another(self, mirror: Mirror, path: Path, known: set[str]) -> None:
        """Say so where another run wrote what this one goes on from. `known`: the ids of this one."""
        writer = storage.read_manifest(path).run_id
        if writer not in known:
            self._say(
                f"this run goes on with run {ascii(writer)[1:-1][:80]}, which wrote {path.name} of the mirror "
                f"(the last to write there: {mirror.writer()})"
            )

    def moved(self, candidate: Candidate) -> int:
        """Bytes that came from its place so far."""
        return self._place(candidate).moved

    def _place(self, candidate: Candidate) -> Place:
        place = self.mirror.place if candidate.is_own and self.mirror else self._foreign
        assert place is not None
        return place

    def _clean(self) -> None:
        try:
            storage.clean(self._folder)
            moved = finish_set_aside(self._folder, self._run_id, bool(self._options.mirror))
        except OSError as error:
            self._note(f"leftovers in {self._folder} could not be removed: {error}")
            return
        if moved:
            self._note(f"set aside, as they may hold wrong numbers: {', '.join(path.name for path in moved)}")

    def _mirrored(self, attempt: int, has_own: bool) -> list[int]:
        """The steps of the mirror. A restarted run that has checkpoints does not wait for it; without any it does
        without one that does not answer. Either is made up for at the next save.
        """
        name = self._options.mirror
        if not name:
            return []
        refuse_inside(name, self._folder.parent)
        self.mirror = Mirror(open_place(name), self._folder, self._run_id, attempt, self._note, self._say)
        try:
            with self._asking(name, "checkpoint.mirror"):
                if attempt and has_own:
                    return []
                steps = self.mirror.look()
                if not steps and not attempt:
                    self._say(f"the mirror {name} holds no checkpoint yet")
                return steps
        except (SaveError, ConfigError) as error:
            if not attempt:
                raise
            self._note(str(error))
            return []

    @contextmanager
    def _asking(self, name: str, key: str) -> Iterator[None]:
        """A context in which a place is asked, see `reaching`. People hear of one that takes long to answer."""
        text = f"waiting for {key}={name}, which has not answered for {_PATIENCE_S:.0f} s"
        timer = threading.Timer(_PATIENCE_S, self._say, [text])
        timer.daemon = True
        with suppress(RuntimeError):  # no thread now
            timer.start()
        try:
            with reaching(name, key), operation(f"requests to {key}={name}", group_of(key, (0,)), ordered=False):
                yield
        finally:
            timer.cancel()

    def _of_another(self, resume: str) -> list[Candidate]:
        with self._asking(resume, "checkpoint.resume"):
            self._foreign = open_place(resume)
            steps = self._foreign.steps()
        if not steps:
            raise DataError(f"checkpoint.resume={resume} holds no checkpoint; give the checkpoint.mirror of a run")
        return [Candidate(str(self._folder / storage.step_name(step)), False, False) for step in steps]
