"""What a server tells of itself to those who look: numbers of one moment, JSON. Changes nothing."""

from __future__ import annotations

from typing import Any

from dtf.pserver.server.leases import TRAIN
from dtf.pserver.server.program import Serving


def snapshot(serving: Serving, server: int, servers: int) -> dict[str, Any]:
    """Of one server; trainers and their work are known to server 0 alone. Not collective; any thread may call it."""
    holdings, layout = serving.holdings, serving.holdings.layout
    with serving.change:
        ledger = serving.ledger
        held: dict[int, list[str]] = {trainer: [] for trainer in ledger.members()}
        for (kind, step, part), trainer in sorted(ledger.held()):
            held.setdefault(trainer, []).append(f"{'step' if kind == TRAIN else 'evaluation'} {step}, part {part}")
        found = {
            "server": server,
            "servers": servers,
            "state": "over" if serving.over else "serving" if serving.begun else "starting",
            "version": serving.version,
            "updates": holdings.applied,
            "pushes": sum(holdings.staleness.values()),
            "dropped": serving.dropped,
            "staleness": {str(lag): count for lag, count in sorted(holdings.staleness.copy().items())},
            "blocks": {
                "number": len(layout.learning) + len(layout.frozen),
                "bytes": layout.bytes + layout.frozen_bytes,
            },
            "tables": holdings.tables(),
        }
        if server == 0:
            found["trainers"] = [{"trainer": trainer, "holds": holds} for trainer, holds in sorted(held.items())]
            found["leases"] = {
                "opened": ledger.opened,
                "granted": ledger.granted,
                "finished": ledger.finished,
                "granted_again": ledger.again,
            }
    return found
