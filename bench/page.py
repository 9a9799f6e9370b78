"""docs/performance.md, from the figures in bench/results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.parts import PARTS
from bench.results import FOLDER, ROOT, Record, read
from bench.rows import table

PAGE = ROOT / "docs" / "performance.md"
_HEAD = """# How fast is it?

dtf beside its peers and beside loops written by hand, in the same run, in turn, with the same threads, precision
and rows; what else differs stands in the settings. This page is made by `python -m bench --page` from the figures in
`bench/results`; do not edit it. Your figures will differ.

```
python -m bench --quick                  # a trial of some minutes; nobody should quote it
python -m bench                          # all parts that were not measured on this machine, commit and versions
python -m bench --only overhead,start    # these alone
python -m bench --again --only start     # once more
python -m bench --page                   # this page
```

The parts on images read the archive or folder of JPEG files that the environment variable `DTF_BENCH_IMAGES` names.

`python -m bench.peers` makes the environments of the peers beforehand, in the user's cache folder. Their versions are
pinned in [bench/peers.toml](../bench/peers.toml). Where their requirements allow it they use the torch of dtf's
environment. A peer that cannot be installed, or fails, is a row that says why.

- **median, range**: over the rounds. In each round the contestants of a table take turns, each time in the other
  direction.
- **processor**: processor time of all processes of a contestant, for the same work as the median.
- **time / that of X**: of each round, the time of this row over that of row X, or the rate of X over that of this row;
  the median of these ratios, and the 95 % interval of that median by ranks. Above 1, X is faster. With fewer than six
  rounds there is no interval.
- **rounds**: how many figures the median is of, one for each turn. The heading says how many steps a turn has; else a
  turn is one step, or one whole command, as the unit says. Of images it is a second or more of whole batches.
- **loss**: the mean over the steps of the last turn; of memory formats and compiled models that of the first step.
  Where contestants should compute the same and a loss differs, the row says so and has no figures. With parameter
  servers only `sync` computes the same; `async` may be 5 % apart, and Paddle, whose Adam is another, 15 %.
- **decoding alone**: what no reader of these files can be faster than. It makes no batches, and is no contestant.
"""


def render(files: Mapping[str, Mapping[str, Record]]) -> str:
    """The page. `files`: records by part, by name of file. Each machine has its own heading, whatever file it is in."""
    texts = [_HEAD]
    if not any(files.values()):
        texts.append("Nothing has been measured yet.\n")
    records = [one for some in files.values() for one in some.values()]
    for machine in sorted({one.machine.text() for one in records}):
        texts.append(f"## On {machine}\n")
        here = [one for one in records if one.machine.text() == machine]
        missing = ", ".join(part for part in PARTS if part not in {one.part for one in here})
        texts += [_section(one, what.title) for part, what in PARTS.items() for one in here if one.part == part]
        texts += [f"Not measured on this machine: {missing}.\n"] if missing else []
    return "\n".join(texts)


def _section(one: Record, title: str) -> str:
    versions = ", ".join(f"{name} {text}" for name, text in one.versions.items())
    head = f"### {title}\n\n`python -m bench --only {one.part}`, {one.date}, commit {one.commit}, {one.seconds:.0f} s. "
    return f"{head}{versions}.\n\n{table(one.rows)}\n"


def stored(folder: Path = FOLDER) -> dict[str, dict[str, Record]]:
    """All that was measured and kept."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.jsonl"))}


def write(folder: Path = FOLDER) -> None:
    PAGE.write_text(render(stored(folder)))
