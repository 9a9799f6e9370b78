"""A job of Slurm and the note of its script, where they say different things."""

from __future__ import annotations

from dtf.cluster.platform import JobState, State
from dtf.cluster.slurm_state import notes_of, of_job


def test_a_run_that_ends_at_its_time_limit_at_the_last_moment_is_finished() -> None:
    noted = notes_of({"ended": "finished 0 7 newest checkpoint: step 40\n"}, "7")
    shown = "newest checkpoint: step 40; exit code 0; Slurm calls it TIMEOUT, as it ended while the job did"
    assert of_job([{"JobState": "TIMEOUT"}], noted) == JobState(State.finished, shown)
    assert of_job([{"JobState": "TIMEOUT"}], []).state is State.failed
    assert of_job([{"JobState": "RUNNING"}], noted).state is State.running
