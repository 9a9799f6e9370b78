"""Which scheduler started this process, and what it says of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtf.cluster.allocation import Allocation, from_manifest
from dtf.cluster.sagemaker_allocation import from_sagemaker
from dtf.cluster.slurm_allocation import from_slurm

_SCHEDULERS: tuple[Callable[[Mapping[str, str]], Allocation | None], ...] = (from_manifest, from_sagemaker, from_slurm)
"""Each returns None where it does not know this environment; the first that does counts."""


def allocation_of(environment: Mapping[str, str]) -> Allocation:
    """Of this process. One node alone where no scheduler says anything.

    ConfigError that names the variable which is missing or makes no sense.
    """
    for known in _SCHEDULERS:
        allocation = known(environment)
        if allocation is not None:
            return allocation
    return Allocation(scheduled=False)
