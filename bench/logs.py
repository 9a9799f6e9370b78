"""Rows per second from click logs to batches, and the memory that takes; also writes a log to read.

    python -m bench.logs write day.tsv --rows 2000000    # a generated Criteo log; compressed when its name ends in .gz
    python -m bench.logs read day.tsv --threads 2        # parses, encodes and batches, in the seeded order of blocks
    python -m bench.logs read day.tsv --mode memory      # parses into columns, then batches shuffled rows of them
    python -m bench.logs generate --threads 2            # rows of recipe=ctr_clicks, which need no file
    python -m bench.logs ceiling                         # the best possible AUC and log loss of these rows

`read` and `generate` take batches from a loader as a training rank does, and do nothing with them. They print the
median of the rounds, the seconds of CPU per million rows, and the peak of the process's memory. The kernels are
compiled before anything is timed; nothing else is warmed up.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench.rows import Row
from dtf.api.recipe import Dataset
from dtf.core.types import Shard
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Shuffle
from dtf.recipes.ctr.clicks import write_criteo
from dtf.recipes.ctr.generated_data import ClicksOptions
from dtf.recipes.ctr.log_data import Ids, Integers, LogOptions, Mode


def passed_through(data: Dataset, batch: int, ranks: int, most: int) -> tuple[int, float, float]:
    """Rows that rank 0 of so many takes from its loader in one epoch, at most so many batches; seconds; seconds of
    CPU.
    """
    epochs = Epochs(Shuffle(), len(data), batch, 0, None, data.runs())
    loader = Loader(data, epochs, Shard(0, ranks), -(-batch // ranks))
    started, cpu, rows = time.perf_counter(), time.process_time(), 0
    count = min(epochs.batches, most or epochs.batches)
    for index in range(count):
        loader.ahead([(0, i) for i in range(index, min(index + 1 + loader.prefetch, count))])
        found = loader.get(0, index)
        assert found is not None
        rows += len(found.ids)
    wall, used = time.perf_counter() - started, time.process_time() - cpu
    loader.close()
    return rows, wall, used


def tell(name: str, data: Dataset, args: argparse.Namespace) -> None:
    data.fetch(torch.arange(8).numpy(), 0)
    found = [passed_through(data, args.batch, args.ranks, args.batches) for _ in range(args.rounds)]
    rates = [rows / wall for rows, wall, _ in found]
    cpu = statistics.median(used / rows * 1e6 for rows, _, used in found)
    # getrusage's may be that of the process before exec
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) >> 10
    print(
        f"{name}: {statistics.median(rates):,.0f} rows/s ({min(rates):,.0f} to {max(rates):,.0f}), {cpu:.2f} s of CPU "
        f"per million, peak {peak} MiB"
    )


def read(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.cache or None) as cache:
        options = LogOptions(
            train=args.file,
            eval=args.file,
            mode=Mode[args.mode],
            ids=Ids[args.ids],
            integers=Integers[args.integers],
            cache=cache,
        )
        options.check()
        started = time.perf_counter()
        data = options.open("train", 0)
        passed, cpu = time.perf_counter() - started, time.process_time()
        print(
            f"opened {len(data):,} rows in {passed:.2f} s ({len(data) / passed:,.0f} rows/s, {cpu:.1f} s of CPU with "
            "imports and compilation)"
        )
        tell(f"{args.mode}, {args.threads} threads, {args.file}", data, args)


def generate(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    tell(
        f"generated, {args.threads} threads",
        ClicksOptions(train_rows=args.rows, values=args.values).open("train", 0),
        args,
    )


def write(args: argparse.Namespace) -> None:
    data = ClicksOptions(train_rows=args.rows, values=args.values, seed=args.seed).open("train", 0)
    path = Path(args.file)
    plain = path.with_suffix(".part")
    write_criteo(data, plain)
    if path.suffix == ".gz":
        with open(plain, "rb") as file, gzip.open(path, "wb", compresslevel=6) as out:
            shutil.copyfileobj(file, out, 1 << 20)
        plain.unlink()
    else:
        os.replace(plain, path)


def ceiling(args: argparse.Namespace) -> None:
    found = ClicksOptions(eval_rows=args.rows, values=args.values, seed=args.seed).best_possible()
    print(f"best reachable over {args.rows:,} rows: AUC {found['auc']:.4f}, log loss {found['loss']:.4f}")


def measure(quick: bool) -> list[Row]:
    """Rows per second of a Criteo log of a million rows, read in both modes, and of generated rows."""
    rows, rounds, found = (2_000, 1, []) if quick else (1_000_000, 5, [])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(prefix="dtf-bench-logs-") as folder:
        path = Path(folder, "day.tsv")
        made = ClicksOptions(train_rows=rows).open("train", 0)
        write_criteo(made, path)
        work = f"{rows:,} rows of a Criteo log to batches of 2,048, two threads"
        for mode in Mode:
            options = LogOptions(train=str(path), eval=str(path), mode=mode, cache=folder)
            options.check()
            data = options.open("train", 0)
            data.fetch(torch.arange(8).numpy(), 0)
            found.append(_row(work, f"mode={mode.name}", data, rounds))
        found.append(_row(work, "generated (recipe=ctr_clicks)", made, rounds))
    torch.set_num_threads(before)
    return found


def _row(work: str, who: str, data: Dataset, rounds: int) -> Row:
    passes = [passed_through(data, 2048, 1, 0) for _ in range(rounds)]
    cpu = [used / rows * 1e6 for rows, _, used in passes]
    return Row(work, who, "rows/s", [rows / wall for rows, wall, _ in passes], True, cpu, "s per million")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, work in (("write", write), ("read", read), ("generate", generate), ("ceiling", ceiling)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        if name in ("write", "read"):
            command.add_argument("file")
        if name != "read":
            command.add_argument("--rows", type=int, default=100_000 if name == "ceiling" else 1_000_000)
            command.add_argument("--values", type=int, default=5000)
            command.add_argument("--seed", type=int, default=0)
        if name in ("read", "generate"):
            command.add_argument("--threads", type=int, default=2)
            command.add_argument("--batch", type=int, default=2048)
            command.add_argument(
                "--ranks", type=int, default=1, help="as one of so many ranks, which reads its share of each batch"
            )
            command.add_argument("--batches", type=int, default=0, help="stop after so many; 0: a whole epoch")
            command.add_argument("--rounds", type=int, default=3)
        if name == "read":
            command.add_argument("--mode", choices=[mode.name for mode in Mode], default="queue")
            command.add_argument("--ids", choices=["hash", "raw", "vocabulary"], default="hash")
            command.add_argument("--integers", choices=[each.name for each in Integers], default="log")
            command.add_argument("--cache", default="", help="folder in which a temporary cache is made")
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
