"""How many requests to stop a process has heard: the first makes a run save, a second one ends it at once."""

from __future__ import annotations

import signal

import pytest

from dtf.host import signals
from dtf.host.signals import Stop


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each signal comes a second after the one before."""
    now = iter(range(1, 1000))
    monkeypatch.setattr(signals.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(signals, "_scheduled", [])
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)


def counts(*numbers: int) -> list[int]:
    """What a Stop counts after each signal; 0 stands for a request of another host."""
    heard = []
    with Stop() as stop:
        for number in numbers:
            stop.ask() if number == 0 else signal.raise_signal(number)
            heard.append(stop.count)
    return heard


@pytest.mark.usefixtures("apart")
def test_people_insist_with_a_second_signal() -> None:
    assert counts(signal.SIGTERM, signal.SIGTERM, signal.SIGINT) == [1, 2, 3]


@pytest.mark.usefixtures("apart")
def test_a_host_that_was_told_by_another_gets_its_own_first_signal_afterwards() -> None:
    assert counts(0, signal.SIGTERM, signal.SIGTERM) == [1, 1, 2]
    assert counts(signal.SIGTERM, 0, 0) == [1, 1, 1]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("how", ["a bundle", "a step of Slurm"])
def test_schedulers_send_a_signal_more_than_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signals.sent_by_scheduler() if how == "a bundle" else monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert counts(signal.SIGTERM, signal.SIGHUP, signal.SIGTERM) == [1, 1, 1]
    assert counts(signal.SIGINT, signal.SIGINT) == [1, 2]


def test_signals_that_come_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals.time, "monotonic", lambda: 1.0)
    assert counts(signal.SIGTERM, signal.SIGTERM) == [1, 1]
