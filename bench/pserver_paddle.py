"""The click model of `bench.pserver` on Paddle's parameter server. Knows nothing of dtf.

It runs in an environment of its own that has paddlepaddle: as the server, and as trainers, which take every n-th batch
of the rows. A trainer takes each number of steps twice: first it brings their batches into memory, then its threads
train them (Hogwild) by `Executor.train_from_dataset`. `Executor.run` would not do: with servers Paddle 3.0.0 sends the
gradients of the perceptron from there and never fetches it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.turns import Turns, contestant

Run = Callable[[], float | None]


def join(given: argparse.Namespace) -> None:
    """Say in Paddle's variables which process of the run this is. Before paddle is imported."""
    os.environ |= {
        "TRAINING_ROLE": "PSERVER" if given.role == "server" else "TRAINER",
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{given.port}",
        "PADDLE_TRAINERS_NUM": str(given.trainers),
        "PADDLE_TRAINER_ID": str(given.number),
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": str(given.port),
        "CPU_NUM": str(given.threads),
        "FLAGS_enable_pir_api": "0",  # its parameter server knows the older programs alone
        "FLAGS_paddle_num_threads": "1",  # of an operator, in each thread that trains
        "OMP_NUM_THREADS": "1",
        "GLOG_minloglevel": "2",
    }


class Member:
    """The program of this process."""

    def __init__(self, log: Path, hidden: list[int], number: int, trainers: int) -> None:
        import paddle
        from paddle.distributed import fleet

        self._paddle, self.fleet = paddle, fleet
        paddle.enable_static()
        paddle.seed(0)
        about = json.loads((log / "log.json").read_text())
        self._batch, self._rows = about["batch"], [np.load(log / f"{name}.npy", mmap_mode="r") for name in _ROWS]
        self._starts = np.cumsum([0, *about["sizes"][:-1]])
        self._at, self._stride, self._file = number, trainers, log / f"paddle-{os.getpid()}.txt"
        fleet.init(fleet.PaddleCloudRoleMaker(is_collective=False))
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        fields, numbers = self._rows[0].shape[1], self._rows[1].shape[1]
        ids = [paddle.static.data(f"id{field}", [None, 1], "int64") for field in range(fields)]
        dense = paddle.static.data("dense", [None, numbers], "float32")
        clicks = paddle.static.data("clicks", [None, 1], "float32")
        self._inputs = [*ids, dense, clicks]
        normal = paddle.nn.initializer.Normal(std=0.01)
        size, table = [sum(about["sizes"]), _WIDTH], paddle.ParamAttr(name="table", initializer=normal)
        rows = [paddle.static.nn.sparse_embedding(field, size, param_attr=table) for field in ids]
        outputs = paddle.concat([dense, *(paddle.reshape(field, [-1, _WIDTH]) for field in rows)], 1)
        for units in hidden:
            outputs = paddle.static.nn.fc(outputs, units, activation="relu")
        outputs = paddle.static.nn.fc(outputs, 1)
        loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(outputs, clicks))
        sums = paddle.static.create_global_var([2], 0.0, "float32", persistable=True, name="sums")
        one = paddle.full([1], 1.0, "float32")
        paddle.assign(sums + paddle.concat([paddle.reshape(loss, [1]), one]), sums)
        # Its server knows SGD and Adam alone, and gives rows Adam under both, its bias corrected by steps of the row.
        optimizer = paddle.optimizer.Adam(0.001, lazy_mode=True)
        fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
        self._program = paddle.static.default_main_program()

    def start(self, port: int) -> None:
        """Join the server, once it listens: Paddle itself does not wait for it."""
        while True:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        self._executor = self._paddle.static.Executor(self._paddle.CPUPlace())
        self._executor.run(self._paddle.static.default_startup_program())
        self.fleet.init_worker()

    def prepared(self, steps: int, threads: int) -> Run:
        """What trains so many steps; it returns the mean loss of its batches."""
        with self._file.open("w") as file:
            for _ in range(steps):
                feed = self._next()
                dense, clicks = feed.pop("dense"), feed.pop("clicks")
                ids = np.hstack(list(feed.values()))
                counted = np.stack([np.ones_like(ids), ids], 2).reshape(len(ids), -1)  # each slot after its length
                for row in zip(counted.tolist(), dense.tolist(), clicks.astype(int).tolist(), strict=True):
                    file.write(" ".join(map(str, (*row[0], len(row[1]), *row[1], 1, *row[2]))) + "\n")
        train = self._loaded(threads)

        def run() -> float:
            before = self._sums()
            train()
            loss, batches = self._sums() - before
            return float(loss / batches)

        return run

    def start_s(self, threads: int) -> float:
        """Seconds of a call that trains nothing: what each turn has on top of its steps. The second of two."""
        self._file.write_text("")
        seconds = 0.0
        for _ in range(2):
            train = self._loaded(threads)
            began = time.perf_counter()
            train()
            seconds = time.perf_counter() - began
        return seconds

    def _loaded(self, threads: int) -> Callable[[], None]:
        """What trains the rows of the file, which are in memory."""
        dataset = self._paddle.distributed.InMemoryDataset()
        dataset.init(batch_size=self._batch, thread_num=threads, use_var=self._inputs, pipe_command="cat")
        dataset.set_filelist([str(self._file)])
        dataset.load_into_memory()
        return lambda: self._executor.train_from_dataset(self._program, dataset, thread=threads)

    def _sums(self) -> np.ndarray:
        """Of losses, and of batches, over all turns."""
        return np.array(self._paddle.static.global_scope().find_var("sums").get_tensor(), np.float64)

    def _next(self) -> dict[str, Any]:
        batches = len(self._rows[0]) // self._batch
        rows = slice(self._at % batches * self._batch, (self._at % batches + 1) * self._batch)
        self._at += self._stride
        ids, dense, clicks = (np.ascontiguousarray(part[rows]) for part in self._rows)
        columns = {f"id{field}": ids[:, field : field + 1] + start for field, start in enumerate(self._starts)}
        return columns | {"dense": dense, "clicks": clicks[:, None]}


_ROWS, _WIDTH = ("ids", "dense", "clicks"), 16


def main(turns: Turns) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="folder with the rows, absolute")
    parser.add_argument("--role", choices=["server", "trainer"], default="trainer")
    parser.add_argument("--hidden", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, required=True, help="of a trainer")
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--number", type=int, default=0, help="of the trainer")
    parser.add_argument("--port", type=int, required=True, help="of the server")
    given = parser.parse_args()
    os.chdir(given.log)  # Paddle leaves dumps of its programs where it is
    join(given)
    member = Member(given.log, given.hidden, given.number, given.trainers)
    if given.role == "server":
        member.fleet.init_server()
        member.fleet.run_server()
        return
    member.start(given.port)
    turns.ready(start_s=member.start_s(given.threads))
    while steps := turns.begin():
        run = member.prepared(steps, given.threads)
        turns.ready()
        turns.begin()
        turns.end(run())


if __name__ == "__main__":
    contestant(main)
