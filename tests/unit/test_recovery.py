"""The line that says how long a restart took."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dtf.core.types import Event, Note, Stepped, event_from_json, event_to_json
from dtf.launch.recovery import Loss, RecoveryReport, recovered

MARKS = {"started": 10.5, "met": 10.6, "built": 11.0, "loaded": 11.1, "stepped": 11.15}


@dataclass
class Attempt:
    loss: Loss


def test_the_parts_of_a_recovery_add_up() -> None:
    assert recovered(Loss(10.0, 10.02, 10.12), MARKS) == (
        "recovered in 1.15 s: noticed 0.02, stopped 0.10, started 0.38, met 0.10, built 0.40, loaded 0.10, stepped 0.05"
    )


def test_the_first_step_after_each_restart_is_told_once() -> None:
    seen: list[Event] = []
    report = RecoveryReport(seen.append)
    report.begin(Attempt(Loss(10.0, 10.02, 10.12)))
    report.see(Stepped(MARKS))
    assert not seen, "nothing was restarted yet"
    report.begin(Attempt(Loss(0.0, 0.0, 0.0)))
    report.see(event_from_json(event_to_json(Stepped(MARKS))))
    report.see(Stepped(MARKS))
    report.see(Note("info", "as it was"))
    assert [event.text for event in seen if isinstance(event, Note)] == [
        recovered(Loss(10.0, 10.02, 10.12), MARKS),
        "as it was",
    ]


@pytest.mark.parametrize(
    ("silent", "noticed", "loss"),
    [
        (1.0, (3.0, 2.0), (1.0, 2.0)),
        (1.0, (0.0, 2.0), (1.0, 2.0)),  # noticed as a hang
        (0.0, (3.0, 0.0), (3.0, 3.0)),  # a rank that said so itself
    ],
)
def test_a_loss_is_noticed_by_what_was_first(
    silent: float, noticed: tuple[float, ...], loss: tuple[float, float]
) -> None:
    seen = Loss.seen(silent, *noticed)
    assert (seen.silent, seen.noticed) == loss and seen.ended > 0
