"""What `job=chaos` disturbs from outside: a disk and the clock by a preload library, a network by a namespace."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtf.jobs.chaos import network, preload, trial
from dtf.jobs.chaos.command import Command
from dtf.jobs.chaos.faults import FAULTS
from tests.support.launching import HANG_S


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if preload.compiler() is None:
        pytest.skip("no C compiler is installed")
    return preload.build(tmp_path_factory.mktemp("preload"))


def python(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TRIES = """
import os, sys
def tried(call):
    try:
        call()
        return "ok"
    except OSError as error:
        return error.strerror
os.chdir({folder!r})
one = os.open("one", os.O_RDWR | os.O_CREAT) if {opened} else -1
print([tried(call) for call in (
    lambda: os.mkdir("made"),
    lambda: open("new", "w"),
    lambda: os.rename("there", "moved"),
    lambda: os.fsync(os.open("old", os.O_RDONLY)),
    lambda: os.link("old", "linked"),
    lambda: open({rows!r}, "w"),
    lambda: open({elsewhere!r}, "w").write("x"),
)])
"""


EIO, FULL = "Input/output error", "No space left on device"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({"mode": "off"}, ["ok"] * 7),
        ({"mode": "full", "error": errno.ENOSPC}, [FULL] * 2 + ["ok"] * 2 + [FULL] * 2 + ["ok"]),
        ({"mode": "fail", "error": errno.EIO}, [EIO] * 6 + ["ok"]),
        ({"mode": "fail", "error": errno.EIO, "after": 2}, ["ok"] * 2 + [EIO] * 4 + ["ok"]),
        ({"mode": "fail", "error": errno.EIO, "after": 1, "failures": 1}, ["ok", EIO] + ["ok"] * 5),
        ({"mode": "slow", "delay_s": 0.001}, ["ok"] * 7),
    ],
)  # fmt: skip
def test_calls_below_a_folder_fail_as_they_are_told(
    library: Path, tmp_path: Path, order: dict[str, Any], expected: list[str]
) -> None:
    folder = tmp_path / "disturbed"
    folder.mkdir()
    (tmp_path / "rows").mkdir()
    for name in ("there", "old"):
        (folder / name).write_text("x")
    control = preload.Control(tmp_path, library)
    control.disk(prefixes=[folder, tmp_path / "rows"], **order)
    code = TRIES.format(
        folder=str(folder), elsewhere=str(tmp_path / "elsewhere"), rows=str(tmp_path / "rows/new"), opened=False
    )
    assert python(code, control.environment) == str(expected)
    assert control.hits == (6 if order["mode"] == "slow" else sum(word != "ok" for word in expected))
    control.close()


def test_the_clock_of_the_day_jumps_and_the_other_does_not(library: Path, tmp_path: Path) -> None:
    control = preload.Control(tmp_path, library)
    control.move_clock(-86_400.0)
    code = "import time; print(time.time(), time.monotonic())"
    day, monotonic = map(float, python(code, control.environment).split())
    assert -90_000 < day - time.time() < -80_000
    assert abs(monotonic - time.monotonic()) < HANG_S
    control.close()


def test_a_disk_that_nobody_writes_to_is_not_disturbed(library: Path, tmp_path: Path) -> None:
    control = preload.Control(tmp_path, library)
    assert trial._met_nothing(FAULTS["disk_full"], control) and not trial._met_nothing(FAULTS["clock_jump"], control)
    control.disk("full", [tmp_path], errno.ENOSPC)
    python(f"import os\ntry: os.mkdir({str(tmp_path / 'made')!r})\nexcept OSError: pass", control.environment)
    assert not trial._met_nothing(FAULTS["disk_full"], control)
    control.close()


def test_a_network_is_cut_and_joined(tmp_path: Path) -> None:
    if why := network.refused():
        pytest.skip(why)
    code = (
        "import socket, sys\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "for line in iter(sys.stdin.readline, ''): pass\n"
    )
    command = Command([], tmp_path / "log", {}, network=True, program=["-c", code])
    try:
        assert command.watch(lambda: False, HANG_S) and command.code == 0, (tmp_path / "log").read_text()
        assert command.left_behind()[1] == []
    finally:
        command.end()
    probe = (
        "import os, socket; from dtf.jobs.chaos.network import enter_namespace, switch_loopback\n"
        "def reach():\n"
        "    with socket.socket() as one:\n"
        "        one.settimeout(0.2)\n"
        "        try:\n"
        "            one.connect(('127.0.0.1', 9)); return 'up'\n"
        "        except ConnectionRefusedError: return 'up'\n"
        "        except OSError: return 'down'\n"
        "enter_namespace(); states = [reach()]\n"
        "switch_loopback(False); states.append(reach()); switch_loopback(True); print(*states, reach())"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.split() == ["up", "down", "up"], done.stderr
