"""A save that is killed, or refused by the disk, at any system call: the newest complete checkpoint loads, nothing
blocks the next start.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtf.checkpoint import storage
from tests.unit.test_storage import good, save

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "link", "unlink", "rmdir")


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of folders are written here and none has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Killed(BaseException):
    """The process is gone: no handler of expected errors may see this."""


class Faults:
    """Counts the calls that change the disk; from call `at` on, nothing happens any more, or just that one fails with
    `error`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: int | None = None, torn: bool = False) -> None:
        self.count, self.log = 0, []
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name), at, error, torn))

    def _wrap(self, name: str, real: Callable[..., Any], at: int, error: int | None, torn: bool) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if name == "open" and not args[1] & (os.O_CREAT | os.O_DIRECTORY):
                return real(*args, **keywords)
            self.count += 1
            self.log.append((name, args))
            if self.count == at or (error is None and self.count > at):
                if torn and name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                raise Killed if error is None else OSError(error, os.strerror(error))
            return real(*args, **keywords)

        return call


def counted(work: Callable[[], Any]) -> list[tuple[str, tuple]]:
    """Calls that change the disk while `work` runs."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, at=0, error=0)
        work()
    return faults.log


def prepared(folder: Path) -> Path:
    """Checkpoints 1 to 3 (best: 1), so that the save of 4 also removes one."""
    for step, value in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(folder, step, value)
    return folder


BASES = [None, 2]
"""The step whose file the save of 4 takes over: 2 is removed then."""


@pytest.mark.parametrize("base", BASES)
def test_a_kill_at_any_system_call_leaves_a_loadable_checkpoint(tmp_path: Path, base: int | None) -> None:
    start = prepared(tmp_path / "start")
    trial = shutil.copytree(start, tmp_path / "count")
    total = len(counted(lambda: save(trial, 4, 0.3, base=base)))
    assert total > 20
    newest = set()
    for torn in (False, True):
        for at in range(1, total + 1):
            folder = shutil.copytree(start, tmp_path / f"{at}{torn}")
            with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
                Faults(patch, at, torn=torn)
                save(folder, 4, 0.3, base=base)
            found = good(folder)
            assert found[0] in (3, 4) and 3 in found and 1 in found, (at, found)
            newest.add(found[0])
            storage.clean(folder)  # the next start
            assert not list(folder.glob("*.tmp-*")) and not list(folder.glob(".trash-*"))
            again = save(folder, 4, 0.3, run="run-2")  # it reaches the same step again
            assert (again is None) == (found[0] == 4)
            assert save(folder, 5, 0.4, run="run-2") is not None
            assert good(folder) == [5, 4, 1], at
            assert (folder / "latest").read_text() == "step_000005\n"
            shutil.rmtree(folder)
    assert newest == {3, 4}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EXDEV, errno.EDQUOT])
def test_an_error_at_any_system_call_is_raised_and_loses_nothing(tmp_path: Path, error: int, base: int | None) -> None:
    start = prepared(tmp_path / "start")
    trial = shutil.copytree(start, tmp_path / "count")
    calls = counted(lambda: save(trial, 4, 0.3, base=base))
    for at, (name, _) in enumerate(calls, 1):
        if name == "link" and error == errno.EXDEV:  # then it is copied
            continue
        folder = shutil.copytree(start, tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError) as caught:
            Faults(patch, at, error, torn=True)
            save(folder, 4, 0.3, base=base)
        assert caught.value.errno == error
        assert 3 in good(folder) and 1 in good(folder)
        storage.clean(folder)
        save(folder, 5, 0.4)
        assert good(folder)[0] == 5
        shutil.rmtree(folder)


def test_nothing_is_renamed_before_it_is_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    opened: dict[int, str] = {}
    steps: list[str] = []
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename

    def seen_open(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        file = real_open(path, flags, *rest, **keywords)
        opened[file] = Path(path).name
        if flags & os.O_CREAT:
            steps.append(f"new {Path(path).name}")
        return file

    def seen_fsync(file: int) -> None:
        steps.append(f"sync {opened[file]}")
        real_fsync(file)

    def seen_rename(source: Any, target: Any) -> None:
        steps.append(f"rename {Path(target).name}")
        real_rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", seen_open)
        patch.setattr(os, "fsync", seen_fsync)
        patch.setattr(os, "rename", seen_rename)
        save(tmp_path / "c", 1)
    interesting = [step for step in steps if re.match("new|sync|rename", step) and "latest" not in step]
    draft = "step_000001.tmp-run-1"
    assert interesting == [
        *("new a.bin", "sync a.bin", "new b.bin", "sync b.bin", "new manifest.json", "sync manifest.json"),
        *(f"sync {draft}", "rename step_000001", "sync c", "sync c"),
    ]


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.test_storage import save
print("ready", flush=True)
save(Path(sys.argv[1]), 4, 0.3)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("call", ["mkdir", "write", "fsync", "rename", "openat", "unlinkat", "close"])
def test_sigkill_at_every_real_system_call(tmp_path: Path, call: str) -> None:
    """As above with a real process and a real signal: every occurrence of `call` that touches the folder."""
    start = prepared(tmp_path / "start")
    root = str(Path(__file__).parents[2])

    def child(folder: Path, *strace: str) -> subprocess.CompletedProcess[str]:
        command = [
            "strace",
            "-f",
            "-o",
            str(folder.parent / "trace"),
            "-P",
            str(folder),
            *strace,
            sys.executable,
            "-B",
            "-c",
            CHILD,
            str(folder),
            root,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    paths = [
        f"{{f}}/{name}"
        for name in (
            "step_000004.tmp-run-1",
            "step_000004",
            "latest.tmp-run-1",
            "latest",
            "step_000002",
            ".trash-step_000002-run-1",
        )
    ]
    paths += [f"{paths[0]}/{name}" for name in ("a.bin", "b.bin", "manifest.json")]
    kills = 0
    for at in range(1, 60):
        folder = shutil.copytree(start, tmp_path / f"{call}{at}")
        watched = [flag for path in paths for flag in ("-P", path.format(f=folder))]
        ended = child(folder, *watched, "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={at}")
        found = good(folder)
        assert found[0] in (3, 4) and 1 in found, (call, at, found, ended.stderr)
        storage.clean(folder)
        save(folder, 4, 0.3, run="run-2")
        save(folder, 5, 0.4, run="run-2")
        assert good(folder) == [5, 4, 1], (call, at)
        if ended.returncode == 0:
            break
        assert ended.returncode in (137, -9), ended.stderr
        kills += 1
        shutil.rmtree(folder)
    else:
        pytest.fail(f"{call}: still killed after {kills} calls")
    assert kills, call
