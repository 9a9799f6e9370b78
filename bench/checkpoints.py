"""How long a state takes to be written and to be read, beside what users of PyTorch have for it.

    python bench/checkpoints.py [--mb 100 1000] [--rounds 20]

The state: weights of some layers and two numbers of AdamW for each, in memory that is used already, as in a run that
goes on. Ways take turns, each in a process of its own that does nothing else, on files that the system still holds in
memory; medians, the range, and the ratio to torch.distributed.checkpoint round by round with the 95 % interval of its
median. A way has read when all tensors of the state have the numbers of the file: each is compared once. Only dtf
compares digests of all bytes, once before anything is loaded and once as it loads. Writes are synced to the disk by
dtf alone: `saved` is not comparable beyond that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.medians import interval, machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DCP = "torch.distributed.checkpoint"
WAYS = ("dtf", DCP, "safetensors", "torch.load", "torch.load, mapped")
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
    """One process: write once, then read whenever a line comes, and say how long it took."""
    with tempfile.TemporaryDirectory(prefix="dtf-bench-checkpoints-") as folder:
        state = state_of(mb)
        write, read = way(name, Path(folder))
        began = time.perf_counter()
        write(state)
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
        into = {key: tensor.clone().zero_() for key, tensor in state.items()}
        read(into)
        assert all(tensor.equal(into[key]) for key, tensor in state.items()), f"{name} reads other numbers"
        for _ in sys.stdin:
            began, cpu = time.perf_counter(), time.process_time()
            read(into)
            wall = time.perf_counter() - began
            print(json.dumps({"seconds": wall, "cpu": time.process_time() - cpu}), flush=True)


class Worker:
    """A process that does one way's work."""

    def __init__(self, name: str, mb: int) -> None:
        command = [sys.executable, "-m", "bench.checkpoints", "--mb", str(mb), "--work", name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin and process.stdout
        self._process, self._orders, self._answers = process, process.stdin, process.stdout
        self.saved_s = self._answer()["seconds"]
        self.reads: list[dict[str, float]] = []

    def read(self) -> None:
        self._orders.write("read\n")
        self._orders.flush()
        self.reads.append(self._answer())

    def end(self) -> None:
        self._orders.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        return json.loads(self._answers.readline())


def compare(mb: int, rounds: int) -> None:
    """One table."""
    workers = {name: Worker(name, mb) for name in WAYS}
    for number in range(rounds):
        for name in WAYS[:: -1 if number % 2 else 1]:
            workers[name].read()
    print(f"{mb} MB")
    for name, worker in workers.items():
        worker.end()
        speeds = sorted(mb / one["seconds"] for one in worker.reads)
        text = f"  {name:<29} read {median(speeds):6.0f} MB/s ({speeds[0]:.0f} to {speeds[-1]:.0f}), CPU "
        text += f"{median(one['cpu'] for one in worker.reads):.2f} s, saved {mb / worker.saved_s:5.0f} MB/s"
        if name != DCP:
            pairs = zip(worker.reads, workers[DCP].reads, strict=True)
            ratios = [theirs["seconds"] / own["seconds"] for own, theirs in pairs]
            text += f", {median(ratios):.2f} x ({interval(ratios)})"
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="of the state")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.mb[0])
        return
    print(machine())
    for mb in options.mb:
        compare(mb, options.rounds)


if __name__ == "__main__":
    main()
