"""What the batch script of launcher=slurm does where Slurm itself refuses: a step, or to requeue the job."""

from __future__ import annotations

import pytest

from tests.cluster.test_slurm_script import COMPLETING, Machine, machine

__all__ = ["machine"]


def test_a_note_of_losses_is_a_number_and_runs_nothing(machine: Machine) -> None:
    """A folder may come from elsewhere."""
    (machine.folder / "run" / "job").mkdir(parents=True)
    (machine.folder / "run" / "job" / "lost").write_text(f"a[$(touch${{IFS}}{machine.folder}/pwned)] 0 7\n")
    assert machine.run("69") == 69 and machine.requeued
    assert not (machine.folder / "pwned").exists()


def test_an_interpreter_that_the_node_does_not_have_is_named(machine: Machine) -> None:
    machine.touches = machine.folder / "run" / "job" / "attempts" / "7.0" / "began.0"
    assert machine.run("127") == 127
    noted = (machine.folder / "run" / "job" / "ended").read_text()
    assert noted == "failed 127 7 there is no such interpreter on the node: give launcher.python\n"


MISTAKEN = "srun: unrecognized option '--foo=1'\nTry \"srun --help\" for more information"


def test_a_mistake_in_the_arguments_of_srun_ends_the_job_in_its_words(machine: Machine) -> None:
    machine.says = MISTAKEN
    assert machine.run("", "", srun=255) == 2 and not machine.requeued
    noted = (machine.folder / "run" / "job" / "ended").read_text()
    assert noted == (
        "failed 2 7 srun started no task and ended with 255: unrecognized option '--foo=1'; correct launcher.srun\n"
    )


def test_a_step_that_slurm_cannot_create_is_a_loss_and_the_third_says_why(machine: Machine) -> None:
    machine.says = MISTAKEN
    machine.run("", srun=255)
    machine.says = "srun: error: Unable to create step for job 7: Requested node configuration is not available"
    for restart in range(1, 3):
        assert machine.run("", srun=255, SLURM_RESTART_COUNT=str(restart)) == 69 and machine.requeued
    assert machine.run("", srun=255, SLURM_RESTART_COUNT="3") == 69 and not machine.requeued
    noted = (machine.folder / "run" / "job" / "ended").read_text()
    assert "without a new checkpoint; srun started no task and ended with 255: Unable to create step for job" in noted


@pytest.mark.parametrize(
    ("shown", "code", "ended"),
    [
        (COMPLETING, 75, False),  # Slurm has requeued it by itself
        (COMPLETING.replace("COMPLETING", "RUNNING"), 75, True),
        ("", 75, True),  # the controller is away
    ],
)
def test_a_job_that_slurm_does_not_requeue_has_failed_and_says_why(
    machine: Machine, shown: str, code: int, ended: bool
) -> None:
    machine.scontrol = 'if [[ $1 == requeue ]]; then echo "Requested operation is presently disabled"; exit 1; fi'
    machine.save(12)
    assert machine.run("75", shown=shown) == code
    noted = machine.folder / "run" / "job" / "ended"
    assert noted.exists() == ended
    assert machine.calls.count("scontrol requeue 7") == (1 if shown else 60)
    if ended:
        assert noted.read_text() == (
            "failed 75 7 stopped at step 12, and Slurm does not start it again: Requested operation is presently "
            "disabled; submit it again\n"
        )
