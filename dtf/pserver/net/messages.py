"""The messages between trainers and servers: names of the methods, and the schemas of their requests and replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtf.api.recipe import Recipe
from dtf.core.types import Train
from dtf.pserver.leases import Lease
from dtf.pserver.net.codec import Array, Message, Schema, WireError

HELLO, LEASE, EXCHANGE, REPORT = "hello", "lease", "exchange", "report"
"""Methods of a run. `hello`, `lease` and `report` are of server 0: a trainer joins; it reports finished work and asks
for more; it reports the result of an evaluation batch. `exchange` is of every server: gradients are pushed and
parameters pulled.
"""

MEET, STATUS = "meet", "status"
"""Methods that a process may call before it knows the generation of the run: rendezvous (server 0), and the status of a
server (every server).
"""

LOOK, GIVE, COUNT, LOAD, COPY, SAVE, END = "look", "give", "count", "load", "copy", "save", "end"
"""Methods of servers of rows alone, see `rows_server.RowServer`: look up rows; push gradients; count rows; load rows
from a checkpoint; save them; end the run.
"""

GO_ON, OVER = 0, 1
"""`state` of a reply to LEASE: the run goes on, or is over."""

ANY, NONE = -1, -2
"""In the place of a step or a stamp in a pull. ANY: whatever the server has. NONE, for a stamp: no blocks are wanted.
"""

NO, READY, LATE = 0, 1, 2
"""`pulled` of a reply to EXCHANGE. NO: not there yet, ask again. READY: the reply has it. LATE: another trainer has
finished this work.
"""

REAL = ("f32", "f64")
ROWS = Array(2, (*REAL, "f16", "bf16"))  # as they are kept, or narrower: see strategy.wire
SEEN = Array(2, ("f32",))
BYTES, NUMBERS, SUMS = Array(1, ("u8",)), Array(1, ("i64",)), Array(1, ("f64",))


def hello_schemas() -> tuple[Schema, Schema]:
    """Request and reply of HELLO.

    `starter`: launch id of the trainer, the same as long as the same launcher restarts it. `facts`: JSON text of what
    all processes must have alike. `uneven`: JSON list of the normalisations that its passes do not call exactly once,
    see `BatchNormStatistics.release`. `start`: JSON of its `TrainerStart`. `refusal`: why this trainer cannot take
    part; empty where it can. `taken`: whether the reason is that another trainer of this number is alive.
    """
    return Schema({"trainer": int, "starter": str}, {"facts": BYTES, "uneven": BYTES, "start": BYTES}), Schema(
        {"ready": int, "taken": int}, {"refusal": BYTES}
    )


def json_of(message: Message, name: str) -> Any:
    """The JSON value of an array of bytes. WireError when it is no JSON."""
    try:
        return json.loads(message.arrays[name].tobytes())
    except (ValueError, RecursionError):
        raise WireError(f"{name} is no JSON") from None


def meet_schemas() -> tuple[Schema, Schema]:
    """Request and reply of MEET.

    `server`: who asks, -1 for a trainer. `born`: a random number of this process. `stopping`: it is a server that was
    asked to stop. `told`: JSON of `discovery.RendezvousInfo`, valid once `complete`. `over`: exit code of a run that
    all leave without a step, 0 while it goes on; `reason`: why.
    """
    return Schema({"server": int, "born": int, "servers": int, "stopping": int}, {"facts": BYTES}), Schema(
        {"complete": int, "over": int, "reason": str}, {"told": BYTES}
    )


def status_schemas() -> tuple[Schema, Schema]:
    """Request and reply of STATUS. `status`: JSON, see `status.snapshot`."""
    return Schema({}, {}), Schema({}, {"status": BYTES})


def lease_schemas() -> tuple[Schema, Schema]:
    """Request and reply of LEASE.

    `most`: how many leases the trainer may hold beside those in `has`. `leaving`: the trainer ends. `done`, `has` (n,
    3): keys of finished leases, and of those that the trainer holds. `reason`: why the run is over. `numbers` (t, 8),
    `rates` (t,): tickets of the granted leases, see `pack_leases`.
    """
    keys = Array(2, ("i64",))
    request = Schema(
        {"trainer": int, "starter": str, "most": int, "wait_s": float, "stopping": int, "leaving": int},
        {"done": keys, "has": keys},
    )
    return request, Schema({"state": int, "known": int, "reason": str}, {"numbers": Array(2, ("i64",)), "rates": SUMS})


def exchange_schemas(recipe: Recipe) -> tuple[Schema, Schema]:
    """Request and reply of EXCHANGE: gradients of one lease, if `push`, and what is pulled for another one, if `pull`.

    Per table: `ids/<name>` (U,) and `gradients/<name>` (U, width), summed by id, each id once; where rows have a life
    `seen/<name>` (U, 2), how often each was shown and clicked; `want/<name>` (V,) and,
    in the reply, `rows/<name>` (V, width). `dense`: learning blocks as `param_slices.views` lays them out. `frozen`:
    the other blocks, then server 0's buffers.

    `counts`: what the losses of the push are divided by in place of rows, where they come with counts.

    To server 0 alone: `sums` (M,), `statistics` (tickets x F, see `Push`), `rows`: sample ids, `buffers` (G,): what the
    micro-batches made of the buffers with a rule. With each pull for training server 0 sends these: `buffers`, bytes.

    `lease`, of server 0 alone: a request of LEASE that goes with this one, and its reply.

    With local training (`SyncMode.local_training`) the same names stand for changes of blocks with their optimizer
    state, see `param_slices.state_fields`, and of rows with theirs; `train` asks for these.
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
        {"trainer": int, **dict.fromkeys(numbers, int), "norm": float, "counts": float, "wait_s": float},
        {"dense": BYTES, "sums": SUMS, "statistics": Array(1, REAL), "buffers": SUMS, "rows": NUMBERS, "lease": BYTES}
        | {f"ids/{name}": NUMBERS for name in names}
        | {f"gradients/{name}": ROWS for name in names}
        | {f"seen/{name}": SEEN for name in names}
        | {f"want/{name}": NUMBERS for name in names},
    )
    reply = Schema(
        {"pulled": int, "stamp": int, "applied": int, "scale": float},
        {"dense": BYTES, "frozen": BYTES, "buffers": BYTES, "lease": BYTES} | {f"rows/{name}": ROWS for name in names},
    )
    return request, reply


def report_schemas() -> tuple[Schema, Schema]:
    """Request and reply of REPORT: of an evaluation batch `sums` (M,) and, where the recipe judges rows, `judged` (R,
    K).
    """
    return Schema(
        {"trainer": int, "step": int, "part": int, "unread": int}, {"sums": SUMS, "judged": Array(2, REAL)}
    ), Schema({}, {})


def rows_schemas(recipe: Recipe) -> dict[str, tuple[Schema, Schema]]:
    """Request and reply of LOOK to END, by method.

    `version`, `factor`, `lr`, `step`: the newest update; `version` 0 where there was none. Gradients are those of
    `rank` for `turn`; without `given` they were pushed before. `whole`: whether the gradients of all ranks are there;
    then `squares` (1,) is the sum of squares of their sum, and `rows` the rows of each table. `life`: what happened to
    rows so far, see `ServerShards.life_so_far`. `layer`: of the rows that a copy is to have, see `Box.layer`.
    `sizes`, `before`, `total`: PartSizes of each table, one after the other. `order`: key of a load, copy or save,
    which is asked for until it is `done`. `path`, `error`, `told`: texts, the last one JSON.
    """
    names = recipe.tables()
    update = {"version": int, "factor": float, "lr": float, "step": int}
    rows = Schema({}, {"sizes": NUMBERS, "life": NUMBERS})
    work = (
        Schema(update | {"order": int, "layer": int}, {"path": BYTES, "before": NUMBERS, "total": NUMBERS}),
        Schema({"done": int}, {"error": BYTES, "told": BYTES}),
    )
    gradients = {f"ids/{name}": NUMBERS for name in names} | {f"gradients/{name}": Array(2, REAL) for name in names}
    gradients |= {f"seen/{name}": SEEN for name in names}
    return {
        LOOK: (
            Schema(update | {"train": int}, {f"want/{name}": NUMBERS for name in names}),
            Schema({}, {f"rows/{name}": Array(2, REAL) for name in names}),
        ),
        GIVE: (
            Schema({"rank": int, "turn": int, "given": int}, gradients),
            Schema({"whole": int, "stopping": int}, {"squares": SUMS, "rows": NUMBERS}),
        ),
        COUNT: (Schema(update | {"layer": int}), rows),
        LOAD: work,
        COPY: work,
        SAVE: work,
        END: (Schema(), Schema()),
    }


def pack_leases(leases: Sequence[Lease]) -> dict[str, np.ndarray]:
    """Leases as the arrays of a reply to LEASE: one row for each ticket, the tickets of one lease together."""
    rows = [(*lease[:4], t.step, t.epoch, t.index, t.rows) for lease in leases for t in lease.tickets]
    return {
        "numbers": np.array(rows, np.int64).reshape(-1, 8),
        "rates": np.array([t.lr for lease in leases for t in lease.tickets], np.float64),
    }


def unpack_leases(arrays: Mapping[str, np.ndarray]) -> list[Lease]:
    """Inverse of `pack_leases`."""
    by_lease: dict[tuple[int, ...], list[Train]] = {}
    for row, lr in zip(arrays["numbers"].tolist(), arrays["rates"].tolist(), strict=True):
        by_lease.setdefault(tuple(row[:4]), []).append(Train(*row[4:], lr=lr))
    return [Lease(*head, tickets=tuple(tickets)) for head, tickets in by_lease.items()]
