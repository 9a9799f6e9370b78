"""What trainers and servers say to each other: the messages, by name, as `dtf.pserver.net.codec` carries them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtf.api.recipe import Recipe
from dtf.core.types import Train
from dtf.pserver.net.codec import Array, Message, Schema, WireError
from dtf.pserver.server.leases import Lease

HELLO, LEASE, EXCHANGE, REPORT = "hello", "lease", "exchange", "report"
"""Methods: a trainer joins (server 0); it asks for work and says what is done (server 0); gradients go and parameters
come (each server); what an evaluation batch gave (server 0)."""

MEET, STATUS = "meet", "status"
"""Methods that no attempt of the run has to be known for: where its processes meet (server 0); how it is (each server).
"""

LOOK, GIVE, COUNT, LOAD, SAVE, END = "look", "give", "count", "load", "save", "end"
"""Methods of servers of rows alone, see `row_server.RowServer`: rows are looked up; gradients come; how many rows there are;
they are read from a checkpoint, and written into one; the run is over."""

GO_ON, OVER = 0, 1
"""What a reply to LEASE says of the run."""

ANY, NONE = -1, -2
"""In the place of a step or a stamp in a pull: whatever is there; and for a stamp, that no blocks are wanted."""

NO, READY, LATE = 0, 1, 2
"""What a reply to EXCHANGE says of what was pulled: it is not there yet, ask again; it is; others have done this work.
"""

REAL = ("f32", "f64")
ROWS = Array(2, (*REAL, "f16", "bf16"))  # as they are kept, or narrower: see strategy.wire
BYTES, NUMBERS, SUMS = Array(1, ("u8",)), Array(1, ("i64",)), Array(1, ("f64",))


def hello_schemas() -> tuple[Schema, Schema]:
    """Request and reply of HELLO. `starter`: of the trainer, the same as long as its launcher starts it again; `facts`:
    JSON text of what all processes must have alike; `refusal`: why this one cannot take part, or nothing; `taken`: as
    another one of its number lives."""
    return Schema({"trainer": int, "starter": str}, {"facts": BYTES}), Schema(
        {"ready": int, "taken": int}, {"refusal": BYTES}
    )


def facts_of(message: Message) -> Any:
    """The JSON under `facts`. WireError when it is none."""
    try:
        return json.loads(message.arrays["facts"].tobytes())
    except (ValueError, RecursionError):
        raise WireError("facts are no JSON") from None


def meet_schemas() -> tuple[Schema, Schema]:
    """Of MEET.

    `server`: who asks, -1 for a trainer; `born`: a number of this process; `told`: JSON, see `meeting.RendezvousInfo`, worth
    something once `complete`.
    """
    return Schema({"server": int, "born": int, "servers": int}, {"facts": BYTES}), Schema(
        {"complete": int}, {"told": BYTES}
    )


def status_schemas() -> tuple[Schema, Schema]:
    """Of STATUS. `status`: JSON, see `status.snapshot`."""
    return Schema({}, {}), Schema({}, {"status": BYTES})


def lease_schemas() -> tuple[Schema, Schema]:
    """Of LEASE. `leaving`: the trainer ends; `reason`: why the run has.

    `done` and `has` (n, 3): keys of finished work, and of what the trainer has; `numbers` (t, 8) and `rates` (t,):
    tickets of leases, see `pack_leases`.
    """
    keys = Array(2, ("i64",))
    request = Schema(
        {"trainer": int, "starter": str, "most": int, "wait_s": float, "stopping": int, "leaving": int},
        {"done": keys, "has": keys},
    )
    return request, Schema({"state": int, "known": int, "reason": str}, {"numbers": Array(2, ("i64",)), "rates": SUMS})


def exchange_schemas(recipe: Recipe) -> tuple[Schema, Schema]:
    """Of EXCHANGE: gradients of one lease, if `push`, and what is wanted for another, if `pull`.

    Per table: `ids/<name>` (U,) and `gradients/<name>` (U, width), summed by id, each id once; `want/<name>` (V,) and,
    in the reply, `rows/<name>` (V, width). `dense`: learning blocks as `blocks.views` lays them out; `frozen`: the
    others, then server 0's buffers. To server 0: `sums` (M,), `statistics` (tickets x F, see `Push`), `rows`: sample
    ids. Where trainers learn by themselves (`SyncMode.local`) the same names stand for differences of blocks with their
    optimizer state, see `blocks.state_fields`, and of rows with theirs; `train` asks for these.
    """
    names = recipe.tables()
    numbers = (
        "push",
        "step",
        "part",
        "unread",
        "epoch",
        "finite",
        "skipped",
        "seen",
        "pull",
        "of_step",
        "of_part",
        "at",
        "after",
        "train",
        "known",
        "frozen",
    )
    request = Schema(
        {"trainer": int, **dict.fromkeys(numbers, int), "norm": float, "wait_s": float},
        {"dense": BYTES, "sums": SUMS, "statistics": Array(1, REAL), "rows": NUMBERS}
        | {f"ids/{name}": NUMBERS for name in names}
        | {f"gradients/{name}": ROWS for name in names}
        | {f"want/{name}": NUMBERS for name in names},
    )
    reply = Schema(
        {"pulled": int, "stamp": int, "applied": int, "scale": float},
        {"dense": BYTES, "frozen": BYTES} | {f"rows/{name}": ROWS for name in names},
    )
    return request, reply


def report_schemas() -> tuple[Schema, Schema]:
    """Of REPORT: an evaluation batch's `sums` (M,) and, where the recipe judges rows, `eval_outputs` (R, K)."""
    return Schema(
        {"trainer": int, "step": int, "part": int, "unread": int}, {"sums": SUMS, "judged": Array(2, REAL)}
    ), Schema({}, {})


def rows_schemas(recipe: Recipe) -> dict[str, tuple[Schema, Schema]]:
    """Request and reply of LOOK to END.

    `version`, `factor`, `lr`, `step`: the newest update, `version` 0 where there was none. Gradients are those of
    `rank` for `turn`, told or, if not `given`, told before; `whole`: whether all are there, with the `squares` (1,) of
    their sum and the `rows` of each table. `order`: key of a piece of work that is asked for until it is `done`;
    `path`, `error`, `told`: texts, the last one JSON.
    """
    names = recipe.tables()
    update = {"version": int, "factor": float, "lr": float, "step": int}
    rows = Schema({}, {"rows": NUMBERS})
    work = (
        Schema(update | {"order": int}, {"path": BYTES, "before": NUMBERS, "total": NUMBERS}),
        Schema({"done": int}, {"error": BYTES, "told": BYTES}),
    )
    gradients = {f"ids/{name}": NUMBERS for name in names} | {f"gradients/{name}": Array(2, REAL) for name in names}
    return {
        LOOK: (
            Schema(update | {"train": int}, {f"want/{name}": NUMBERS for name in names}),
            Schema({}, {f"rows/{name}": Array(2, REAL) for name in names}),
        ),
        GIVE: (
            Schema({"rank": int, "turn": int, "given": int}, gradients),
            Schema({"whole": int, "stopping": int}, {"squares": SUMS, "rows": NUMBERS}),
        ),
        COUNT: (Schema(update), rows),
        LOAD: work,
        SAVE: work,
        END: (Schema(), Schema()),
    }


def pack_leases(leases: Sequence[Lease]) -> dict[str, np.ndarray]:
    """Leases as the arrays of a reply to LEASE: a row for each ticket, those of one lease together."""
    rows = [(*lease[:4], t.step, t.epoch, t.index, t.rows) for lease in leases for t in lease.tickets]
    return {
        "numbers": np.array(rows, np.int64).reshape(-1, 8),
        "rates": np.array([t.lr for lease in leases for t in lease.tickets], np.float64),
    }


def unpack_leases(arrays: Mapping[str, np.ndarray]) -> list[Lease]:
    """Inverse of `pack_leases`."""
    found: dict[tuple[int, ...], list[Train]] = {}
    for row, lr in zip(arrays["numbers"].tolist(), arrays["rates"].tolist(), strict=True):
        found.setdefault(tuple(row[:4]), []).append(Train(*row[4:], lr=lr))
    return [Lease(*head, tickets=tuple(tickets)) for head, tickets in found.items()]
