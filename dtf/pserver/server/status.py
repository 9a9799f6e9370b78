"""The status of a server, for `job=status`: numbers of one moment, as JSON."""

from __future__ import annotations

from typing import Any

from dtf.pserver.leases import TRAIN
from dtf.pserver.server.program import ServerProgram


def snapshot(program: ServerProgram, server: int, servers: int) -> dict[str, Any]:
    """The status of one server; trainers and leases are known to server 0 alone.

    Changes nothing. Not collective; any thread may call it.
    """
    server_state, layout = program.server_state, program.server_state.layout
    with program.change:
        ledger = program.ledger
        held: dict[int, list[str]] = {trainer: [] for trainer in ledger.members()}
        for (kind, step, part), trainer in sorted(ledger.held()):
            held.setdefault(trainer, []).append(f"{'step' if kind == TRAIN else 'evaluation'} {step}, part {part}")
        values = {
            "server": server,
            "servers": servers,
            "state": "over" if program.over else "serving" if program.begun else "starting",
            "version": program.version,
            "updates": server_state.applied,
            "pushes": sum(server_state.staleness.values()),
            "dropped": program.dropped,
            "staleness": {str(lag): count for lag, count in sorted(server_state.staleness.copy().items())},
            "blocks": {
                "number": len(layout.learning) + len(layout.frozen),
                "bytes": layout.bytes + layout.frozen_bytes,
            },
            "tables": server_state.tables(),
        }
        if server == 0:
            values["trainers"] = [{"trainer": trainer, "holds": holds} for trainer, holds in sorted(held.items())]
            values["leases"] = {
                "opened": ledger.opened,
                "granted": ledger.granted,
                "finished": ledger.finished,
                "granted_again": ledger.regranted,
            }
    return values
