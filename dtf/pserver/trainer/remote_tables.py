"""The sparse tables of trainers that hold the dense parameters themselves (`strategy.dense=allreduce`): rows are on
servers, which sum gradients.

A step is two requests to each server. The first one brings the update of the step before and looks up rows. The second
one brings gradients, and is answered once those of all trainers are there. All trainers bring the same update; the
server makes it when the first of them comes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.leased_work import LeasedWork
from dtf.api.task import Source, Task
from dtf.core.errors import PeerError
from dtf.core.types import Batch, Box, State
from dtf.distributed.world import World
from dtf.optim.sharding import Sharding
from dtf.pserver.net.codec import Message, decode, encode
from dtf.pserver.net.messages import COPY, COUNT, END, GIVE, LOAD, LOOK, SAVE, rows_schemas
from dtf.pserver.net.transport import Transport
from dtf.pserver.row_routing import RowRequest, routed_tables
from dtf.pserver.trainer.prefetch import DEADLINE_S
from dtf.sparse.sharded_tables import LIFE_COUNTS, ShardedTables
from dtf.strategies.replica import Replica
from dtf.strategies.spmd import Spmd


class RemoteTables(ShardedTables):
    """Sparse tables whose rows are on servers.

    `connect`: makes a transport to each server, called when they are first needed. `share`: the factor of ranks'
    gradients in their sum.
    """

    def __init__(self, task: Task, world: World, share: float, connect: Callable[[], Sequence[Transport]]) -> None:
        super().__init__({}, world, share)
        self._connect, self._schemas = connect, rows_schemas(task.recipe)
        self._routed, self._recipe_clicks = routed_tables(task), task.recipe.clicks
        self._lives = any(table.lives for table in self._routed.values())
        self._specs = task.recipe.tables()
        self._turn = self._orders = 0
        # the newest, until servers are known to have it
        self._update: dict[str, int | float] = {"version": 0, "factor": 0.0, "lr": 0.0, "step": 0}
        self._wanted: tuple[RowRequest, dict[str, Tensor]] | None = None
        self.stopping = False
        """Whether a server was told to stop."""

    @cached_property
    def _servers(self) -> Sequence[Transport]:
        return self._connect()

    def lookup(self, batch: Batch, train: bool) -> Batch:
        row_request = RowRequest(batch, self._routed, len(self._servers), self._recipe_clicks)
        scalars = self._update | {"train": int(train)}
        answers = self._ask(
            LOOK,
            [
                (scalars, {f"want/{name}": ids for name, ids in row_request.ids(server).items()})
                for server in range(len(self._servers))
            ],
        )
        rows = [{name: answer.arrays[f"rows/{name}"] for name in self._routed} for answer in answers]
        filled = row_request.fill(batch, rows, self._world.device)
        if train:
            names = (name for table in self._routed.values() for name in table.inputs)
            self._wanted = row_request, {name: filled.inputs[name] for name in names}
        return filled

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        assert self._wanted is not None
        row_request, looked_up = self._wanted
        self._wanted = None
        every = {
            name: gradients[name] if name in gradients else torch.zeros_like(rows) for name, rows in looked_up.items()
        }
        common = {"rank": self._world.rank, "turn": self._turn}
        parts = row_request.gradients(every)
        arrays = [
            {
                f"{key}/{name}": array
                for name, table in part.items()
                for key, array in (("ids", table.ids), ("gradients", table.gradients), ("seen", table.seen))
                if array is not None
            }
            for part in parts
        ]
        answers = self._ask(GIVE, [(common | {"given": 1}, part_arrays) for part_arrays in arrays])
        while not all(answer.scalars["whole"] for answer in answers):  # other trainers are slower
            answers = self._ask(GIVE, [(common | {"given": 0}, {}) for _ in answers])
        self._turn += 1
        self.stopping = self.stopping or any(answer.scalars["stopping"] for answer in answers)
        self._refuse_overfull(sum(answer.arrays["rows"] for answer in answers))
        self.norm = (
            torch.tensor(sum(float(answer.arrays["squares"][0]) for answer in answers), dtype=torch.float64).sqrt()
            * self._share
        )

    def apply(self, factor: float, lr: float, step: int) -> None:
        """Note the update that the next request brings to the servers."""
        self._update = {"version": self._update["version"] + 1, "factor": factor * self._share, "lr": lr, "step": step}

    def life_counts(self) -> dict[str, int]:
        """As of `ShardedTables`. The request brings the newest update."""
        if not self._lives:
            return {}
        if self._world.rank:
            return dict.fromkeys(LIFE_COUNTS, 0)
        answers = self._count({})
        so_far = np.sum([answer.arrays["life"] for answer in answers], axis=0).tolist()
        before, self._told = self._told, dict(zip(LIFE_COUNTS, so_far, strict=True))
        return {key: self._told[key] - before[key] for key in LIFE_COUNTS}

    def boxes(self) -> list[Box]:
        """None: servers write theirs themselves, see `set_aside`."""
        return []

    def set_aside(self) -> Callable[[Path], list[dict[str, Any]]]:
        """Have every server copy its rows as they are now; returns what has them write the copies into a checkpoint's
        folder, see `State.others`. OSError where one cannot. Not collective.
        """
        layer, self._layer = {} if self._layer is None else {"layer": self._layer}, None
        sizes = np.stack([answer.arrays["sizes"] for answer in self._count(layer)])
        before = np.cumsum(sizes, 0) - sizes
        self._refuse(self._order(COPY, [{"before": ahead, "total": sizes.sum(0)} for ahead in before], layer))
        return self._write

    def _count(self, layer: Mapping[str, int]) -> list[Message]:
        return self._ask(COUNT, [({**self._update, **layer}, {})] * len(self._servers))

    def _write(self, folder: Path) -> list[dict[str, Any]]:
        answers = self._order(SAVE, [{"path": _bytes(str(folder))}] * len(self._servers))
        self._refuse(answers)
        return [part for answer in answers for part in json.loads(_text(answer.arrays["told"]))]

    @staticmethod
    def _refuse(answers: Sequence[Message]) -> None:
        for server, answer in enumerate(answers):
            if error := _text(answer.arrays["error"]):
                raise OSError(f"server {server}: {error}")

    def load(self, source: Source, resume: bool = True) -> None:
        """Have every server read its rows from a checkpoint, in place of those that it has. Collective.

        PeerError when a server could not: it logs why.
        """
        assert resume
        if self._world.rank == 0:
            self._order(LOAD, [{"path": _bytes(str(source.folder))}] * len(self._servers))
        self._world.barrier()

    def clear(self) -> None:
        """Nothing to do: `load` replaces all rows."""

    def learnt(self) -> dict[str, tuple[Tensor, Tensor]]:
        raise AssertionError("rows are on servers, and a job that uses a model reads a checkpoint")

    def end(self) -> None:
        """Tell the servers that the run is over. Not collective."""
        with suppress(PeerError):  # one that cannot be reached has gone, and only its last word was lost
            self._ask(END, [({}, {})] * len(self._servers))

    def _order(
        self, method: str, arrays: Sequence[Mapping[str, np.ndarray]], layer: Mapping[str, int] | None = None
    ) -> list[Message]:
        """Request what takes a while, again and again until all servers have done it."""
        self._orders += 1
        scalars = {**self._update, "order": self._orders, **(layer or {})}
        while True:
            answers = self._ask(method, [(scalars, request_arrays) for request_arrays in arrays])
            if all(answer.scalars["done"] for answer in answers):
                return answers

    def _ask(
        self, method: str, requests: Sequence[tuple[Mapping[str, Any], Mapping[str, np.ndarray]]]
    ) -> list[Message]:
        """One request to each server, all at once; their answers."""
        request_schema, reply_schema = self._schemas[method]
        messages = [encode(request_schema, *request) for request in requests]
        if len(messages) == 1:
            return [decode(reply_schema, self._servers[0].call(method, messages[0], DEADLINE_S))]
        pending = [
            server.start(method, message, DEADLINE_S) for server, message in zip(self._servers, messages, strict=True)
        ]
        return [decode(reply_schema, reply.result()) for reply in pending]

    def _refuse_overfull(self, rows: Any) -> None:
        from dtf.sparse.store import full

        for (name, spec), count in zip(self._specs.items(), rows.tolist(), strict=True):
            if count > spec.capacity:
                raise full(name, spec, count)


class RemoteTablesProgram(Spmd):
    """A replica on every rank, with tables on servers."""

    _tables: RemoteTables

    def __init__(
        self, replica: Replica, sharding: Sharding, task: Task, world: World, exchange: int, layout: dict[str, str]
    ) -> None:
        super().__init__(replica, sharding, task, world, exchange=exchange)
        self._layout = layout
        self.leased = _RowServers(self._tables, world.rank == 0)

    def about(self) -> dict[str, str]:
        return {"servers": "rows of sparse tables, by a hash of their ids"} | self._layout

    def state(self) -> State:
        return super().state()._replace(others=self._tables.set_aside if self._world.rank == 0 else None, private=False)


class _RowServers(LeasedWork):
    """Servers that hold rows for the ranks. They compute nothing that `step` does not return."""

    def __init__(self, tables: RemoteTables, first: bool) -> None:
        self._tables, self._first = tables, first

    def told_to_stop(self) -> bool:
        return self._tables.stopping

    def end(self, reason: str = "finished") -> None:
        if self._first:
            self._tables.end()


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _text(array: np.ndarray) -> str:
    return array.tobytes().decode()
