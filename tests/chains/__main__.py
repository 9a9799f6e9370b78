"""`python -m tests.chains`: run random chains, print how many passed. Seeds in the file of results are not repeated."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tests.chains.trial import Outcome, attempt


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when a chain has failed."""
    options = _options(arguments)
    if options.only is not None:
        outcomes = [_run(seed, options) for seed in options.only]
        return 0 if options.part else _report(outcomes)
    seeds = range(options.seed, options.seed + options.count)
    done = _read(options.results)
    left = [seed for seed in seeds if seed not in done]
    if options.jobs > 1 and len(left) > 1:
        _run_in_parts(left, options)
    else:
        for seed in left:
            _run(seed, options)
    done = _read(options.results)
    return _report([done[seed] for seed in seeds if seed in done])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chains", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="chains: seeds from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these alone, whatever the results say")
    parser.add_argument("--results", type=Path, default=Path("outputs/chains.jsonl"), help="the file of done chains")
    parser.add_argument("--jobs", type=int, default=1, help="chains at once, each in a process of its own")
    parser.add_argument("--quiet", action="store_true", help="print the summary alone")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)  # of a command that prints the summary
    options = parser.parse_args(arguments)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    return options


def _run(seed: int, options: argparse.Namespace) -> Outcome:
    outcome = attempt(seed)
    with options.results.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
    if not options.quiet:
        print(f"{seed}: {_path(outcome)} {outcome.why or f'{outcome.difference:.1e}'}", flush=True)
    return outcome


def _run_in_parts(seeds: list[int], options: argparse.Namespace) -> None:
    """Run a command for each part of the seeds, all at once."""
    command = [sys.executable, "-m", "tests.chains", f"--results={options.results}", "--part"]
    command += ["--quiet"] if options.quiet else []
    parts = [seeds[i :: options.jobs] for i in range(min(options.jobs, len(seeds)))]
    running = [subprocess.Popen([*command, "--only", *map(str, part)]) for part in parts]
    for process in running:
        process.wait()


def _read(path: Path) -> dict[int, Outcome]:
    """The chains that a file has, by seed; of repeated ones the last."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["seed"]: Outcome(**line) for line in lines}


def _path(outcome: Outcome) -> str:
    case, legs = outcome.chain["case"], outcome.chain["legs"]
    ways = " > ".join(f"{leg['way']} x{leg['processes']} to {leg['until']}" for leg in legs)
    return f"{case['recipe']['name']} {case['precision']} {ways}:"


def _report(outcomes: list[Outcome]) -> int:
    """Print chains by pair of strategies, refusals by reason, and how to repeat what failed; the exit status."""
    passed, tried = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for outcome in outcomes:
        pairs = set(pairwise(leg["way"] for leg in outcome.chain["legs"]))
        tried.update(pairs)
        passed.update(pairs if not outcome.why else ())
    names = sorted({name for pair in tried for name in pair})
    width = max(map(len, names), default=0) + 2
    print("\npassed of tried, by strategy before a save (rows) and after it (columns):")
    print(" " * width + "".join(f"{name:>{width}}" for name in names))
    for first in names:
        cells = (f"{passed[first, second]}/{tried[first, second]}" for second in names)
        print(f"{first:{width}}" + "".join(f"{'' if cell == '0/0' else cell:>{width}}" for cell in cells))
    for reason, count in Counter(_reason(text) for outcome in outcomes for text in outcome.refused).most_common():
        print(f"refused {count} times: {reason}")
    _report_numbers(outcomes)
    failed = [outcome for outcome in outcomes if outcome.why]
    for outcome in failed:
        print(f"\nfailed: {_path(outcome)} {outcome.why}\n  again: python -m tests.chains --only {outcome.seed}")
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} chains passed")
    return int(bool(failed))


def _report_numbers(outcomes: list[Outcome]) -> None:
    """The largest difference of each precision, and how many chains are off by rounding."""
    good = [outcome for outcome in outcomes if not outcome.why]
    precisions = Counter(outcome.chain["case"]["precision"] for outcome in good)
    for precision, count in precisions.most_common():
        chosen = [outcome for outcome in good if outcome.chain["case"]["precision"] == precision]
        most = max(outcome.difference for outcome in chosen)
        rounded = sum(bool(outcome.rounding) for outcome in chosen)
        print(f"{precision}: {count} passed, largest difference {most:.1e}, {rounded} beyond it by rounding alone")


def _reason(text: Any) -> str:
    """A reason without its numbers and names, to count alike ones together."""
    return re.sub(r"\d+", "N", text)[:110]


if __name__ == "__main__":
    raise SystemExit(main())
