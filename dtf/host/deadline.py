"""When the allocation of this process ends: the time limit that a scheduler has set. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dtf.core.errors import ConfigError

VARIABLE = "DTF_DEADLINE"
"""The environment variable that says it, in seconds since 1970. It holds for the launching process and its ranks."""
EARLY_S = 60.0
"""By how much a scheduler may be early with its notice of the time limit, as Slurm is: so says its manual."""
_EARLIEST, _LATEST = 1e9, 1e11
"""Of a number that is meant as seconds since 1970: neither a duration nor milliseconds."""


def deadline(environment: Mapping[str, str]) -> float:
    """When this process has to be gone, in seconds since 1970; infinite where nobody says so.

    ConfigError for a value that is no such time.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _EARLIEST <= seconds <= _LATEST:
        raise ConfigError(
            f"{VARIABLE}={text[:80]} must be the end of the allocation in seconds since 1970, as `date +%s` counts "
            "them; correct it, or unset it where there is no time limit"
        )
    return seconds
