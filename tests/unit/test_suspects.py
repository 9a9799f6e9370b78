"""Checkpoints that may hold wrong numbers are set aside, all or none, whatever is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dtf.checkpoint import storage
from dtf.checkpoint.suspects import finish_set_aside, forget_suspects, set_aside, suspects_after
from tests.support.checkpoints import small_checkpoint


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(4))
def test_a_kill_while_checkpoints_are_set_aside_is_made_good(tmp_path: Path, at: int) -> None:
    for step in (1, 2, 3):
        small_checkpoint(tmp_path, step)
    renames = 0

    def rename(*paths: Any) -> None:
        nonlocal renames
        if renames == at:
            raise Killed
        renames += 1
        real(*paths)

    real = os.rename
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "rename", rename)
        set_aside(tmp_path, 1, "one", mirrored=True)
        raise Killed  # it was done before
    finish_set_aside(tmp_path, "one", mirrored=True)
    assert [path.name for path in storage.checkpoints(tmp_path)] == ["step_000001"]
    small_checkpoint(tmp_path, 2)
    finish_set_aside(tmp_path, "two", mirrored=True)
    assert [path.name for path in storage.checkpoints(tmp_path)] == ["step_000002", "step_000001"]
    assert suspects_after(tmp_path) == 1
    forget_suspects(tmp_path)
    assert suspects_after(tmp_path) is None
