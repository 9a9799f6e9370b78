"""The preload library that lets calls of the C library fail, wait, or tell another time: its making and its control."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("preload.c")
_LAYOUT = struct.Struct("iiqqqqq4096s4096s")  # struct control in preload.c
_MODES = {"off": 0, "full": 1, "fail": 2, "slow": 3}
_CLOCK_AT, _HITS_AT = 32, 40

ALL = 1 << 62
"""Failures without end."""


def compiler() -> str | None:
    """The C compiler of this machine."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """Compile the library into `folder`. OSError with what the compiler says."""
    library = folder / "preload.so"
    if not library.exists():
        command = [compiler() or "cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
    return library


class Control:
    """What the library does in all processes of a trial from now on. They share its memory, a file in `folder`."""

    def __init__(self, folder: Path, library: Path) -> None:
        path = folder / "control"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _LAYOUT.size)
        self._memory = mmap.mmap(descriptor, _LAYOUT.size)
        os.close(descriptor)
        before = os.environ.get("LD_PRELOAD", "")
        self.environment = {
            "DTF_CHAOS_CONTROL": str(path),
            "LD_PRELOAD": f"{library} {before}".strip(),
        }

    def disk(
        self,
        mode: str,
        prefixes: Sequence[Path],
        error: int = 0,
        after: int = 0,
        failures: int = ALL,
        delay_s: float = 0.0,
    ) -> None:
        """Disturb what is written below `prefixes`, two folders at most.

        `mode`: `full` lets calls that need room fail; `fail` lets `after` calls pass and then so many `failures` fail;
        `slow` delays each call; `off`. `error`: the errno.
        """
        self._memory[0:4] = struct.pack("i", _MODES["off"])
        clock = self._memory[_CLOCK_AT:_HITS_AT]
        names = [os.fsencode(prefix) for prefix in prefixes] + [b""] * (2 - len(prefixes))
        packed = _LAYOUT.pack(_MODES["off"], error, after, failures, int(delay_s * 1e6), 0, self.hits, *names)
        self._memory[4:_CLOCK_AT] = packed[4:_CLOCK_AT]
        self._memory[_CLOCK_AT:_HITS_AT] = clock
        self._memory[_HITS_AT + 8 :] = packed[_HITS_AT + 8 :]
        self._memory[0:4] = struct.pack("i", _MODES[mode])  # last: what it goes by is there

    def move_clock(self, seconds: float) -> None:
        """Set the clock of the day forward, or back."""
        self._memory[_CLOCK_AT:_HITS_AT] = struct.pack("q", int(seconds * 1e9))

    @property
    def hits(self) -> int:
        """How many calls failed or waited so far."""
        return struct.unpack("q", self._memory[_HITS_AT : _HITS_AT + 8])[0]

    def close(self) -> None:
        self._memory.close()
