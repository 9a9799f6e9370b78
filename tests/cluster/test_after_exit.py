"""Every scheduler does the same after the same end of a job: `after_exit.py`, what is made of it, and what docs say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dtf.cluster.after_exit import ALWAYS, FINAL, MOST, WHILE_PROGRESS, After, after, goes_on, newest_checkpoint
from dtf.cluster.kubernetes_objects import objects_of
from dtf.cluster.ray_ends import verdict
from dtf.cluster.slurm_script import JobText
from dtf.core.errors import STARTED_AGAIN, Exit
from tests.support.kubebox_controllers import _matching
from tests.support.kubernetes_requests import platform, request

DOCS = Path(__file__).parents[2] / "docs"
CODES = range(256)


def test_which_ends_are_followed_by_another_start() -> None:
    """Asked to stop: always. Failures that may pass, and losses: while there are new checkpoints. All else: never."""
    for code in (75, 143):
        assert goes_on(code, False, 2) == (True, 2) and goes_on(code, True, 2) == (True, 0)
    for code in (69, 71, 73, 74, 134, 137, 139, 255, 3, None):
        assert [goes_on(code, False, lost) for lost in (0, 1, 2)] == [(True, 1), (True, 2), (False, 3)]
        assert goes_on(code, True, 2) == (True, 1)
    for code in (0, 1, 2, 65, 77, 79, 80, 93, 126, 127):
        assert not goes_on(code, True, 0)[0]


def test_each_exit_code_of_dtf_is_decided() -> None:
    assert sorted(code for code in (*ALWAYS, *WHILE_PROGRESS) if code != 143) == sorted(STARTED_AGAIN)
    assert {code for code in Exit if after(code) is After.failed} == set(Exit) - {Exit.OK, *STARTED_AGAIN}


def _by_slurm(tmp_path: Path, codes: str, may_go_on: str = "") -> list[str]:
    """What the functions of the batch script say to each code, in one shell."""
    text = JobText(
        options=[[]], steps=[[]], tasks=1, roles=[], comment="dtf 5b0d",
        job_folder=str(tmp_path), run_dirs=["/x"], setup=[], command=["x"]
    ).job()  # fmt: skip
    functions = re.findall(r"^(?:judge|may_go_on|newest)\(\) \{.*?^\}", text, re.MULTILINE | re.DOTALL)
    assert len(functions) == 3
    ask = f'for code in {codes}; do\necho "$code" >"$attempt/code.0"; step_code=$code; judge; echo "$verdict"; done'
    program = "\n".join(
        [f"attempt={tmp_path} folder={tmp_path} run={tmp_path} tasks=1 id=7 part=", *functions, may_go_on or ask]
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_all_schedulers_decide_alike(tmp_path: Path) -> None:
    table = [after(code) for code in CODES]
    words = {"done": After.done, "stopped": After.again, "lost": After.lost, "failed": After.failed}
    assert [words[word] for word in _by_slurm(tmp_path, f"{{0..{CODES[-1]}}}")] == table

    lost_by_ray = [None if what is After.lost and code not in WHILE_PROGRESS else code for code, what in
                   enumerate(table)]  # fmt: skip
    assert [verdict([code], 1) for code in CODES] == lost_by_ray

    # on Kubernetes dtf itself counts losses: pods that are not counted there, and others up to a limit that is higher
    (job,) = (
        one for one in objects_of(platform("job"), request(nodes=1, roles={"trainer": 1})) if one["kind"] == "Job"
    )
    rules, limit = job["spec"]["podFailurePolicy"]["rules"], job["spec"]["backoffLimit"]
    assert limit > MOST
    for code, what in list(enumerate(table))[1:]:
        status = {"containerStatuses": [{"state": {"terminated": {"exitCode": code}}}]}
        said = {"FailJob": {After.failed}, "Ignore": {After.again, After.lost}, "Count": {After.lost}}
        assert what in said[_matching(rules, {"status": status})[1]], code


def test_slurm_counts_losses_alike(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000010").mkdir(parents=True)
    told = _by_slurm(
        tmp_path, "", "for at in {1..4}; do may_go_on && echo on || echo over; done; id=8; may_go_on && echo on"
    )
    expected = [goes_on(None, False, lost)[0] for lost in range(4)]
    assert told == [*("on" if again else "over" for again in expected), "on"]


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) == 0
    for name in ("step_999000", "step_1000000", "step_2000000.new", ".step_3000000"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 1_000_000


def test_the_pages_say_so() -> None:
    """`docs/clusters.md` in its table, `docs/exit-codes.md` in its column "again", and the pages of the schedulers."""
    rows = re.findall(r"^\| (\d[^|]*) \| ([^|]+) \|$", (DOCS / "clusters.md").read_text(), re.MULTILINE)
    said = {int(code): what for codes, what in rows for code in re.findall(r"\d+", codes)}
    for codes, word in (((0,), "is done"), (ALWAYS, "however often"), (WHILE_PROGRESS, "third"), (FINAL, "does not")):
        assert {code for code, what in said.items() if word in what} >= set(codes)
    assert all("third" in said[code] for code in (134, 137, 139))
    column = re.findall(r"^\| (\d+) \|.*\| (\w+)[^|]* \|$", (DOCS / "exit-codes.md").read_text(), re.MULTILINE)
    again = {int(code) for code, word in column if word in ("yes", "later")}
    assert again == {code for code in Exit if after(code) in (After.again, After.lost)}
    assert "69, 71, 73 and 74" in (DOCS / "clusters" / "sagemaker.md").read_text()
    final = ", ".join(map(str, FINAL))
    assert f"| exit {final} |" in (DOCS / "clusters" / "kubernetes.md").read_text()


@pytest.mark.parametrize("code", WHILE_PROGRESS)
def test_a_loss_that_dtf_tells_decides_over_a_stop(code: int) -> None:
    assert verdict([75, code], 2) == code
