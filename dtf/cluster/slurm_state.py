"""What has become of a job of Slurm: by the controller's records, and by the notes of its script where the
controller has forgotten. Pure: texts in, a state out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtf.cluster.node_lists import task_numbers
from dtf.cluster.platform import JobState, State

_LIVE = {
    "PENDING": State.queued,
    "REQUEUED": State.requeued,
    "REQUEUE_HOLD": State.requeued,
    "REQUEUE_FED": State.requeued,
    "SPECIAL_EXIT": State.requeued,
    **dict.fromkeys(
        ("RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
        State.running,
    ),
}
_ENDED = {
    "COMPLETED": State.finished,
    "CANCELLED": State.cancelled,
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
        State.failed,
    ),
}
_ORDER = (
    State.running, State.requeued, State.queued, State.failed, State.cancelled, State.unknown, State.finished,
)  # fmt: skip
"""Of several jobs the first of these that one of them is in: nothing is finished while of a part nothing is known."""
_NOTED = {"finished": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED"}
"""Slurm's word for what the script notes."""

_THE_REST = str(2**32 - 2)
"""Instead of numbers, in the record of all tasks that never began, once these were cancelled."""


@dataclass(frozen=True)
class Note:
    """What the script of a job, or of task `task` of an array, noted at its end. `word`: as Slurm would say it."""

    task: int
    word: str
    code: str
    text: str

    @property
    def shown(self) -> str:
        return f"{self.text or self.word}; exit code {self.code}"


def notes_of(files: Mapping[str, str], job: str) -> list[Note]:
    """Those of this job among the files of its folder: name -> text. Others are of an earlier job."""
    found = []
    for name, text in sorted(files.items()):
        word, code, id, said = (*text.split(maxsplit=3), "", "", "", "")[:4]
        task = name.partition(".")[2]
        if id.partition("_")[0] == job:
            found.append(Note(int(task) if task.isdecimal() else 0, _NOTED.get(word, "UNKNOWN"), code, said.strip()))
    return found


def fields(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show job --oneliner`. Values may have spaces; names begin with a capital."""
    parts = re.split(r"(?:^| )([A-Z][A-Za-z:/]*)=", line)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


def of_array(jobs: Sequence[Mapping[str, str]], notes: Iterable[Note], tasks: int) -> JobState:
    """Of an array of so many tasks. A record may be of several tasks; tasks that Slurm has forgotten are known by their
    notes.
    """
    noted = {note.task: note for note in notes}
    words: dict[int, tuple[State, str]] = {}
    for job in jobs:
        if job["ArrayTaskId"] != _THE_REST:
            words |= dict.fromkeys(task_numbers(job["ArrayTaskId"]), (_state(job), job["JobState"]))
    gone = [note for note in noted.values() if note.task not in words]
    words |= {note.task: (_ENDED.get(note.word, State.unknown), note.word) for note in gone}
    for job in jobs:
        if job["ArrayTaskId"] == _THE_REST:
            words = {**dict.fromkeys(range(tasks), (_state(job), job["JobState"])), **words}
    states = {state for state, _ in words.values()} | ({State.unknown} if len(words) < tasks else set())
    counts = Counter(word for _, word in words.values())
    details = [", ".join(f"{count} {word}" for word, count in sorted(counts.items()))]
    details += [f"task {note.task}: {note.shown}" for note in gone if note.word == "FAILED"]
    if len(words) < tasks:
        details.append(f"Slurm has forgotten {tasks - len(words)}, whose scripts noted no end")
    return JobState(_first(states), "; ".join(filter(None, details)))


def of_job(jobs: Sequence[Mapping[str, str]], notes: Sequence[Note]) -> JobState:
    """Of one job, by its records: several where it has several components. By its note where there are none."""
    if not jobs:
        if not notes:
            return JobState(State.unknown, "Slurm has forgotten it, and its script noted no end")
        return JobState(_ENDED.get(notes[0].word, State.unknown), notes[0].shown)
    states = [_state(job) for job in jobs]
    state = _first(states)
    if state is State.failed and notes and notes[0].word == _NOTED["finished"]:  # by its time limit, at the last moment
        said = jobs[states.index(state)]["JobState"]
        return JobState(State.finished, f"{notes[0].shown}; Slurm calls it {said}, as it ended while the job did")
    shown = jobs[states.index(state)]
    reason = "" if shown.get("Reason", "None") == "None" else f" {shown['Reason']}"
    nodes = ",".join(
        dict.fromkeys(job["NodeList"] for job in jobs if job.get("NodeList", "(null)") not in ("", "(null)"))
    )
    details = [f"{shown['JobState']}{reason}", nodes and f"on {nodes}"]
    if not state.is_live and shown.get("ExitCode", "0:0") != "0:0":
        details.append(f"exit code {shown['ExitCode'].partition(':')[0]}")
    if shown.get("Restarts", "0") != "0":
        details.append(f"{shown['Restarts']} restart(s)")
    # that of a job which runs, or was cancelled, is of its start before
    if state not in (State.running, State.cancelled):
        details.append(re.sub("^dtf [0-9a-f]+ ?", "", shown.get("Comment", "")))
    return JobState(state, "; ".join(part for part in details if part))


def _first(states: Iterable[State]) -> State:
    return min(states, key=_ORDER.index)


def _state(job: Mapping[str, str]) -> State:
    word = job["JobState"].partition(",")[0]
    state = _LIVE.get(word) or _ENDED.get(word, State.unknown)
    return State.requeued if state is State.queued and job.get("Restarts", "0") != "0" else state
