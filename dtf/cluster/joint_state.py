"""What a job at its scheduler and the run in its folder say together: each knows what the other does not. Pure."""

from __future__ import annotations

from dtf.cluster.platform import JobState, State
from dtf.core.errors import Exit
from dtf.runs.standing import Standing


def job_state(job: JobState, run: Standing | None, launch_before: str) -> JobState:
    """The state of a job, where its run knows better. `launch_before`: as in `JobRecord`.

    A job that waits although it has begun its run was requeued. One that its scheduler does not know any more has ended
    as its run has.
    """
    if run is None or run.id == launch_before:
        return job
    if job.state is State.queued:
        return JobState(State.requeued, job.detail)
    if job.state is State.unknown and run.exit is not None and run.exit != Exit.PREEMPTED:
        return JobState(State.failed if run.exit else State.finished, job.detail)
    return job


def run_state(job: State, run: Standing, launch_before: str, ends: bool = False) -> str:
    """The state of the run in words that fit that of its job. `ends`: it was told to end."""
    if run.live:
        # a job that failed or waits has lost its node, which does not know; or this is no process of it
        return "running" if job in (State.running, State.unknown) else f"running, though its job is {job.value}"
    if not job.is_live:
        lost = run.exit is None and job is not State.unknown and run.id != launch_before
        return "was killed, or its node was lost" if lost else run.state
    if run.id == launch_before:
        return f"{run.state}; that was before this job, which has not begun yet"
    before = "saved and stopped" if run.exit == Exit.PREEMPTED else run.state if run.exit is not None else "was killed"
    again = "its job ends" if ends else "its job starts it again"
    waits = again if job is State.running else "waits for the next start of its job"
    return f"{before}; {waits}"
