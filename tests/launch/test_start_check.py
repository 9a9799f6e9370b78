"""The check at the start is made once, and never by a run that goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dtf.core.errors import Exit
from tests.support.counting_passes import PASSES

CACHE = Path("dtf", "start_checks")


class Counted:
    """Runs of one model, each with its number of forward passes that learn, over all ranks."""

    def __init__(self, run_dtf, folder: Path) -> None:
        self._run, self._passes = run_dtf, folder / PASSES
        self._options = [
            "plugins=[tests.support.counting_passes]",
            "recipe=counting",
            f"recipe.folder={folder}",
            "step.batch_size=16",
            "train.eval_every=0",
            "launcher.devices=cpu",
            "launcher.processes=2",
            "observer=[]",
        ]

    def __call__(self, *options: str, folder: Path | None = None) -> tuple[int, Path]:
        self._passes.write_text("")
        done = self._run(*self._options, *options, folder=folder)
        assert done.code == Exit.OK, done.err
        return len(self._passes.read_text().splitlines()), done.folder


@pytest.fixture
def counted(run_dtf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "counts"
    folder.mkdir()
    return Counted(run_dtf, folder)


CHECK = 2 * 5
"""Passes of the check on two ranks: A, B, A, A as padding, and A with a larger loss."""


def test_a_later_run_of_the_same_makes_no_check(counted: Counted, tmp_path: Path) -> None:
    first, folder = counted("train.steps=1")
    records = [*(tmp_path / "cache" / CACHE).iterdir()]
    assert len(records) == 1 and (folder / "start_check.json").is_file()
    assert counted("train.steps=1", "seed=1", "lr.peak=0.01")[0] == first - CHECK
    assert counted("train.steps=1", "step.clip_norm=1")[0] == first  # the model might clip what it draws from
    text = records[0].read_text()
    records[0].write_text(text.replace('"clipped": ""', '"clipped": "x"'))  # the sum over it is wrong now
    assert counted("train.steps=1", "seed=1")[0] == first


@pytest.mark.slow
def test_a_run_that_goes_on_makes_no_check(counted: Counted, tmp_path: Path) -> None:
    """Its record lies in its folder: another machine, without the user's cache, knows of it."""
    first, folder = counted("train.steps=1")
    shutil.rmtree(tmp_path / "cache")
    assert counted("train.steps=2", folder=folder)[0] == first - CHECK  # one step too
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    elsewhere, other = counted("train.steps=3", f"checkpoint.resume={folder}")
    assert elsewhere == first - CHECK
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert counted("train.steps=4", folder=other)[0] == first - CHECK  # what a resumed run found is handed on


@pytest.mark.slow
def test_a_restart_makes_no_check(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/no folder")
    options = ["train.steps=3", "checkpoint.every_steps=1", "train.log_every=1"]
    calm, _ = counted(*options)
    kill = ["plugins=[tests.support.counting_passes,tests.support.kill_once]", "observer=[kill_once]"]
    killed, folder = counted(*options, *kill, "observer.kill_once.step=2")
    assert "---- attempt 1" in (folder / "rank_0.log").read_text()
    start = calm - 2 * 3 - CHECK  # passes of a start without the check
    assert calm + start <= killed <= calm + start + 2 * 3  # steps since the last save are repeated
