"""docs/exit-codes.md and the enum say the same."""

from __future__ import annotations

import re
from pathlib import Path

from dtf.core import errors
from dtf.core.errors import DtfError, Exit, code_name


def test_every_exit_code_is_documented_and_none_else() -> None:
    text = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", text, re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [
        (exit.value, code_name(exit) if exit else "OK") for exit in Exit
    ]


def test_the_table_says_which_runs_may_be_started_again() -> None:
    text = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| (\w+)[^|]* \|$", text, re.MULTILINE)
    assert [int(number) for number, again in rows if again in ("yes", "later")] == list(errors.STARTED_AGAIN)


def test_every_expected_failure_has_a_code_of_its_own() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and DtfError in cls.__bases__]
    codes = [cls.exit for cls in classes]
    assert len(set(codes)) == len(codes)
    assert set(codes) == set(Exit) - {Exit.OK, Exit.BUG}
