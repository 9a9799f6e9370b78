"""How long a state takes to be written and to be read, beside what users of PyTorch have for it.

    python -m bench.checkpoints [--mb 100 1000] [--rounds 20]

The state: weights of some layers and two numbers of AdamW for each, in memory that is used already, as in a run that
goes on. Ways take turns, each in a process of its own that does nothing else; ratios are those to dtf, round by round.

Read are files that the system still holds in memory. A way has read when all tensors of the state have the numbers of
the file: each is compared once. Only dtf compares digests of all bytes, once before anything is loaded and once as it
loads. A way has written when all its files are synced to the disk: dtf does so itself, for the others it is done here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers import Absent
from bench.processes import Process, answers
from bench.rounds import alternating, starts
from bench.rows import Row, table, with_ratios

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DCP = "torch.distributed.checkpoint"
MAPPED = "torch.load, mapped"
WAYS = ("dtf", DCP, "safetensors", "torch.save and torch.load", MAPPED)
SETTINGS = {
    "read": {
        "dtf": "every byte compared twice", DCP: "no_dist, into tensors that are there", "safetensors": "load_file",
        "torch.save and torch.load": "weights_only", MAPPED: "weights_only, mmap",
    },
    "write": {"dtf": "with a digest of each MiB", DCP: "no_dist"},
}  # fmt: skip
State = dict[str, "Tensor"]


def state_of(mb: int) -> State:
    """Tensors of `mb` MB in all, with the sizes of a network: a few large ones, and many small ones."""
    import torch

    count = mb * 1_000_000 // 4 // 3
    width = int((count / 12) ** 0.5)
    shapes = [(width, width)] * 11 + [(width,)] * 24
    shapes.append(((count - sum(torch.Size(shape).numel() for shape in shapes)) // width, width))
    generator = torch.Generator().manual_seed(0)
    return {
        f"{kind}/{number}": torch.rand(shape, generator=generator)
        for number, shape in enumerate(shapes)
        for kind in ("model/layers", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    }


def way(name: str, folder: Path) -> tuple[Callable[[State], None], Callable[[State], None]]:
    """How it writes a state to an empty folder, and how it reads one."""
    import torch

    if name == "dtf":
        from dtf.checkpoint import storage
        from dtf.checkpoint.boxes import StoredCheckpoint, loading_fault, write_boxes, write_scalars
        from dtf.checkpoint.manifest import Manifest, StoredBox, StoredFile, StoredTensor
        from dtf.core.types import Box

        def write(state: State) -> None:
            draft = storage.begin(folder, 1, "bench", print)
            assert draft is not None
            boxes = [Box(key, tensor, tuple(tensor.shape), (0,) * tensor.dim()) for key, tensor in state.items()]
            part = write_boxes(draft / "rank_0.safetensors", boxes)
            files = {part["file"]: StoredFile(part["size"], tuple(part["crc32"]))}
            tensors = {
                key: StoredTensor(dtype, shape, (StoredBox(part["file"], slot, offset, local),))
                for key, dtype, shape, slot, offset, local in part["boxes"]
            }
            files["state.json"] = write_scalars(draft, {})
            storage.commit(draft, Manifest(1, "bench", "dp", 1, None, files, tensors))

        def read(state: State) -> None:
            assert loading_fault(folder / "step_000001") is None
            source = StoredCheckpoint(folder / "step_000001")
            for key, tensor in state.items():
                source.read_into(key, tensor)

    elif name == DCP:
        from torch.distributed import checkpoint

        def write(state: State) -> None:
            checkpoint.save(state, checkpoint_id=folder / "saved", no_dist=True)

        def read(state: State) -> None:
            checkpoint.load(state, checkpoint_id=folder / "saved", no_dist=True)

    elif name == "safetensors":
        from safetensors.torch import load_file, save_file

        def write(state: State) -> None:
            save_file(state, folder / "saved")

        def read(state: State) -> None:
            for key, tensor in load_file(folder / "saved").items():
                state[key].copy_(tensor)

    else:

        def write(state: State) -> None:
            torch.save(state, folder / "saved")

        def read(state: State) -> None:
            for key, tensor in torch.load(folder / "saved", mmap="mapped" in name, weights_only=True).items():
                state[key].copy_(tensor)

    return write, read


def work(name: str, mb: int) -> None:
    """One process: write once, then read or write whenever a line says so, and say how long it took."""
    with tempfile.TemporaryDirectory(prefix="dtf-bench-checkpoints-") as folder:
        state = state_of(mb)
        write, read = way(name, Path(folder))
        write(state)
        into = {key: tensor.clone().zero_() for key, tensor in state.items()}
        read(into)
        assert all(tensor.equal(into[key]) for key, tensor in state.items()), f"{name} reads other numbers"
        print("{}", flush=True)
        for line in sys.stdin:
            with tempfile.TemporaryDirectory(prefix="dtf-bench-checkpoints-") as other:
                write = way(name, Path(other))[0]
                began, cpu = time.perf_counter(), time.process_time()
                if line.strip() == "read":
                    read(into)
                else:
                    write(state)
                    sync(Path(other))
                wall = time.perf_counter() - began
                print(json.dumps({"seconds": wall, "cpu": time.process_time() - cpu}), flush=True)


def sync(folder: Path) -> None:
    """All files below it are on the disk."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def compare(mb: int, rounds: int, writes: int) -> list[Row]:
    """Of all ways, that many rounds of reading and of writing."""
    command = [sys.executable, "-m", "bench.checkpoints", "--mb", str(mb), "--work"]
    turns: dict[str, dict[str, list[dict[str, float]]]] = {"read": {}, "write": {}}
    workers: dict[str, Process] = {}
    absent: dict[str, str] = {}
    try:
        for name in WAYS:
            starts(name)
            try:
                workers[name] = Process([*command, name])
                answers([workers[name]])
            except Absent as error:
                absent[name] = str(error)
        for kind, count in (("read", rounds), ("write", writes)):
            for number, name in alternating(count, WAYS):
                if name in absent or (kind, name) == ("write", MAPPED):
                    continue
                try:
                    workers[name].send(kind)
                    turns[kind].setdefault(name, []).extend(answers([workers[name]]))
                except Absent as error:
                    absent[name] = f"in round {number + 1} of {kind}s: {error}"
    finally:
        for worker in workers.values():
            worker.end(20)  # it removes what it has written
    rows: list[Row] = []
    for kind, title in (("read", "reading"), ("write", "writing, synced,")):
        work = f"{title} {mb} MB"
        rows += [Row(work, name, not_run=why) for name, why in absent.items() if (kind, name) != ("write", MAPPED)]
        for name, some in turns[kind].items():
            if name in absent:
                continue
            speeds, cpu = [mb / turn["seconds"] for turn in some], [turn["cpu"] for turn in some]
            rows.append(Row(work, name, "MB/s", speeds, True, cpu, "s", settings=SETTINGS[kind].get(name, "")))
    return with_ratios(rows)


def measure(quick: bool) -> list[Row]:
    if quick:
        return compare(3, 2, 1)
    return [*compare(100, 20, 20), *compare(1000, 20, 6)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="of the state")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.mb[0])
        return
    for mb in options.mb:
        print(table(compare(mb, options.rounds, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
