"""Has numba learn its types and functions when this module is imported, which the fork server does once. Else each rank
does so before its first compiled loop, with two hundred imports in half a second. Nothing else imports it.
"""

from __future__ import annotations

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()  # type: ignore[attr-defined]
cpu_target.target_context.refresh()  # type: ignore[attr-defined]
