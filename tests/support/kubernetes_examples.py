"""The objects in examples/kubernetes: what the command in each file's first line prints, with a name that stays.

`python -m tests.support.kubernetes_examples` writes them anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from dtf.cli.main import main

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
COMMAND = "# python -m "


def command(path: Path) -> list[str]:
    """The arguments of dtf by which the objects of a file are printed."""
    first = path.read_text().split("\n", 1)[0]
    assert first.startswith(f"{COMMAND}dtf ") and first.endswith(" | kubectl apply -f -"), path
    return shlex.split(first.removeprefix(f"{COMMAND}dtf ").removesuffix(" | kubectl apply -f -"))


def printed(words: list[str]) -> str:
    """What the command prints, but for the Secret with the bundle; its name, digest and time are fixed ones."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0
    text = re.sub(r"\A# secret.yaml\n---\n.*?(?=^# )", "", out.getvalue(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\b[0-9a-f]{64}\b", "0123abcd" * 8, text)
    text = re.sub(r"-[0-9a-f]{6}-[0-9a-f]{8}\b", "-0a1b2c-0123abcd", text)
    return re.sub(r"\b[0-9]{8}-[0-9]{6}-[0-9a-f]{6}\b", "20260101-120000-0a1b2c", text)


def content(path: Path) -> str:
    return f"{path.read_text().splitlines()[0]}\n{printed(command(path))}"


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.yaml")):
        if file.read_text().startswith(COMMAND):
            file.write_text(content(file))
