"""Plant each fault into a copy of the checkout and run the tests named for it: `python -m tests.planted`.

A fault is found when one of its tests fails. A module that cannot be imported does not count. Without any fault all
named tests must pass. The whole default suite looks for what the named tests do not find. The exit code is 1 unless
the named tests find every fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.planted import FAULTS
from tests.planted.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
ALL_SLOW = pytest.ExitCode.NO_TESTS_COLLECTED
"""How tests end that do not run by default. They run by themselves, first without the fault."""

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "outputs", "shared", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"
)
TEST_S, SUITE_S = 240.0, 2400.0
"""The longest that the tests of one fault may take, and the whole suite."""

BROKEN = re.compile(
    r"^E .*\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError)\b", re.MULTILINE
)
"""Errors of code that does not run at all: such a change says nothing of the tests."""


class Outcome(NamedTuple):
    """Of one run of pytest."""

    code: int
    failed: tuple[str, ...]  # tests that failed
    broken: str  # why it says nothing; empty when it does
    seconds: float
    output: str


class Copy:
    """A copy of the checkout in which `dtf` and `tests` are those of the copy, in every process."""

    def __init__(self, folder: Path) -> None:
        self.root, self._folder, self._changes = folder / "checkout", folder, 0
        self._process: subprocess.Popen[str] | None = None
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=LEFT_OUT)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The copy with the fault in it. Each change gets a time of its own: nothing compiled before is used again."""
        path = self.root / fault.file
        text, stat = path.read_text(), path.stat()
        try:
            path.write_text(faulty(fault, text))
            self._changes += 1
            os.utime(path, (stat.st_atime, int(stat.st_mtime) + 10 * self._changes))
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def compiles(self, fault: Fault) -> bool:
        """Whether numba compiles the file."""
        return "@njit" in (self.root / fault.file).read_text()

    def test(self, tests: Sequence[str], timeout_s: float, first: bool = True, compile_anew: bool = False) -> Outcome:
        """Run tests; `first`: until one fails. `compile_anew`: use no compiled function of numba's cache."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
            command += ["-p", "tests.planted.guard", f"--junitxml={report}", f"--basetemp={folder}/tmp"]
            command += ["--hypothesis-seed=0"]  # found once, found always
            command += [*(["-x"] if first else []), *tests]
            environment = {**os.environ, "PYTHONPATH": str(self.root), "TMPDIR": folder}
            if compile_anew:  # numba knows when a file changed, not when one did that it took a function from
                environment["NUMBA_CACHE_DIR"] = f"{folder}/numba"
            start = time.monotonic()
            process = self._process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=timeout_s)
                late = ""
            except subprocess.TimeoutExpired:
                self.stop()
                output, _ = process.communicate()
                late = f"no end after {timeout_s:.0f} s"
            except BaseException:
                self.stop()
                raise
            failed, broken = read(report) if report.exists() else ((), "no report")
            return Outcome(process.returncode, failed, late or broken, time.monotonic() - start, output)

    def stop(self) -> None:
        """End the tests that run."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def read(report: Path) -> tuple[tuple[str, ...], str]:
    """From pytest's report: tests that failed, and why others say nothing."""
    failed, broken = [], ""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for found in case.findall("failure"):
            wrong = BROKEN.search(found.text or "")
            if wrong:
                broken = wrong[0][:200]
            else:
                failed.append(name)
        for found in case.findall("error"):
            broken = f"{name}: {(found.get('message') or '')[:200]}"
    return tuple(failed), broken


def faulty(fault: Fault, text: str) -> str:
    """The file with the fault. ValueError when the list is stale or the result no program."""
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.file} has {text.count(fault.old)} times what it should have once: {fault.old!r}"
        )
    found = text.replace(fault.old, fault.new)
    if fault.file.endswith(".py"):
        compile(found, fault.file, "exec", dont_inherit=True)
    return found


class Found(NamedTuple):
    """Which test found a fault, or why none did."""

    fault: Fault
    by: str  # empty: not found
    why: str
    seconds: float


def look(copy: Copy, fault: Fault) -> Found:
    """What the named tests say of a fault."""
    anew = copy.compiles(fault)
    with copy.planted(fault):
        done = copy.test(fault.tests, TEST_S, compile_anew=anew)
    if done.code == ALL_SLOW:
        slow = ["-m", "", *fault.tests]
        done = copy.test(slow, TEST_S, compile_anew=anew)
        if done.code:
            return Found(fault, "", f"its tests do not pass without it: {done.output[-300:]}", done.seconds)
        with copy.planted(fault):
            done = copy.test(slow, TEST_S, compile_anew=anew)
    by = done.failed[0] if done.failed else ""
    passed = "its tests pass" if done.code == 0 else f"exit code {done.code}: {done.output[-300:]}"
    why = "" if by else done.broken or passed
    print(f"  {'found' if by else 'NOT FOUND'}  {fault.name}, {done.seconds:.0f} s {why}", flush=True)
    return Found(fault, by, why, done.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="faults whose name holds this; may be repeated")
    parser.add_argument("--list", action="store_true", help="show the faults and their tests, plant none")
    parser.add_argument("--jobs", type=int, default=2, help="copies in which tests run at once")
    parser.add_argument("--no-suite", action="store_true", help="do not run the whole suite for what is not found")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if not given.only or any(part in fault.name for part in given.only)]
    if given.list:
        for fault in faults:
            print(f"{fault.name}  ({fault.file})", *fault.tests, sep="\n    ")
        return 0
    for fault in faults:
        faulty(fault, (ROOT / fault.file).read_text())
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="dtf-planted-") as folder:
        copies = [Copy(Path(folder, str(number))) for number in range(min(given.jobs, len(faults)))]
        return judge(faults, copies, start, suite=not given.no_suite)


def judge(faults: list[Fault], copies: list[Copy], start: float, suite: bool) -> int:
    """Run everything and print the table; returns the exit code. `suite`: see `by_all`."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def each(fault: Fault) -> Found:
        copy = free.get()
        try:
            return look(copy, fault)
        finally:
            free.put(copy)

    tests = sorted({"tests/planted/test_planted.py", *(test for fault in faults for test in fault.tests)})
    parts = [tests[number :: len(copies)] for number in range(len(copies))]
    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            plain = list(pool.map(lambda copy, part: copy.test(part, SUITE_S, first=False), copies, parts))
            wrong = [done for done in plain if done.code not in (0, ALL_SLOW)]
            if wrong:
                print(*(done.output for done in wrong), "the named tests do not pass without a fault", sep="\n")
                return 1
            print(f"without a fault all named tests pass ({time.monotonic() - start:.0f} s)", flush=True)
            found = list(pool.map(each, faults))
        except BaseException:  # told to stop: nothing is left behind
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise
    if suite:
        found = [one if one.by else by_all(copies[0], one) for one in found]
    width = max(len(fault.name) for fault in faults)
    print()
    for one in found:
        print(f"{one.fault.name:{width}}  {one.seconds:5.0f} s  {one.by or f'NOT FOUND: {one.why}'}")
    lost = sum(not one.by or one.why != "" for one in found)
    took = time.monotonic() - start
    print(f"{len(found) - lost} of {len(found)} planted faults are found by their tests, in {took:.0f} s")
    return int(bool(lost))


def by_all(copy: Copy, one: Found) -> Found:
    """What the whole default suite says of a fault that its tests do not find."""
    print(f"  the whole suite, for: {one.fault.name}", flush=True)
    with copy.planted(one.fault):
        done = copy.test(["tests", "--ignore=tests/planted"], SUITE_S, compile_anew=copy.compiles(one.fault))
    by = f"another test finds it: {done.failed[0]}" if done.failed else "nothing finds it"
    return one._replace(why=f"{by} ({one.why})")


if __name__ == "__main__":
    sys.exit(main())
