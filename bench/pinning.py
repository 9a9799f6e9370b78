"""What it is worth that ranks have cores of their own: real runs of recipe=resnet_shapes, with its loader.

    python -m bench.pinning [--rounds 6]

Two ranks of one thread with and without `launcher.pin=true`, and one rank of two threads with and without
`OMP_PROC_BIND=close`, which binds each thread of OpenMP to a core. Each run is a process tree of its own, in turn, and
in the other direction in each second round; medians of the seconds of a step after the first ones, and ratios with
their 95 % interval. It fails when the losses of a pair differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.medians import interval, machine

CASES = {
    "2 ranks of 1 thread, launcher.pin=true": (["launcher.processes=2"], ["launcher.pin=true"]),
    "1 rank of 2 threads, OMP_PROC_BIND=close": (["launcher.processes=1"], ["launcher.env.OMP_PROC_BIND=close"]),
}
"""Name -> words of both ways, and those that bind."""
EVERY, WARM, STEPS = 40, 80, 400


def step_s(words: list[str]) -> tuple[float, float]:
    """Seconds of a step after the first `WARM`, and the last loss, of one run."""
    run = [
        f"train.until={STEPS}",
        f"train.log_every={EVERY}",
        "train.eval_every=0",
        "checkpoint=off",
        "observer=[jsonl]",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dtf", *run, f"run.dir={folder}/run", *words]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    first, last = next(line for line in lines if line["step"] == WARM), lines[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]), last["loss"]


def compare(name: str, rounds: int) -> None:
    words, binding = CASES[name]
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(rounds):
        for binds in (False, True) if number % 2 else (True, False):
            found[binds].append(step_s([*words, *(binding if binds else [])]))
    losses = [loss for runs in found.values() for _, loss in runs]
    if max(losses) - min(losses) > 1e-5 * abs(losses[0]):
        raise SystemExit(f"{name}: losses from {min(losses)} to {max(losses)}")
    ratios = [bound / free for (free, _), (bound, _) in zip(found[False], found[True], strict=True)]
    free, bound = (1e3 * median(seconds for seconds, _ in runs) for runs in found.values())
    print(
        f"{name}: {bound:.2f} ms a step, without {free:.2f} ms, {median(ratios):.3f} ({interval(ratios)})", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    print(machine())
    for name in [options.case] if options.case else CASES:
        compare(name, options.rounds)


if __name__ == "__main__":
    main()
