"""Measure dtf beside its peers, and write the page about it: docs/performance.md.

    python -m bench [--only overhead,start] [--quick] [--again]
    python -m bench --page

Parts that were measured on this machine, commit and versions are left out, so that an interrupted command goes on where
it was.
Figures are kept in bench/results; those of --quick are not. The parts on images read the archive or folder of JPEG
files that the environment variable DTF_BENCH_IMAGES names.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from bench import keeper, page
from bench.parts import PARTS
from bench.peers import Absent, versions_of
from bench.results import FOLDER, Record, own_versions, read, record, this_commit, this_machine, write
from bench.rows import Row, table


def measured(part: str, commit: str, quick: bool) -> Record:
    """A part that fails is a row that says why."""
    own, others = own_versions(), dict[str, str]()
    for name in PARTS[part].peers:
        try:
            found = {key: text for key, text in versions_of(name).items() if own.get(key) != text}
            others |= {f"{key} of {name}" if key in own else key: text for key, text in found.items()}
        except Absent as error:
            print(error, file=sys.stderr, flush=True)
    began = time.perf_counter()
    try:
        rows = PARTS[part].measure(quick)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the other parts go on
        traceback.print_exc()
        rows = [Row(PARTS[part].title, "dtf", not_run=f"{type(error).__name__}: {error}".splitlines()[0][:300])]
    return record(part, commit, rows, time.perf_counter() - began, others)


def unusable(folder: Path) -> str:
    """Why nothing can be kept there; empty where it can."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK) else f"{there} cannot be written to"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; parted by commas")
    parser.add_argument("--quick", action="store_true", help="few rounds of small sizes, not kept")
    parser.add_argument(
        "--again", action="store_true", help="also what was measured on this machine, commit and versions"
    )
    parser.add_argument("--page", action="store_true", help="write docs/performance.md from what is kept")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of what is kept")
    given = parser.parse_args()
    if given.page:
        page.write(given.results)
        return 0
    if fault := unusable(given.results):
        parser.error(f"--results: {fault}")
    if unknown := set(given.only.split(",")) - set(PARTS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; choices: {', '.join(PARTS)}")
    machine, commit = this_machine(), this_commit()
    path = given.results / f"{machine.name()}.jsonl"
    print(f"{machine.text()}, commit {commit}", flush=True)
    if given.quick:
        print("quick: few rounds of small sizes; these figures mean nothing and are not kept", flush=True)
    failed = False
    for part in PARTS:
        if part not in given.only.split(","):
            continue
        kept = read(path).get(part)
        whole = kept and any(row.values for row in kept.rows)
        same = kept and kept.commit == commit and own_versions().items() <= kept.versions.items()
        ran = whole and same and not commit.endswith("+")
        if kept and ran and not (given.again or given.quick):
            print(f"\n{part}: measured on {kept.date}; --again measures it once more", flush=True)
            continue
        print(f"\n{part}: {PARTS[part].title}", file=sys.stderr, flush=True)
        found = measured(part, commit, given.quick)
        versions = ", ".join(f"{name} {text}" for name, text in found.versions.items())
        print(f"\n{part}, {found.date}, {found.seconds:.0f} s, {versions}\n\n{table(found.rows)}", flush=True)
        broken = not any(row.values for row in found.rows)
        failed |= broken
        if not given.quick and not (broken and whole):  # what was measured before stays
            write(path, read(path) | {part: found})
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    keeper.keep()
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("interrupted; parts that were measured before are kept", file=sys.stderr)
        raise SystemExit(130) from None
