"""A line of training, as a mirror remembers it: which launches wrote it, one after the other. Torch-free."""

from __future__ import annotations

from typing import Any, NamedTuple

_MOST = 500
"""Launches that are remembered."""


class Launch(NamedTuple):
    """A launch of a run, and the step that it went on from."""

    run_id: str
    start: int


class Line:
    """The launches of one line, the first one first."""

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches

    @classmethod
    def of(cls, owner: dict[str, Any]) -> Line:
        """The line in a `mirror.json`; an empty one where it has none."""
        found = owner.get("line")
        pairs = [one for one in found if isinstance(one, list) and len(one) == 2] if isinstance(found, list) else []
        return cls([Launch(str(run_id), start) for run_id, start in pairs if type(start) is int])

    def __bool__(self) -> bool:
        return bool(self._launches)

    def holds(self, run_id: str, step: int) -> bool:
        """Whether the line goes through the checkpoint of this step that this launch wrote."""
        at = next((at for at, launch in enumerate(self._launches) if launch.run_id == run_id), None)
        return at is not None and all(step <= later.start for later in self._launches[at + 1 :])

    def then(self, run_id: str, writer: str, step: int) -> Line:
        """The line with the launch `run_id`, which goes on from the checkpoint of this step that `writer` wrote."""
        known = {launch.run_id for launch in self._launches}
        new = [Launch(one, step) for one in dict.fromkeys((writer, run_id)) if one not in known]
        return Line([*self._launches, *new][-_MOST:])

    def plain(self) -> list[list[Any]]:
        """For JSON."""
        return [list(launch) for launch in self._launches]
