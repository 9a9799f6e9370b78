"""Which strategies take the classifiers of torchvision: `job=verify` for the smallest of each family, as a table.

    python docs/archs.py                        # those not yet in outputs/archs.jsonl, then the table in Markdown
    python docs/archs.py --only swin vit_32     # these families
    python docs/archs.py --seconds 400          # begin no further one after so long

A family is compared in fp64 on two processes, two steps of eight drawn images, of the smallest size that it takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dtf.recipes.resnet.archs import FAMILIES

STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "pipeline", "pserver")
PIXELS = 32
"""Of images, where a network takes them so small."""


def main() -> int:
    options = argparse.ArgumentParser(prog="python docs/archs.py", description=__doc__)
    options.add_argument("--only", nargs="+", metavar="FAMILY", choices=[*FAMILIES])
    options.add_argument("--seconds", type=float, default=float("inf"))
    options.add_argument("--results", type=Path, default=Path("outputs/archs.jsonl"))
    given = options.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    done: dict[str, dict[str, Any]] = {line["family"]: line for line in map(json.loads, lines) if line["runs"]}
    began = time.monotonic()
    for family in given.only or FAMILIES:
        if family in done and not given.only:
            continue
        if time.monotonic() - began > given.seconds:
            break
        done[family] = _verify(family)
        with given.results.open("a") as file:
            file.write(json.dumps(done[family]) + "\n")
        print(_row(done[family]), file=sys.stderr, flush=True)
    print("| network | pixels | " + " | ".join(STRATEGIES) + " |\n" + "| --- " * (len(STRATEGIES) + 2) + "|")
    print("\n".join(_row(done[family]) for family in FAMILIES if family in done))
    print()
    for why, names in _reasons(list(done.values())).items():
        print(f"- {why}: {', '.join(names)}")
    return 0


def _verify(family: str) -> dict[str, Any]:
    """What `job=verify` says of the smallest of a family."""
    arch, known = FAMILIES[family].names.split()[0], FAMILIES[family]
    unit = known.sized or 1
    pixels = max(known.least, -(-PIXELS // unit) * unit)
    words = [f"recipe.model.arch={arch}", f"recipe.data.pixels={pixels}", f"job.strategies=[{','.join(STRATEGIES)}]"]
    words += ["recipe.data.train_rows=64", "recipe.data.eval_rows=16", "lr.peak=0.01", "job.processes=[2]"]
    words += ["job.micro_batches=[1]", "job.precisions=[fp64]", "job.steps=2", "job.batch_size=8", "job.eval_rows=8"]
    with tempfile.TemporaryDirectory(prefix="dtf-archs-") as folder:
        command = [sys.executable, "-m", "dtf", "job=verify", "recipe=resnet_shapes", *words, f"run.dir={folder}/v"]
        start = time.monotonic()
        ended = subprocess.run(command, text=True, capture_output=True, check=False)
        result = Path(folder, "v", "verify.json")
        report = json.loads(result.read_text()) if result.exists() else {"runs": [], "refused": []}
    said = {} if result.exists() else {"error": ended.stderr[-2000:]}
    runs = {row["strategy"]: {"ok": row["ok"], "parameters": row.get("parameters")} for row in report["runs"]}
    refused = {row["strategy"]: row["refused"] for row in report["refused"]}
    who = {"family": family, "arch": arch, "pixels": pixels, "seconds": round(time.monotonic() - start)}
    return who | {"runs": runs, "refused": refused} | said


def _row(line: dict[str, Any]) -> str:
    cells = []
    for strategy in STRATEGIES:
        run = line["runs"].get(strategy)
        cells.append("no" if run is None else f"{run['parameters']:.0e}" if run["ok"] else "**broken**")
    return f"| `{line['arch']}` | {line['pixels']} | " + " | ".join(cells) + " |"


def _reasons(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Reason of a refusal, up to its first remedy -> network and strategy."""
    found: dict[str, list[str]] = {}
    for line in lines:
        for strategy, why in line["refused"].items():
            found.setdefault(why.partition(";")[0].partition(" (its blocks")[0], []).append(
                f"`{line['arch']}` ({strategy})"
            )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
