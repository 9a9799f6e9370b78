"""`python -m tests.zoo`: try the zoo under every strategy and print the table. Done trials are not repeated."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from tests.zoo import trial
from tests.zoo.causes import CAUSES
from tests.zoo.entries import load_zoo

Results = dict[tuple[str, str, int], trial.Outcome]


def main() -> int:
    """Exit status 1 when anything is wrong, crashed, silent, or refused against what its entry says."""
    options = _options()
    torch.set_num_threads(1)
    zoo = load_zoo()
    chosen = options.only or [name for name, entry in zoo.items() if options.slow or not entry.slow]
    done = _read(options.results)
    for i, name in enumerate(chosen):
        trials = [("plain", 1)]
        for processes in options.processes:
            if processes in trial.processes_for(i, name) or options.only:
                trials += [(s, processes) for s in trial.strategies_for(zoo[name], options.strategies, processes)]
        for strategy, processes in trials:
            if (name, strategy, processes) in done:
                continue
            began = time.monotonic()
            outcome = (
                trial.attempt_plain(zoo[name]) if strategy == "plain" else trial.attempt(zoo[name], strategy, processes)
            )
            done[name, strategy, processes] = outcome
            line = {"model": name, "strategy": strategy, "processes": processes, "outcome": list(outcome)}
            with options.results.open("a") as file:
                file.write(json.dumps(line | {"seconds": round(time.monotonic() - began, 2)}) + "\n")
            if not options.quiet:
                print(f"{name} {strategy} x{processes}: {outcome.shown} {outcome.text[:300]}", flush=True)
    code = _report({key: outcome for key, outcome in done.items() if key[0] in chosen}, options.strategies)
    lines = map(json.loads, options.results.read_text().splitlines())
    print(f"{sum(line['seconds'] for line in lines):.0f} s for all trials of {options.results}")
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these entries alone")
    parser.add_argument("--strategies", nargs="+", default=list(trial.STRATEGIES), choices=list(trial.STRATEGIES))
    parser.add_argument(
        "--processes", type=lambda text: [int(part) for part in text.split(",")], default=[2, 3, 4], metavar="2,3,4"
    )
    parser.add_argument("--slow", action="store_true", help="the large models too")
    parser.add_argument("--quiet", action="store_true", help="print the table alone")
    parser.add_argument("--results", type=Path, default=Path("outputs/zoo.jsonl"), help="the file of done trials")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    return options


def _read(path: Path) -> Results:
    """The trials that a file has; of repeated ones the last."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(line["model"], line["strategy"], line["processes"]): trial.Outcome(*line["outcome"]) for line in lines}


def _report(results: Results, strategies: list[str]) -> int:
    """Print the table, counts of causes, the share of clean ones; the exit status."""
    columns = [("plain", 1)] + [(s, n) for s in strategies for n in (2, 3, 4)]
    columns = [column for column in columns if any(key[1:] == column for key in results)]
    print(f"\n{'model':32}" + "".join(f"{f'{s} x{n}':30}" for s, n in columns))
    for name in dict.fromkeys(key[0] for key in results):
        found = [results.get((name, *column)) for column in columns]
        print(f"{name:32}" + "".join(f"{outcome.shown if outcome else '-':30}" for outcome in found))
    causes = Counter(outcome.cause for outcome in results.values() if outcome.kind == "refused")
    for cause, count in causes.most_common():
        print(f"refused for {cause} ({CAUSES.get(cause, 'no cause of the list')}): {count}")
    kinds = Counter(outcome.kind for outcome in results.values())
    print(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()))
    _print_shares(results, strategies)
    unexpected = list(_unexpected(results))
    print("\n".join(["not as its entry says:", *unexpected]) if unexpected else "all as their entries say")
    return int(bool(unexpected))


def _print_shares(results: Results, strategies: list[str]) -> None:
    """How many trials of each strategy train clean: of all, and of those that need not be refused for what they are."""
    zoo = load_zoo()
    for strategy in strategies:
        outcomes = {key: outcome for key, outcome in results.items() if key[1] == strategy}
        free = [outcome for key, outcome in outcomes.items() if not zoo[key[0]].must_refuse(strategy)]
        if free:
            clean = sum(outcome.kind == "same" for outcome in free)
            print(
                f"{strategy}: {clean} of {len(free)} clean ({clean / len(free):.1%}), and {len(outcomes) - len(free)} "
                f"that must be refused; of all {clean / len(outcomes):.1%}"
            )


def _unexpected(results: Results) -> list[str]:
    """Lines about outcomes that an entry does not allow."""
    zoo, lines = load_zoo(), []
    for (name, strategy, processes), outcome in results.items():
        if strategy == "plain":
            allowed = trial.is_allowed_alone(zoo[name], outcome)
        else:
            allowed = trial.is_allowed(zoo[name], strategy, processes, outcome)
        if not allowed:
            lines.append(f"  {name} {strategy} x{processes}: {outcome.shown} {outcome.text}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
