"""A submission that was cut off, and who may read what it keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtf.api.registry import lookup
from dtf.cli.main import main
from dtf.cluster.platform import JobRequest, Platform, Unanswered
from dtf.config.compose import compose
from dtf.core.errors import Exit, PeerError
from dtf.runs.run_folder import take_lock
from tests.support.submission import HERE, SMALL

pytestmark = pytest.mark.usefixtures("elsewhere", "platform")


def test_a_submission_that_was_cut_off_is_made_again_as_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that is killed after the scheduler took its job, and before it recorded that."""
    requests: list[JobRequest] = []

    def take(outcome: BaseException | None) -> None:
        def submit(self: Platform, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
            requests.append(request)
            if outcome:
                raise outcome
            return {"job": "1", "pids": ""}

        monkeypatch.setattr(lookup("launcher", "here"), "submit", submit)

    words = [*SMALL, "run.dir=mine"]
    compose(HERE)
    take(KeyboardInterrupt())
    main(words)
    take(Unanswered("who knows"))
    assert main(words) == Exit.PEER
    capsys.readouterr()
    assert main([*words, "seed=7"]) == Exit.BUSY
    assert main(["plugins=[here_platform]", "job=cancel", "job.run_folder=mine"]) == Exit.BUSY
    assert capsys.readouterr().err.count(f"a job {requests[0].name} may wait or run") == 2
    take(None)
    assert main(words) == Exit.OK
    assert [request.again for request in requests] == [False, True, True]
    assert {(request.name, request.digest) for request in requests} == {(requests[0].name, requests[0].digest)}
    assert main(words) == Exit.OK and not requests[3].again
    assert requests[3].digest != requests[0].digest
    take(Unanswered("who knows"))  # of a run whose folder dtf has named
    assert main(SMALL) == Exit.PEER
    place = capsys.readouterr().err.partition("give the same command again with ")[2].partition(",")[0]
    assert place.startswith("run.dir=outputs/")
    take(None)
    assert main([*SMALL, place]) == Exit.OK and requests[-1].again
    take(PeerError("no such partition"))
    assert main(words) == Exit.PEER and main([*words, "seed=7"]) == Exit.PEER
    assert main([*SMALL, "run.name=other"]) == Exit.PEER and not Path("outputs/other").exists()
    made, lock = len(requests), take_lock(Path("mine"))  # of a run that a submission meets
    assert main(words) == Exit.BUSY and len(requests) == made
    os.close(lock)


def test_the_folders_of_a_submission_are_their_owners_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o022)
    try:
        compose(HERE)
        monkeypatch.setattr(lookup("launcher", "here"), "submit", lambda *_: {"job": "1", "pids": ""})
        assert main([*SMALL, "run.dir=new/mine"]) == Exit.OK
    finally:
        os.umask(before)
    assert [Path("new/mine", name).stat().st_mode & 0o777 for name in ("", "job")] == [0o700, 0o700]
    assert {path.stat().st_mode & 0o777 for path in Path("new/mine/job").iterdir()} == {0o600}
