"""The click model of `bench.pserver` on Paddle's parameter server. Knows nothing of dtf.

It runs in an environment of its own that has paddlepaddle, once as the server and once as the trainer. The trainer
takes numbers of steps, one a line, and answers each with a line of JSON: seconds and log loss.

`feed`: batches are given to `Executor.run` one by one. `dataset`: `Executor.train_from_dataset`, whose threads take
batches of files that were read into memory before (Hogwild).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def join(role: str, port: int, threads: int) -> None:
    """Say in Paddle's variables which process of the run this is. Before paddle is imported."""
    os.environ |= {
        "TRAINING_ROLE": "PSERVER" if role == "server" else "TRAINER",
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{port}",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": str(port),
        "FLAGS_enable_pir_api": "0",  # its parameter server knows the older programs alone
        "FLAGS_paddle_num_threads": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "GLOG_minloglevel": "2",
    }


class Contestant:
    """The program of this process."""

    def __init__(self, log: Path, hidden: list[int], asynchronous: bool) -> None:
        import paddle
        from paddle.distributed import fleet

        self._paddle, self.fleet = paddle, fleet
        paddle.enable_static()
        paddle.seed(0)
        about = json.loads((log / "log.json").read_text())
        self._batch, self._rows = about["batch"], [np.load(log / f"{name}.npy", mmap_mode="r") for name in _ROWS]
        self._starts = np.cumsum([0, *about["sizes"][:-1]])
        self._at, self._file = 0, log / f"paddle-{os.getpid()}.txt"
        fleet.init(fleet.PaddleCloudRoleMaker(is_collective=False))
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = asynchronous
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
        self._loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(outputs, clicks))
        optimizer = paddle.optimizer.Adam(0.001, lazy_mode=True)  # of Adagrad 3.0.0 lacks the operator here
        fleet.distributed_optimizer(optimizer, strategy).minimize(self._loss)
        self._program = paddle.static.default_main_program()

    def start(self) -> None:
        self._executor = self._paddle.static.Executor(self._paddle.CPUPlace())
        self._executor.run(self._paddle.static.default_startup_program())
        self.fleet.init_worker()

    def feed(self, steps: int) -> tuple[float, float]:
        """So many steps: seconds, and the mean loss."""
        feeds = [self._next() for _ in range(steps)]
        began = time.perf_counter()
        losses = [self._executor.run(self._program, feed=feed, fetch_list=[self._loss])[0] for feed in feeds]
        return time.perf_counter() - began, float(np.mean(losses))

    def dataset(self, steps: int, threads: int) -> tuple[float, None]:
        """As `feed`. The loss is not known: `Executor.run` after `train_from_dataset` ends in a fault of memory."""
        with self._file.open("w") as file:
            for _ in range(steps):
                feed = self._next()
                dense, clicks = feed.pop("dense"), feed.pop("clicks")
                for ids, numbers, click in zip(np.hstack(list(feed.values())), dense, clicks[:, 0], strict=True):
                    values = " ".join(f"{number:.5g}" for number in numbers.tolist())
                    file.write(f"{' '.join(f'1 {id}' for id in ids.tolist())} {len(numbers)} {values} 1 {click:.0f}\n")
        dataset = self._paddle.distributed.InMemoryDataset()
        dataset.init(batch_size=self._batch, thread_num=threads, use_var=self._inputs, pipe_command="cat")
        dataset.set_filelist([str(self._file)])
        dataset.load_into_memory()
        began = time.perf_counter()
        self._executor.train_from_dataset(self._program, dataset, thread=threads)
        seconds = time.perf_counter() - began
        self._file.unlink()
        return seconds, None

    def _next(self) -> dict[str, Any]:
        batches = len(self._rows[0]) // self._batch
        rows = slice(self._at % batches * self._batch, (self._at % batches + 1) * self._batch)
        self._at += 1
        ids, dense, clicks = (np.ascontiguousarray(part[rows]) for part in self._rows)
        columns = {f"id{field}": ids[:, field : field + 1] + start for field, start in enumerate(self._starts)}
        return columns | {"dense": dense, "clicks": clicks[:, None]}


_ROWS, _WIDTH = ("ids", "dense", "clicks"), 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["server", "trainer"])
    parser.add_argument("log", type=Path, help="folder with the rows")
    parser.add_argument("way", choices=["feed", "dataset"])
    parser.add_argument("--hidden", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="of the server")
    args = parser.parse_args()
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # what libraries print
    join(args.role, args.port, 1 if args.way == "dataset" else args.threads)
    contestant = Contestant(args.log, args.hidden, True)
    if args.role == "server":
        contestant.fleet.init_server()
        contestant.fleet.run_server()
        return
    contestant.start()
    for line in sys.stdin:
        way = contestant.feed(int(line)) if args.way == "feed" else contestant.dataset(int(line), args.threads)
        print(json.dumps(dict(zip(("seconds", "loss"), way, strict=True))), file=answers, flush=True)
    contestant.fleet.stop_worker()


if __name__ == "__main__":
    main()
