"""Checkpoints as a run uses them: its options, and how ranks save, find and load checkpoints together. Torch-free.

Tensors are written and read by `dtf.checkpoint.boxes`. How files become a checkpoint, and when one may be trusted, is
`dtf.checkpoint.storage`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

from dtf.checkpoint import layers, storage
from dtf.checkpoint.agreement import Agreement, Peers
from dtf.checkpoint.boxes import STATE, StoredCheckpoint, loading_fault, write_rank, write_scalars
from dtf.checkpoint.manifest import (
    Manifest,
    Objective,
    StoredBox,
    StoredFile,
    StoredTensor,
)
from dtf.checkpoint.options import Every
from dtf.checkpoint.retention import Retention, retain
from dtf.checkpoint.sources import Candidate, Sources
from dtf.checkpoint.suspects import set_aside
from dtf.core.errors import BusyError, DataError, DtfError, Preempted, SaveError, by_all
from dtf.core.text import bytes_text
from dtf.core.types import State


def _warn(text: str) -> None:
    print(f"dtf: {text}", file=sys.stderr, flush=True)


class Checkpointer:
    """Saves and finds the checkpoints of one run in `folder`. Every rank has one. A failure on one rank is raised on
    all.

    `objective`: the metric that ranks checkpoints, and `max` or `min`. `strategy`: its name, for people. `note` gets,
    on rank 0, what a person should know, and `say` what is as it should be. `alive` is called while work that takes
    long goes on. `left_s`: seconds until this process is killed. One thread at a time.
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
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._folder, self._options, self._run_id = folder, options, run_id
        self._ranks = Agreement(world, self._removed, self._kept)
        self._objective, self._strategy = objective, strategy
        self._note, self._say, self._alive, self._left_s = note, say, alive, left_s
        self._damaged: set[Path] = set()  # found at the start; they are left where they are and count for nothing
        self._judge: Callable[[dict[str, Any]], object] = dict
        self._made = False  # the folder is there, as far as this process knows
        self._trusted: int | None = None  # None: nobody compares replicas
        self._sources = Sources(folder, options, run_id, note, say)
        self._fetched: set[Path] = set()
        self._foreign: set[Path] = set()  # fetched from another run
        # on rank 0: the last save, if it is complete, and the one whose rows the next save takes over
        self._last: tuple[Path, Manifest] | None = None
        self._base: tuple[Path, Manifest] | None = None

    def over(self, world: Peers) -> Checkpointer:
        """The same, whose ranks talk by another channel."""
        other = copy(self)
        other._ranks = Agreement(world, other._removed, other._kept)
        return other

    # ------------------------------------------------------------ save

    def layer(self, whole: bool) -> int | None:
        """Which rows of tables the next save has to hold: all (0), or those that changed since the last save, as this
        layer, see `dtf.checkpoint.layers`. None without `checkpoint.delta_every`. Collective.

        Not whole can only be what follows a complete save of this process.
        """
        if self._options.delta_every is None:
            return None
        self._base = None
        return 0 if whole else self._ranks.lead(self._next_layer, SaveError, "the next save")

    def _next_layer(self) -> int:
        """The part of rank 0 in `layer`."""
        if self._last is None or not self._last[0].is_dir():
            return 0
        number = layers.next_layer(self._last[1])
        self._base = self._last if number else None
        return number

    def save(
        self,
        step: int,
        state: State,
        scalars: dict[str, Any],
        value: float | None = None,
        told: Callable[[str], None] = lambda path: None,
    ) -> str:
        """Write the boxes of all ranks, and the `scalars` (JSON) of rank 0, as the checkpoint of `step`. Returns its
        folder. Collective.

        `value`: the objective, if it was evaluated at this step. SaveError on all ranks when any of them could not
        write; only the unfinished checkpoint is lost then. A complete checkpoint of this step is left as it is. `told`
        is called with its folder once it is complete, and before the mirror hears of it.
        """
        name = storage.step_name(step)
        begun = self._ranks.lead(lambda: _text(self._begin(step)), SaveError, f"checkpoint {name}")
        if begun is None:
            told(str(self._folder / name))
            return str(self._folder / name)
        draft = Path(begun)
        parts = self._ranks.world.gather(self._ranks.attempt(lambda: self._write(draft, state)))
        path = self._ranks.lead(
            lambda: self._finish(draft, step, parts or [], scalars, value), SaveError, f"checkpoint {name}"
        )
        told(path)
        self._wake_mirror()
        return path

    def _begin(self, step: int) -> Path | None:
        """The part of rank 0 in `save` before anything is written, see `storage.begin`."""
        if self._made and self._folder.parent.is_dir() and not self._folder.is_dir():
            self._note(
                f"{self._folder} was removed while the run went on, with its checkpoints; this save makes it anew"
            )
        self._last = None
        draft = storage.begin(self._folder, step, self._run_id, self._note, self._fault)
        self._made = True
        if draft and self._base:
            try:
                layers.take_over(*self._base, draft)
            except Exception:
                self._give_up(draft)
                raise
        return draft

    def _removed(self) -> str:
        """Which folder of the run is gone, though it was there. Empty: none."""
        there = [self._folder.parent, self._folder] if self._made else [self._folder.parent]
        with suppress(OSError):  # the disk fails
            return next((f"{folder} was removed while the run went on" for folder in there if not folder.is_dir()), "")
        return ""

    def _kept(self) -> tuple[str, str]:
        """The folder of the checkpoints, and the name of the newest that is not known to be damaged."""
        there: list[Path] = []
        with suppress(OSError):  # the disk fails
            there = storage.checkpoints(self._folder)
        return str(self._folder), next((path.name for path in there if path not in self._damaged), "")

    def _write(self, draft: Path, state: State) -> list[dict[str, Any]]:
        """What this rank wrote, and what other processes wrote for it."""
        world = self._ranks.world
        return write_rank(draft, world.rank, state.boxes) + (state.others()(draft) if state.others else [])

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
            manifest = Manifest(step, self._run_id, self._strategy, self._ranks.world.size, goal, files, tensors)
            if self._base:
                manifest = layers.joined(self._base[1], manifest)
            final = storage.commit(draft, manifest)
        except Exception:
            self._give_up(draft)
            raise
        self._last = final, manifest
        self._damaged.discard(final)  # moved aside: the name is that of a good one again
        self._remove_old()
        return str(final)

    def _give_up(self, draft: Path) -> None:
        """Give the space of a full disk back."""
        try:
            if draft.exists():
                storage.discard(draft, self._run_id)
        except OSError as error:
            self._note(f"{draft} is left behind: {error.strerror}; the next start removes it")

    def owns(self, path: Path) -> bool:
        """Whether a checkpoint belongs to this run."""
        return path.parent == self._folder and path not in self._foreign

    def retain(self) -> None:
        """Remove the checkpoints that the options do not keep, here and in the mirror. Called when a run is resumed,
        since it may have crashed between a save and this. Acts on rank 0. Not collective.
        """
        if not self._ranks.world.rank:
            self._remove_old()
            self._wake_mirror()

    def _remove_old(self) -> None:
        """The part of `retain` here. A failure costs disk space only."""
        mirror = self._sources.mirror
        sending = {mirror.sending} if mirror and mirror.sending else set()
        try:
            retain(self._folder, self._run_id, self._rule(), self._damaged | sending)
        except OSError as error:
            self._note(f"old checkpoints in {self._folder} could not be removed: {error}")

    def _wake_mirror(self) -> None:
        """The part of `retain` in the mirror, which rank 0 has. Returns at once."""
        if self._sources.mirror:
            self._sources.mirror.wake(self._rule(), self._damaged)

    @property
    def mirror_s(self) -> float:
        """Of the checkpoints that rank 0 has sent to the mirror so far, the seconds of the slowest; 0 elsewhere."""
        return self._sources.mirror.longest_s if self._sources.mirror else 0.0

    def _rule(self) -> Retention:
        return Retention(self._options.keep_last, self._options.keep_best, self._objective, self._trusted)

    def finish_mirror(self) -> None:
        """Wait until the mirror has what is kept here, or the run has to end. Collective.

        When something is missing there: Preempted if the run was asked to stop, BusyError if another run has taken the
        place, else SaveError.
        """
        if not self._options.mirror:
            return
        mirror, rounds, before = self._sources.mirror, 0, -1
        while True:
            state = None
            if mirror is not None:
                waits = not mirror.is_done(1.0) and self._left_s() > 0
                state, before = [waits, mirror.place.moved != before], mirror.place.moved
            waits, moves = self._ranks.world.broadcast(state)
            if not waits:
                break
            if moves:  # else it may hang
                self._alive()
            rounds += 1
            if mirror is not None and not rounds & (rounds - 1):  # after a second, two, four
                self._say(f"waiting for the mirror {mirror.place.name}: {bytes_text(before)} sent")
        self._ranks.lead(self._check_mirror, DataError, "the mirror")

    def _check_mirror(self) -> None:
        """The part of rank 0 in `finish_mirror` when the wait is over."""
        mirror = self._sources.mirror
        assert mirror is not None
        name, why = mirror.missing()
        if name:
            text = f"{name} is complete in {self._folder} and not in the mirror {mirror.place.name}: {why}"
            if not mirror.taken:
                text = f"{text}; start again with the same command, which sends it"
            if self._left_s() < math.inf:
                raise Preempted(f"asked to stop; {text}")
            raise (BusyError if mirror.taken else SaveError)(text)

    def trust(self, step: int) -> None:
        """Note the last step at which replicas were compared and were alike: a checkpoint from before it is kept."""
        self._trusted = step

    def set_aside(self, after: int) -> tuple[list[str], str]:
        """Take the checkpoints of later steps than `after` out of the run: what they hold may be wrong. Returns their
        new names, and the name of the newest that is left, empty where there is none. Collective. SaveError on all
        ranks when they cannot be renamed.
        """

        def move() -> tuple[list[str], str]:
            moved = set_aside(self._folder, after, self._run_id, bool(self._options.mirror))
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
        found = self._ranks.lead(lambda: self._sources.candidates(attempt), DataError, "checkpoints")
        self._made = bool(storage.checkpoints(self._folder))
        candidates = [Candidate(*fields) for fields in found]
        for candidate in candidates:
            path = Path(candidate.path)
            fault = (None if candidate.is_here else self._fetch(candidate)) or self._loading_fault(path)
            if fault is None:
                self._damaged.discard(path)
                if not candidate.is_here:
                    self._fetched.add(path)
                    self._foreign.update(() if candidate.is_own else [path])
                return path
            newest_fault = newest_fault or f"{path.name}: {fault}"
            self._damaged.add(path)
            if self._ranks.world.rank == 0:
                self._note(f"checkpoint {path} is skipped: {fault}")
        if not candidates:
            return None
        where, cure = f"checkpoint.resume={self._options.resume}", "give another"
        if candidates[0].is_own:
            where = " and ".join(filter(None, (str(self._folder), self._options.mirror)))
            cure = "move them away to start anew, or use another run.dir"
        text = f"{where} holds no checkpoint that can be loaded ({newest_fault})"
        raise by_all(DataError(f"{text}; `dtf job=checkpoint job.action=verify` says more; {cure}"))

    def _fetch(self, candidate: Candidate) -> str | None:
        """Copy a checkpoint here. Returns why it cannot be loaded; None: it is there. Collective."""
        return self._ranks.lead_long(
            lambda: self._sources.fetch(candidate),
            DataError,
            f"checkpoint {candidate.path}",
            lambda: self._sources.moved(candidate),
            self._alive,
        )

    def _loading_fault(self, path: Path) -> str | None:
        """Why a checkpoint cannot be loaded; each rank compares a share of its digests. Collective."""
        world = self._ranks.world
        report = self._ranks.attempt(lambda: loading_fault(path, world.rank, world.size, self._judge))
        reports = world.gather(report) or []
        return self._ranks.lead(lambda: _verdict(reports), DataError, f"checkpoint {path}")

    def give_back(self, path: Path) -> None:
        """The run does not go on from the checkpoint that was found: it is removed, if it was fetched. Acts on rank 0.
        Not collective.
        """
        if path in self._fetched and not self._ranks.world.rank:
            with suppress(OSError):
                storage.discard(path, self._run_id)
                if not storage.checkpoints(self._folder):
                    (self._folder / storage.LATEST).unlink()

    def load(self, path: Path) -> StoredCheckpoint:
        """Open a checkpoint for reading. Not collective."""
        return StoredCheckpoint(path)

    def _fault(self, path: Path) -> str | None:
        return loading_fault(path, judge=self._judge)


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
