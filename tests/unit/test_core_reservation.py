"""Two runs of a host never pin their ranks to the same core."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from dtf.core.errors import ConfigError
from dtf.host import core_reservation
from dtf.host.core_reservation import reserve_cores

OTHER = """
import sys
from dtf.host import core_reservation
core_reservation._NAME = sys.argv[1]
core_reservation.reserve_cores([1, 2])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds cores 1 and 2 until its input ends. Names are the test's own."""
    name = f"dtf-test-{uuid.uuid4().hex}"
    monkeypatch.setattr(core_reservation, "_NAME", name)
    monkeypatch.setattr(core_reservation, "_held", {})
    command = [sys.executable, "-c", OTHER, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        for held in core_reservation._held.values():
            held.close()


def test_a_core_of_another_run_is_refused_until_that_ends(other: subprocess.Popen[str]) -> None:
    reserve_cores([0, 3])
    reserve_cores([3, 0])  # the next attempt, or the next run of a sweep
    with pytest.raises(ConfigError, match=r"launcher.pin=true: ranks of another run .* pinned to core 2; .*taskset"):
        reserve_cores([2])
    other.communicate("")
    reserve_cores([1, 2])
