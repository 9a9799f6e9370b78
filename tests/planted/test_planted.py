"""The list of planted faults fits the code, and what tests import is the checkout they are in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dtf
from tests.planted import FAULTS
from tests.planted.__main__ import ROOT, faulty
from tests.planted.fault import Fault
from tests.planted.guard import elsewhere
from tests.support.ranks import ranks


def test_names_are_told_apart() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 120


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert faulty(fault, text) != text
    for test in fault.tests:
        file, _, name = test.partition("::")
        words = (ROOT / file).read_text()
        function = re.split(r"[\[:]", name)[0]
        assert not function or re.search(rf"^\s*(def|class) {function}\b|^{function} = ", words, re.MULTILINE), test


@pytest.mark.slow
def test_every_fault_is_found() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.planted"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ranks_and_commands_have_the_dtf_of_this_process() -> None:
    assert Path(str(dtf.__file__)).resolve() == ROOT / "dtf" / "__init__.py"
    assert {str(dtf.__file__), *ranks(2, "tests.planted.guard:in_a_rank")} == {str(dtf.__file__)}
    assert Path(elsewhere()).resolve() == ROOT / "dtf" / "__init__.py"
