"""Environments of what dtf is compared with: named and pinned in bench/peers.toml, made once, kept in the user's cache.

python -m bench.peers              # make those that are missing, and say what each has
python -m bench.peers torchrec
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_SHARED = "of_the_running_interpreter.pth"
_DONE = "dtf-bench.json"
_TELL = "import importlib.metadata as m, json, sys; print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"


class Absent(Exception):
    """A peer is not there, and why."""


def declared() -> dict[str, dict[str, Any]]:
    """Of bench/peers.toml."""
    return tomllib.loads(Path(__file__).with_name("peers.toml").read_text())


def folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "dtf-bench")


@cache
def environment(name: str) -> tuple[str, dict[str, str]]:
    """Its interpreter, and the version of each package that peers.toml names for it. Made anew where peers.toml or the
    running interpreter is another than it was made with. Absent with the last words of what failed.
    """
    wish = declared()[name]  # KeyError: peers.toml has no such one
    packages = sysconfig.get_path("purelib")
    mark = hashlib.sha256(json.dumps([wish, sys.version, packages]).encode()).hexdigest()
    place = folder() / name
    python = place / "bin" / "python"
    try:
        if _mark_of(place) != mark:
            _make(place, wish, packages)
            (place / _DONE).write_text(json.dumps({"made_from": mark}))
    except OSError as error:
        raise Absent(f"no environment {name}: {error}") from error
    names = [text.partition("==")[0] for text in [*wish["packages"], *wish.get("alone", [])]]
    names += ["torch"] if wish["torch"] == "shared" else []
    said = _done([str(python), "-c", _TELL, *names], name)
    return str(python), json.loads(said)


def python_of(name: str) -> str:
    """See `environment`."""
    return environment(name)[0]


def versions_of(name: str) -> dict[str, str]:
    """See `environment`."""
    return environment(name)[1]


def _mark_of(place: Path) -> str:
    try:
        return json.loads((place / _DONE).read_text())["made_from"]
    except (OSError, ValueError, KeyError):
        return ""


def _make(place: Path, wish: dict[str, Any], packages: str) -> None:
    if Path(sys.prefix).resolve() == place.resolve():
        raise Absent(f"{place} would be made anew, and runs this command; run it in the environment that dtf is in")
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {place}: {', '.join([*wish['packages'], *wish.get('alone', [])])}", file=sys.stderr, flush=True)
    _done([sys.executable, "-m", "venv", str(place)], "venv")
    python = str(place / "bin" / "python")
    if wish["torch"] == "shared":  # behind its own packages: what it installs comes first
        own = _done([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "venv").strip()
        Path(own, _SHARED).write_text(f"{packages}\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if wish.get("alone"):
        _done([*pip, "--no-deps", *wish["alone"]], "pip")
    _done([*pip, *wish["packages"]], "pip")
    _done([python, "-c", "; ".join(f"import {module}" for module in wish["needs"])], "import")


def _done(command: list[str], what: str) -> str:
    """Standard output. Absent with the last line of standard error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise Absent(f"{what}: {lines[-1][:200]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*declared(), []], help="of peers.toml; by default all")
    for name in parser.parse_args().names or declared():
        try:
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in versions_of(name).items())}")
        except Absent as error:
            print(f"{name}: not there: {error}")


if __name__ == "__main__":
    main()
