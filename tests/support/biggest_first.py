"""A rule for who holds what, as docs/pserver.md shows one. A plugin: `plugins=[tests.support.biggest_first]`."""

from __future__ import annotations

from collections.abc import Mapping

from dtf.pserver.placement import placing


@placing("biggest_first")
def biggest_first(sizes: Mapping[str, list[int]], servers: int) -> dict[str, list[int]]:
    """The biggest parameter first, each slice to the server that has least and none of this parameter."""
    held = [0] * servers
    found: dict[str, list[int]] = {name: [] for name in sizes}
    for name in sorted(sizes, key=lambda name: -sum(sizes[name])):
        for elements in sizes[name]:
            server = min((each for each in range(servers) if each not in found[name]), key=lambda each: held[each])
            found[name].append(server)
            held[server] += elements
    return found
