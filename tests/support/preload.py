"""What a rank of a test needs before its own first line, imported once by the fork server; in each rank it takes longer
than most tests.
"""

from __future__ import annotations

from contextlib import suppress

import pytest  # noqa: F401

import tests.support.harness  # noqa: F401

with suppress(ImportError):  # numba is needed by sparse tables alone
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()  # type: ignore[attr-defined]  # else at the first compiled loop of each rank, with two hundred imports
    cpu_target.target_context.refresh()  # type: ignore[attr-defined]
