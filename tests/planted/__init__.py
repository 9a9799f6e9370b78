"""Faults that tests must find: each is planted into a copy of the checkout, where the tests named for it have to fail.

`python -m tests.planted` plants them all and takes some minutes; see `__main__`.
"""

from tests.planted import adapters, axes, clouds, clusters, data, heads, meshes, models, numbers, pserver, runs, state

FAULTS = [
    *data.FAULTS,
    *heads.FAULTS,
    *meshes.FAULTS,
    *axes.FAULTS,
    *models.FAULTS,
    *numbers.FAULTS,
    *state.FAULTS,
    *pserver.FAULTS,
    *runs.FAULTS,
    *adapters.FAULTS,
    *clouds.FAULTS,
    *clusters.FAULTS,
]
