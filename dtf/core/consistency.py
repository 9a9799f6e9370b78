"""What the ranks of a run must have in common, and an error that names those which differ.

How values travel between ranks is the business of the launchers.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from dtf.core.errors import ConfigError, DtfError, PeerError
from dtf.core.own_code import CODE
from dtf.core.redaction import redact, stars_and_digest

_LOCAL = ("launcher", "root")
"""Keys that may differ between hosts: how ranks are started there, and where the data lies."""
_OWN = {"run": ("dir", "name")}
_FIRST = ("observer", "budget", "sweep")
"""Keys and groups that may differ between commands which each start one process of a run: what only the first one does.
"""


def shared_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that must be the same on all ranks."""
    return {
        key: shared_keys(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _LOCAL
    }


def keys_of_all_commands(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that must be the same in commands which each start one process of a run."""
    return {
        group: {key: value for key, value in node.items() if key not in _OWN.get(group, ())}
        if isinstance(node, dict)
        else node
        for group, node in shared_keys(config).items()
        if group not in _FIRST
    }


def config_facts(config: dict[str, Any]) -> dict[str, Any]:
    """`keys_of_all_commands` with digests in the place of secrets, which differ where these do."""
    return redact(keys_of_all_commands(config), stand_in=stars_and_digest)


def digest(config: dict[str, Any]) -> str:
    """A short text that differs when `shared_keys` does."""
    return hashlib.sha256(json.dumps(shared_keys(config), sort_keys=True).encode()).hexdigest()[:16]


def differences(expected: Any, actual: Any, first: str, key: str = "") -> Iterator[str]:
    """`key=actual, <first> has expected` for every leaf in which two trees of JSON differ. `first`: the name of the
    rank that has `expected`. Secrets are compared and not shown. Of `own_code`, files that both have are compared.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        names = expected.keys() & actual.keys() if key == CODE else expected.keys() | actual.keys()
        for name in sorted(names):
            inner = f"{key}.{name}" if key else name
            yield from differences(expected.get(name), actual.get(name), first, inner)
    elif expected != actual:
        had, has = (json.dumps(redact(value, key)) for value in (expected, actual))
        yield f"{key.removeprefix('config.')}={has}, {first} has {had if had != has else 'another'}"


def refusal(who: str, first: str, how: str) -> ConfigError:
    """The ConfigError for `who`, which differs from `first`. `how`: the differences."""
    return ConfigError(
        f"{who} differs from {first}: {how}; give all the same command line, the same installation and the same data"
    )


def describe_differences(trees: Mapping[str, Any]) -> str:
    """How trees of JSON differ from the first one, as one text. Keys are the names of the ranks that have them, in
    order.

    Empty when all are the same.
    """
    (first, expected), *others = trees.items()
    wrong = {who: "; ".join(differences(expected, tree, first)) for who, tree in others}
    named = [f"{who}: {how}" for who, how in wrong.items() if how]
    if not named:
        return ""
    more = f" (and {len(named) - 3} more)" if len(named) > 3 else ""
    return (
        f"ranks differ: {' | '.join(named[:3])}{more}; give all the same command line, the same installation and "
        "the same data"
    )


class Peers(Protocol):
    """Some ranks by their collective operations. See `dtf.World`, which has them."""

    def gather(self, value: Any) -> list[Any] | None: ...
    def broadcast(self, value: Any) -> Any: ...


def check_consistent(peers: Peers, facts: dict[str, Any]) -> None:
    """Raise ConfigError on all ranks, with the names and hosts of those that differ, unless all have the same `facts`
    (JSON).

    Collective.
    """
    gathered = peers.gather([socket.gethostname(), facts])
    wrong = peers.broadcast(
        describe_differences({f"rank {rank} on {host}": tree for rank, (host, tree) in enumerate(gathered)})
        if gathered
        else ""
    )
    if wrong:
        raise ConfigError(wrong)


def error_to_json(error: DtfError) -> dict[str, Any]:
    """A failure before the run began, as JSON for the other processes."""
    return {"exit": int(error.exit), "message": str(error)}


def error_from_json(answer: dict[str, Any]) -> DtfError:
    """The inverse of `error_to_json`."""
    classes = {int(cls.exit): cls for cls in DtfError.__subclasses__()}
    return classes.get(answer.get("exit", 0), PeerError)(
        answer.get("message", "the first rank failed before the run began")
    )
