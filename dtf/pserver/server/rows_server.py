"""A server of rows alone (`strategy.dense=allreduce`): its request handlers.

It runs no engine. Trainers say what an update is, and when it is made.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from dtf.api.recipe import Recipe
from dtf.api.task import Source
from dtf.core.errors import DtfError
from dtf.core.types import Box
from dtf.pserver.net.codec import Message, decode, encode
from dtf.pserver.net.messages import COPY, COUNT, END, GIVE, LOAD, LOOK, SAVE, rows_schemas
from dtf.pserver.net.transport import Refused
from dtf.pserver.row_routing import RowGradients, ServerShards
from dtf.pserver.server.handlers import LONGEST_WAIT_S, seen_with
from dtf.pserver.server.program import WAIT_S

Write = Callable[[Path, int, list[Box]], list[dict[str, Any]]]
Others = Callable[[Path], list[dict[str, Any]]]
"""See `State.others`."""


class RowServer:
    """One server's part of all tables, for `trainers` trainers; threads of the service call the handlers.

    A request that comes twice counts once: gradients by their turn and trainer, updates by their version, loads and
    saves by their order number. `folder`: of the run, the only place where this server writes. `rank`: names its files.
    `read`, `write`: of checkpoint files, see `dtf.checkpoint.boxes.write_rank`.
    """

    def __init__(
        self,
        shards: ServerShards,
        recipe: Recipe,
        trainers: int,
        rank: int,
        folder: Path,
        read: Callable[[Path], Source],
        write: Write,
    ) -> None:
        self._shards, self._trainers, self._rank = shards, trainers, rank
        self._folder, self._read, self._write = folder, read, write
        self._widths = {name: table.width for name, table in recipe.tables().items()}
        self._schemas, self._lives = rows_schemas(recipe), shards.lives
        self._change = threading.Condition()  # of the rows and all that follows
        self._basket: dict[int, dict[str, RowGradients]] = {}  # by trainer, of this turn
        self._turn = self._version = self._steps = self._pushes = self._dropped = 0
        self._squares = 0.0  # of the gradient of the turn before
        self._copied: list[Box] = []  # what the next save writes
        self._aside: Others | None = None  # and what it puts beside
        self._orders, self._worker = threading.Lock(), ThreadPoolExecutor(1, "order")
        self._number, self._work = 0, Future[dict[str, np.ndarray]]()  # of the order under way, or the last one
        self._over, self._failure, self._stopping = threading.Event(), list[BaseException](), False
        self.handlers = {
            LOOK: self.look,
            GIVE: self.give,
            COUNT: self.count,
            LOAD: self.load,
            COPY: self.copy,
            SAVE: self.save,
            END: self.end,
        }

    def run(self, beat: Callable[[str, int], None], stop_requested: Callable[[], bool]) -> None:
        """Wait until the run is over. Raises the error of a thread of the service."""
        while not self._over.wait(WAIT_S):
            beat("wait", self._turn)
            self._stopping = stop_requested()
        if self._failure:
            error = self._failure[0]
            raise (
                error
                if isinstance(error, DtfError)
                else DtfError(f"the service failed: {type(error).__name__}: {error}")
            ) from error

    def fail(self, error: BaseException) -> None:
        """An error in a thread of the service: `run` raises it."""
        self._failure.append(error)
        self._over.set()

    # ------------------------------------------------------------ a step

    def look(self, data: bytes) -> bytes:
        """LOOK: rows, after the update that the request brings."""
        message = decode(self._schemas[LOOK][0], data)
        with self._change:
            self._update(message)
            rows = {
                f"rows/{name}": self._shards.rows(name, message.arrays[f"want/{name}"], bool(message.scalars["train"]))
                for name in self._widths
            }
        return encode(self._schemas[LOOK][1], {}, rows)

    def give(self, data: bytes) -> bytes:
        """GIVE: take the gradients of one trainer; once those of all are there, answer with facts about their sum."""
        message = decode(self._schemas[GIVE][0], data)
        turn, rank = int(message.scalars["turn"]), int(message.scalars["rank"])
        if not 0 <= rank < self._trainers:
            raise Refused(f"there is no trainer {rank}, but {self._trainers}")
        with self._change:
            if turn > self._turn:
                raise Refused(f"turn {turn} comes after {self._turn}")
            if message.scalars["given"] and (turn < self._turn or rank in self._basket):
                self._dropped += 1
            elif message.scalars["given"]:
                self._basket[rank] = self._row_gradients(message)
                self._pushes += 1
                if len(self._basket) == self._trainers:
                    self._merge()
            whole = self._change.wait_for(lambda: turn < self._turn, LONGEST_WAIT_S)
            if turn < self._turn - 1:
                raise Refused(f"turn {turn} is over")
            arrays = {"squares": np.array([self._squares]), "rows": self._counts()} if whole else {}
        return encode(self._schemas[GIVE][1], {"whole": int(whole), "stopping": int(self._stopping)}, arrays)

    def _merge(self) -> None:
        """Sum all gradients, in the order of trainers, for the next update."""
        gradients = {name: [self._basket[rank][name] for rank in range(self._trainers)] for name in self._widths}
        self._squares = self._shards.merge(gradients, collective=False)
        self._basket = {}
        self._turn += 1
        self._change.notify_all()

    def _update(self, message: Message) -> None:
        """Make the update that the request brings, unless it was made."""
        version = int(message.scalars["version"])
        if version > self._version + 1:
            raise Refused(f"update {version} comes after {self._version}")
        if version == self._version + 1:
            self._shards.apply(
                float(message.scalars["factor"]), float(message.scalars["lr"]), int(message.scalars["step"])
            )
            self._version, self._steps = version, int(message.scalars["step"]) + 1

    def _row_gradients(self, message: Message) -> dict[str, RowGradients]:
        by_table = {
            name: RowGradients(
                message.arrays[f"ids/{name}"],
                message.arrays[f"gradients/{name}"],
                seen_with(message.arrays, name, self._lives),
            )
            for name in self._widths
        }
        for name, (ids, numbers, *_) in by_table.items():
            if numbers.shape != (len(ids), self._widths[name]):
                raise Refused(
                    f"gradients/{name} has shape {numbers.shape}, wanted is ({len(ids)}, {self._widths[name]})"
                )
        return by_table

    # ------------------------------------------------------------ checkpoints

    def count(self, data: bytes) -> bytes:
        """COUNT: how many rows each table has, and a save would write, and what happened to rows."""
        message = decode(self._schemas[COUNT][0], data)
        with self._change:
            self._update(message)
            sizes = self._shards.part_sizes(_layer(message)).reshape(-1)
            counts = {"sizes": sizes, "life": self._shards.life_so_far()}
            return encode(self._schemas[COUNT][1], {}, counts)

    def load(self, data: bytes) -> bytes:
        """LOAD: read rows from a checkpoint, in place of those that are here."""
        message = decode(self._schemas[LOAD][0], data)
        path = Path(message.arrays["path"].tobytes().decode())

        def work() -> dict[str, np.ndarray]:
            with self._change:
                self._shards.clear()
                self._shards.load(self._read(path))
            return {}

        return self._order(message, LOAD, work)

    def copy(self, data: bytes) -> bytes:
        """COPY: set rows aside as they are now, all or those of a layer. Per table, `before` of `total` belong to
        earlier servers.
        """
        message = decode(self._schemas[COPY][0], data)
        before, total = (message.arrays[key].reshape(len(self._widths), -1) for key in ("before", "total"))

        def work() -> dict[str, np.ndarray]:
            with self._change:
                self._update(message)
                self._copied, self._aside = [], None
                try:
                    self._copied = self._shards.parts(before, total, _layer(message))
                    if self._shards.has_files:
                        self._aside = self._shards.set_aside(self._rank)
                except MemoryError:
                    return {"error": _bytes("out of memory")}
                except OSError as error:
                    return {"error": _bytes(str(error))}
            return {"error": _bytes("")}

        return self._order(message, COPY, work)

    def save(self, data: bytes) -> bytes:
        """SAVE: write what was set aside into a checkpoint's folder."""
        message = decode(self._schemas[SAVE][0], data)
        path = Path(message.arrays["path"].tobytes().decode())
        if ".." in path.parts or self._folder not in path.parents:
            raise Refused("this is no place in the run folder")

        def work() -> dict[str, np.ndarray]:
            (boxes, aside), self._copied, self._aside = (self._copied, self._aside), [], None
            error, written = "", list[dict[str, Any]]()
            try:
                written = self._write(path, self._rank, boxes)
                if aside is not None:
                    written += aside(path)
            except (OSError, MemoryError) as trouble:
                error = str(trouble) or "out of memory"
            return {"error": _bytes(error), "told": _bytes(json.dumps(written))}

        return self._order(message, SAVE, work)

    def _order(self, message: Message, method: str, work: Callable[[], dict[str, np.ndarray]]) -> bytes:
        """Begin to work, unless it was begun; the answer has the result if it is there within LONGEST_WAIT_S."""
        number = int(message.scalars["order"])
        with self._orders:
            if number < self._number:
                raise Refused(f"order {number} is over")
            if number > self._number:
                self._number, self._work = number, self._worker.submit(work)
            doing = self._work
        wait([doing], LONGEST_WAIT_S)
        return encode(self._schemas[method][1], {"done": int(doing.done())}, doing.result() if doing.done() else {})

    # ------------------------------------------------------------ the end

    def end(self, data: bytes) -> bytes:
        """END: the run is over."""
        decode(self._schemas[END][0], data)
        self._over.set()
        return encode(self._schemas[END][1], {}, {})

    def snapshot(self) -> dict[str, Any]:
        """The status of this server, see `status.snapshot`; here a version is an update that was made."""
        with self._change:
            return {
                "state": "over" if self._over.is_set() else "serving",
                "version": self._steps,
                "updates": self._version,
                "pushes": self._pushes,
                "dropped": self._dropped,
                "staleness": {"0": self._pushes},
                "blocks": {"number": 0, "bytes": 0},
                "tables": self._shards.sizes(),
            }

    def _counts(self) -> np.ndarray:
        return np.array([table["rows"] for table in self._shards.sizes().values()], np.int64)


def _layer(message: Message) -> int | None:
    return int(message.scalars["layer"]) if "layer" in message.scalars else None


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
