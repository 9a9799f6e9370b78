"""Checkpoints as a run uses them: its options, and how ranks save, find and load checkpoints together. Torch-free.

Tensors are written and read by `dtf.checkpoint.boxes`. How files become a checkpoint, and when one may be trusted, is
`dtf.checkpoint.storage`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, Protocol

from dtf.api.registry import option, register, with_default
from dtf.api.schema import KeyProblem
from dtf.checkpoint import storage
from dtf.checkpoint.boxes import STATE, StoredCheckpoint, loading_fault, write_boxes, write_scalars
from dtf.checkpoint.manifest import (
    Manifest,
    Objective,
    StoredBox,
    StoredFile,
    StoredTensor,
)
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.checkpoint.suspects import set_aside
from dtf.core.errors import BusyError, DataError, DtfError, Exit, SaveError
from dtf.core.types import State

REMEDY = "make room or mend the disk, then start again"
"""The end of a SaveError that ends the run."""
_ERRORS: dict[int, type[DtfError]] = {cls.exit: cls for cls in (DtfError, DataError, BusyError, SaveError)}


@register("checkpoint", "every")
class Every:
    """Save regularly, keep the newest and the best checkpoints, and resume from the newest."""

    every_steps: int | None = option(
        default=None,
        least=0,
        doc="save so often, and at the end; null: at each end of an epoch; 0, which is checkpoint=off: never, not even "
        "at the end",
        unit="steps",
    )
    keep_last: int = option(default=3, least=1, doc="newest checkpoints to keep")
    keep_best: int = option(
        default=1, least=0, doc="best checkpoints to keep beside them; not 0: each new best evaluation is saved"
    )
    background: bool = option(
        default=True,
        doc="training waits for a copy of the state in memory, and a thread writes it; off: it waits for the disk",
    )
    resume: str = option(
        default="auto",
        doc="`auto`: from the newest loadable checkpoint of the run folder, if any; `never`: from step 0, refused "
        "when the run folder holds checkpoints; "
        "or a path, of a checkpoint or another run folder: from there, until the run folder has checkpoints of its own",
    )

    def check(self) -> None:
        """Raise ConfigError for values that make no sense, DataError when there is no checkpoint to resume from.

        Torch-free.
        """
        if not self.resume:
            raise KeyProblem(
                "checkpoint.resume",
                "checkpoint.resume is empty; use auto, never or the path of a checkpoint or run folder",
            )
        if self.resume not in ("auto", "never"):
            resolve_checkpoints(self.resume, "checkpoint.resume")


@register("checkpoint", "off", variant_of="every")
class Off(Every):
    """For trials whose result nobody needs: nothing is written, and a killed run starts over."""

    every_steps: int | None = with_default(Every, "every_steps", 0)


class Peers(Protocol):
    """The collective operations that a checkpointer uses, on JSON values. See `dtf.World`, which has them."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any] | None: ...
    def broadcast(self, value: Any) -> Any: ...


def _warn(text: str) -> None:
    print(f"dtf: {text}", file=sys.stderr, flush=True)


class Checkpointer:
    """Saves and finds the checkpoints of one run in `folder`. Every rank has one. A failure on one rank is raised on
    all.

    `objective`: the metric that ranks checkpoints, and `max` or `min`. `strategy`: its name, for people. `note` gets,
    on rank 0, what a person should know. One thread at a time.
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
    ) -> None:
        self._folder, self._options, self._world, self._run_id = folder, options, world, run_id
        self._objective, self._strategy, self._note = objective, strategy, note
        self._damaged: set[Path] = set()  # found at the start; they are left where they are and count for nothing
        self._judge: Callable[[dict[str, Any]], object] = dict
        self._cause: Exception | None = None
        self._made = False  # the folder is there, as far as this process knows
        self._trusted: int | None = None  # None: nobody compares replicas

    def over(self, world: Peers) -> Checkpointer:
        """The same, whose ranks talk by another channel."""
        other = copy(self)
        other._world = world
        return other

    # ------------------------------------------------------------ save

    def save(self, step: int, state: State, scalars: dict[str, Any], value: float | None = None) -> str:
        """Write the boxes of all ranks, and the `scalars` (JSON) of rank 0, as the checkpoint of `step`. Returns its
        folder. Collective.

        `value`: the objective, if it was evaluated at this step. SaveError on all ranks when any of them could not
        write; only the unfinished checkpoint is lost then. A complete checkpoint of this step is left as it is.
        """
        name = storage.step_name(step)
        begun = self._lead(lambda: _text(self._begin(step)), SaveError, f"checkpoint {name}")
        if begun is None:
            return str(self._folder / name)
        draft = Path(begun)
        parts = self._world.gather(self._attempt(lambda: self._write(draft, state)))
        return self._lead(
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
        written = [write_boxes(draft / f"rank_{self._world.rank}.safetensors", state.boxes)] if state.boxes else []
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
                draft, Manifest(step, self._run_id, self._strategy, self._world.size, goal, files, tensors)
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
        if self._world.rank:
            return
        options = self._options
        try:
            storage.retain(
                self._folder,
                self._run_id,
                options.keep_last,
                options.keep_best,
                self._objective,
                self._damaged,
                self._trusted,
            )
        except OSError as error:
            self._note(f"old checkpoints in {self._folder} could not be removed: {error}")

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

        moved, left = self._lead(move, SaveError, "the mark of suspect checkpoints")
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
        candidates = [Path(path) for path in self._lead(lambda: self._candidates(attempt), DataError, "checkpoints")]
        for path in candidates:
            reports = self._world.gather(
                self._attempt(lambda path=path: loading_fault(path, self._world.rank, self._world.size, judge))
            )
            fault = self._lead(lambda reports=reports: _verdict(reports or []), DataError, f"checkpoint {path}")
            if fault is None:
                return path
            newest_fault = newest_fault or f"{path.name}: {fault}"
            self._damaged.add(path)
            if self._world.rank == 0:
                self._note(f"checkpoint {path} is skipped: {fault}")
        if not candidates:
            return None
        in_run_folder = candidates[0].parent == self._folder
        where = self._folder if in_run_folder else f"checkpoint.resume={self._options.resume}"
        cure = "move them away to start anew, or use another run.dir" if in_run_folder else "give another"
        raise DataError(
            f"{where} holds no checkpoint that can be loaded ({newest_fault}); `dtf job=checkpoint job.action=verify` "
            f"says more; {cure}"
        )

    def load(self, path: Path) -> StoredCheckpoint:
        """Open a checkpoint for reading. Not collective."""
        return StoredCheckpoint(path)

    def _fault(self, path: Path) -> str | None:
        return loading_fault(path, judge=self._judge)

    def _candidates(self, attempt: int) -> list[str]:
        """The part of rank 0 in `find`: the checkpoints of this run folder, or those of the given path if there are
        none, newest first.
        """
        try:
            storage.clean(self._folder)
        except OSError as error:
            self._note(f"leftovers in {self._folder} could not be removed: {error}")
        resume, existing = self._options.resume, storage.checkpoints(self._folder)
        self._made = bool(existing)
        if existing and attempt:
            return [str(path) for path in existing]
        given = [] if resume in ("auto", "never") else resolve_checkpoints(resume, "checkpoint.resume")
        if existing:
            if resume == "never":
                raise BusyError(
                    f"checkpoint.resume=never, but {self._folder} holds {existing[0].name}; a run folder is one run: "
                    "use checkpoint.resume=auto to go on, or another run.dir"
                )
            if given and given[0].resolve() in [path.resolve() for path in existing[1:]]:
                raise BusyError(
                    f"checkpoint.resume={resume} is older than {existing[0].name} in the same run folder; "
                    "a run folder is one run: use another run.dir to start from there"
                )
        return [str(path) for path in existing or given]

    # ------------------------------------------------------------ agreement

    def _attempt(self, work: Callable[[], Any]) -> dict[str, Any]:
        """The JSON result of `work`, or its failure as JSON, so that no rank is left waiting for one that failed."""
        self._cause = None
        try:
            return {"result": work()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            self._cause = error
            if isinstance(error, DtfError):
                return {"error": str(error), "exit": int(error.exit)}
            if isinstance(error, (OSError, MemoryError)):
                return {"error": _reason(error), "exit": None}
            return {"error": f"{type(error).__name__}: {error}; please report this", "exit": int(Exit.BUG)}

    def _lead(self, work: Callable[[], Any], failure: type[DtfError], what: str) -> Any:
        """Rank 0's result of `work` on every rank, or its failure: `failure` for what the machine refused.

        Collective.
        """
        answer = self._attempt(work) if self._world.rank == 0 else {}
        if "error" in answer:
            answer["removed"] = self._removed()
        answer = self._world.broadcast(answer)
        if "error" not in answer:
            return answer["result"]
        kind = failure if answer["exit"] is None else _ERRORS.get(answer["exit"], DtfError)
        text = answer["error"]
        if kind is SaveError:
            rest = f"the last complete one is kept; {REMEDY}"
            if answer["removed"]:
                text, rest = answer["removed"], "its checkpoints are gone; start again, or with another run.dir"
            text = f"{what} could not be written: {text}; {rest}"
        elif kind is DtfError or answer["exit"] is None:
            text = f"{what}: {text}"
        raise kind(text) from self._cause


def _reason(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    where = f" ({os.path.basename(error.filename)})" if isinstance(error.filename, str) else ""
    return f"{error.strerror or error}{where}"


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
