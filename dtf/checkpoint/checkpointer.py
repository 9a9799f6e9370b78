"""Checkpoints as a run uses them: its options, and how ranks save, find and load checkpoints together. Torch-free.

Tensors are written and read by `dtf.checkpoint.boxes`. How files become a checkpoint, and when one may be trusted, is
`dtf.checkpoint.storage`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from dtf.checkpoint import storage
from dtf.checkpoint.agreement import Agreement, Peers
from dtf.checkpoint.boxes import STATE, StoredCheckpoint, loading_fault, write_boxes, write_scalars
from dtf.checkpoint.manifest import (
    Manifest,
    Objective,
    StoredBox,
    StoredFile,
    StoredTensor,
)
from dtf.checkpoint.mirror import Mirror
from dtf.checkpoint.options import Every
from dtf.checkpoint.places import Place, fetch, is_url, open_place, reaching
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.checkpoint.retention import Retention, retain
from dtf.checkpoint.suspects import set_aside
from dtf.core.errors import BusyError, ConfigError, DataError, DtfError, SaveError
from dtf.core.types import State

HURRY_S = 8.0
"""How long a run that is asked to stop waits for its mirror."""


def _warn(text: str) -> None:
    print(f"dtf: {text}", file=sys.stderr, flush=True)


class Checkpointer:
    """Saves and finds the checkpoints of one run in `folder`. Every rank has one. A failure on one rank is raised on
    all.

    `objective`: the metric that ranks checkpoints, and `max` or `min`. `strategy`: its name, for people. `note` gets,
    on rank 0, what a person should know, and `say` what is as it should be. `alive` is called all the time while work
    takes long. One thread at a time.
    """

    def __init__(
        self,
        folder: Path,
        options: Every,
        world: Peers,
        run_id: str,
        objective: tuple[str, str],
        strategy: str,
        note: Callable[[str], None] = _warn,
        say: Callable[[str], None] = _warn,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._options, self._run_id = folder, options, run_id
        self._ranks = Agreement(world, self._removed)
        self._objective, self._strategy = objective, strategy
        self._note, self._say, self._alive = note, say, alive
        self._damaged: set[Path] = set()  # found at the start; they are left where they are and count for nothing
        self._judge: Callable[[dict[str, Any]], object] = dict
        self._made = False  # the folder is there, as far as this process knows
        self._trusted: int | None = None  # None: nobody compares replicas
        self._mirror: Mirror | None = None  # of rank 0
        self._source: Place | None = None  # of rank 0: where checkpoints that are not here are fetched

    def over(self, world: Peers) -> Checkpointer:
        """The same, whose ranks talk by another channel."""
        other = copy(self)
        other._ranks = Agreement(world, other._removed)
        return other

    # ------------------------------------------------------------ save

    def save(self, step: int, state: State, scalars: dict[str, Any], value: float | None = None) -> str:
        """Write the boxes of all ranks, and the `scalars` (JSON) of rank 0, as the checkpoint of `step`. Returns its
        folder. Collective.

        `value`: the objective, if it was evaluated at this step. SaveError on all ranks when any of them could not
        write; only the unfinished checkpoint is lost then. A complete checkpoint of this step is left as it is.
        """
        name = storage.step_name(step)
        begun = self._ranks.lead(lambda: _text(self._begin(step)), SaveError, f"checkpoint {name}")
        if begun is None:
            return str(self._folder / name)
        draft = Path(begun)
        parts = self._ranks.world.gather(self._ranks.attempt(lambda: self._write(draft, state)))
        return self._ranks.lead(
            lambda: self._finish(draft, step, parts or [], scalars, value), SaveError, f"checkpoint {name}"
        )

    def _begin(self, step: int) -> Path | None:
        """The part of rank 0 in `save` before anything is written, see `storage.begin`."""
        if self._made and self._folder.parent.is_dir() and not self._folder.is_dir():
            self._note(
                f"{self._folder} was removed while the run went on, with its checkpoints; this save makes it anew"
            )
        draft = storage.begin(self._folder, step, self._run_id, self._note, self._fault)
        self._made = True
        return draft

    def _removed(self) -> str:
        """Which folder of the run is gone, though it was there. Empty: none."""
        there = [self._folder.parent, self._folder] if self._made else [self._folder.parent]
        return next((f"{folder} was removed while the run went on" for folder in there if not folder.is_dir()), "")

    def _write(self, draft: Path, state: State) -> list[dict[str, Any]]:
        """What this rank wrote, and what other processes wrote for it."""
        world = self._ranks.world
        written = [write_boxes(draft / f"rank_{world.rank}.safetensors", state.boxes)] if state.boxes else []
        return written + (state.others()(draft) if state.others else [])

    def _finish(
        self, draft: Path, step: int, parts: list[dict[str, Any]], scalars: dict[str, Any], value: float | None
    ) -> str:
        """The part of rank 0 in `save`: turn what all ranks wrote into one checkpoint, and remove old ones."""
        try:
            failed = [(rank, part["error"], part["exit"]) for rank, part in enumerate(parts) if "error" in part]
            if failed:
                rank, text, exit = failed[0]
                raise (SaveError if exit is None else DtfError)(f"rank {rank}: {text}")
            files, tensors = _merge([written for part in parts for written in part["result"]])
            files[STATE] = write_scalars(draft, scalars)
            goal = Objective(*self._objective, value) if value is not None else None
            final = storage.commit(
                draft, Manifest(step, self._run_id, self._strategy, self._ranks.world.size, goal, files, tensors)
            )
        except Exception:
            try:  # give the space of a full disk back
                if draft.exists():
                    storage.discard(draft, self._run_id)
            except OSError as error:
                self._note(f"{draft} is left behind: {error.strerror}; the next start removes it")
            raise
        self._damaged.discard(final)  # moved aside: the name is that of a good one again
        self.retain()
        return str(final)

    def owns(self, path: Path) -> bool:
        """Whether a checkpoint belongs to this run."""
        return path.parent == self._folder

    def retain(self) -> None:
        """Remove the checkpoints that the options do not keep. Called after each save, and when a run is resumed, since
        it may have crashed in between. Acts on rank 0. Not collective.

        A failure costs disk space only.
        """
        if self._ranks.world.rank:
            return
        rule = Retention(self._options.keep_last, self._options.keep_best, self._objective, self._trusted)
        sending = self._mirror.sending if self._mirror else None
        spared = self._damaged | ({sending} if sending else set())
        try:
            retain(self._folder, self._run_id, rule, spared)
        except OSError as error:
            self._note(f"old checkpoints in {self._folder} could not be removed: {error}")
        if self._mirror:
            self._mirror.wake(rule)

    def finish_mirror(self, hurried: bool) -> None:
        """Wait until the mirror has what is kept here. Collective. SaveError when something is missing there.

        `hurried`: the run has to end soon. It waits no longer than HURRY_S, and what is missing is noted.
        """
        if not self._options.mirror:
            return
        mirror, began, told = self._mirror, time.monotonic(), False
        while self._ranks.world.broadcast(
            mirror is not None and not (hurried and time.monotonic() - began > HURRY_S) and not mirror.is_done(1.0)
        ):
            self._alive()
            if mirror is not None and not told:
                told = True
                self._say(f"waiting for the mirror {mirror.place.name}")
        self._ranks.lead(lambda: self._check_mirror(hurried), DataError, "the mirror")

    def _check_mirror(self, hurried: bool) -> None:
        """The part of rank 0 in `finish_mirror` when the wait is over."""
        assert self._mirror is not None
        name, why = self._mirror.missing()
        text = f"{name} is in {self._folder} and not in the mirror {self._mirror.place.name}: {why}; start again with "
        text += "the same command, which sends it"
        if name and not hurried:
            raise SaveError(text)
        if name:
            self._note(text)

    def trust(self, step: int) -> None:
        """Note the last step at which replicas were compared and were alike: a checkpoint from before it is kept."""
        self._trusted = step

    def set_aside(self, after: int) -> tuple[list[str], str]:
        """Take the checkpoints of later steps than `after` out of the run: what they hold may be wrong. Returns their
        new names, and the name of the newest that is left, empty where there is none. Collective. SaveError on all
        ranks when they cannot be renamed.
        """

        def move() -> tuple[list[str], str]:
            moved = set_aside(self._folder, after, self._run_id)
            left = storage.checkpoints(self._folder)
            return [path.name for path in moved], left[0].name if left else ""

        moved, left = self._ranks.lead(move, SaveError, "the mark of suspect checkpoints")
        self.retain()  # the mirror loses them too
        return moved, left

    # ------------------------------------------------------------ find and load

    def find(self, attempt: int = 0, judge: Callable[[dict[str, Any]], object] = dict) -> Path | None:
        """The checkpoint to resume from, with every digest compared. None: start at step 0. Collective. Called once,
        before the first save.

        `attempt`: how many restarts this run has had. A restarted run resumes from its own checkpoints whatever
        `resume` says. `judge` raises DataError for scalars from which no run can go on. A checkpoint that cannot be
        loaded is noted and skipped. BusyError when `resume` would start a second history in the folder. DataError when
        there are checkpoints but none can be loaded, or when a rank cannot read what others can.
        """
        newest_fault, self._judge = "", judge
        candidates = self._ranks.lead(lambda: self._candidates(attempt), DataError, "checkpoints")
        for path, is_here in [(Path(path), is_here) for path, is_here in candidates]:
            fault = None if is_here else self._fetch(path)
            fault = fault or self._loading_fault(path)
            if fault is None:
                self._damaged.discard(path)
                return path
            newest_fault = newest_fault or f"{path.name}: {fault}"
            self._damaged.add(path)
            if self._ranks.world.rank == 0:
                self._note(f"checkpoint {path} is skipped: {fault}")
        if not candidates:
            return None
        in_run_folder = Path(candidates[0][0]).parent == self._folder
        where = self._folder if in_run_folder else f"checkpoint.resume={self._options.resume}"
        cure = "move them away to start anew, or use another run.dir" if in_run_folder else "give another"
        raise DataError(
            f"{where} holds no checkpoint that can be loaded ({newest_fault}); `dtf job=checkpoint job.action=verify` "
            f"says more; {cure}"
        )

    def _loading_fault(self, path: Path) -> str | None:
        """Why a checkpoint cannot be loaded; each rank compares a share of its digests. Collective."""
        world = self._ranks.world
        report = self._ranks.attempt(lambda: loading_fault(path, world.rank, world.size, self._judge))
        reports = world.gather(report) or []
        return self._ranks.lead(lambda: _verdict(reports), DataError, f"checkpoint {path}")

    def load(self, path: Path) -> StoredCheckpoint:
        """Open a checkpoint for reading. Not collective."""
        return StoredCheckpoint(path)

    def _fault(self, path: Path) -> str | None:
        return loading_fault(path, judge=self._judge)

    def _candidates(self, attempt: int) -> list[tuple[str, bool]]:
        """The part of rank 0 in `find`: the checkpoints of this run folder and its mirror, or those of the given path
        if there are none, newest first; and whether they are here or have to be fetched.
        """
        try:
            storage.clean(self._folder)
        except OSError as error:
            self._note(f"leftovers in {self._folder} could not be removed: {error}")
        resume, here = self._options.resume, storage.checkpoints(self._folder)
        self._made = bool(here)
        there = self._open_mirror(attempt)
        existing = [(str(path), True) for path in here] + [(str(self._folder / name), False) for name in there]
        existing.sort(key=lambda one: (storage.step_of(Path(one[0]).name) or 0, one[1]), reverse=True)
        if existing and attempt:
            return existing
        if not existing and is_url(resume):
            with reaching(resume, "checkpoint.resume"):
                self._source = open_place(resume)
                steps = self._source.steps()
            if not steps:
                raise DataError(f"checkpoint.resume={resume} holds no checkpoint; give the checkpoint.mirror of a run")
            return [(str(self._folder / storage.step_name(step)), False) for step in steps]
        given = (
            [] if resume in ("auto", "never") or is_url(resume) else resolve_checkpoints(resume, "checkpoint.resume")
        )
        if existing:
            where, name = (self._folder if here else self._options.mirror), Path(existing[0][0]).name
            if resume == "never":
                other = "run.dir" if here else "checkpoint.mirror"
                raise BusyError(
                    f"checkpoint.resume=never, but {where} holds {name}; a run folder is one run, and so is its "
                    f"mirror: use checkpoint.resume=auto to go on, or another {other}"
                )
            if given and given[0].resolve() in [path.resolve() for path in here[1:]]:
                raise BusyError(
                    f"checkpoint.resume={resume} is older than {name} in the same run folder; "
                    "a run folder is one run: use another run.dir to start from there"
                )
        return existing or [(str(path), True) for path in given]

    def _open_mirror(self, attempt: int) -> list[str]:
        """The checkpoints of the mirror, if there is one. A restarted run does without one that does not answer."""
        if not self._options.mirror:
            return []
        try:
            with reaching(self._options.mirror, "checkpoint.mirror"):
                mirror = Mirror(open_place(self._options.mirror), self._folder, self._run_id, self._note, self._say)
                names = [storage.step_name(step) for step in mirror.open()]
        except (SaveError, ConfigError) as error:
            if not attempt:
                raise
            self._note(f"{error}; nothing is mirrored until then")
            return []
        self._mirror, self._source = mirror, mirror.place
        return names

    def _fetch(self, path: Path) -> str | None:
        """Copy a checkpoint of the mirror to `path`. Returns why it cannot be loaded; None: it is there. Collective."""

        def fetch_it() -> str | None:
            assert self._source is not None
            step, began = storage.step_of(path.name) or 0, time.monotonic()
            self._say(f"fetching {path.name} from {self._source.name}")
            try:
                fetch(self._source, step, self._folder, self._run_id)
            except DataError as error:
                return str(error)
            except OSError as error:
                raise SaveError(f"{path.name} could not be fetched: {error.strerror}; start again") from error
            self._say(f"fetched {path.name} in {time.monotonic() - began:.1f} s")
            return None

        return self._ranks.lead_long(fetch_it, DataError, f"checkpoint {path}", self._alive)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _merge(parts: list[dict[str, Any]]) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Files and tensors of the manifest from what each rank wrote."""
    files = {part["file"]: StoredFile(part["size"], tuple(part["crc32"])) for part in parts}
    tensors: dict[str, tuple[str, tuple[int, ...], list[StoredBox]]] = {}
    for part in parts:
        for name, dtype, shape, key, offset, local in part["boxes"]:
            known = tensors.setdefault(name, (dtype, tuple(shape), []))
            if known[:2] != (dtype, tuple(shape)):
                raise ValueError(f"{name} is {known[0]} {known[1]} on one rank and {dtype} {tuple(shape)} on another")
            known[2].append(StoredBox(part["file"], key, tuple(offset), tuple(local)))
    return files, {name: StoredTensor(dtype, shape, tuple(boxes)) for name, (dtype, shape, boxes) in tensors.items()}


def _verdict(reports: list[dict[str, Any]]) -> str | None:
    """The first damage that any rank found. DataError when a rank could not look."""
    for rank, report in enumerate(reports):
        if "error" in report:
            raise DataError(f"rank {rank} cannot read it: {report['error']}; all ranks need the run folder")
    return next((report["result"] for report in reports if report["result"] is not None), None)
