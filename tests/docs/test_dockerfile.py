"""The Dockerfile: its steps, executed in a root of their own; what it copies; what it starts."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.dockerfile import Image, ignored, instructions

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_its_default_command_is_the_first_of_the_readme() -> None:
    steps = dict(instructions(TEXT))
    first = re.search(r"^\.venv/bin/(python -m dtf.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert first and steps["CMD"] == str(first[1].split()).replace("'", '"')


def test_its_context_is_what_it_copies() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    copied = {word for keyword, rest in instructions(TEXT) if keyword == "COPY" for word in rest.split()[:-1]}
    kept = {entry.name for entry in ROOT.iterdir() if not ignored(entry.name, patterns)}
    assert kept == copied
    for path in ("outputs/a/run.json", ".git/config", ".venv/bin/python", "dtf/api/__pycache__/job.pyc", "tests/x.py"):
        assert ignored(path, patterns), path
    assert not ignored("dtf/conf/launcher/local.yaml", patterns)


@pytest.mark.slow
def test_its_steps_make_an_image_whose_default_command_trains(tmp_path: Path) -> None:
    """That the base image, the downloads and another architecture work, this does not show."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    image = Image(tmp_path / "root", ROOT)
    image.root.mkdir()
    tmp_path.chmod(0o755)
    image.build(TEXT)
    assert image.user == "1000" and not (image.root / "src").exists()
    began = time.monotonic()
    out = image.run([*image.command, "launcher.threads=1"], image.user)
    print(f"the default command took {time.monotonic() - began:.0f} s\n{out[-1500:]}")
    (record,) = image.root.glob("home/dtf/outputs/*/*/run.json")
    assert '"exit": 0' in record.read_text()
    where = image.run(["python", "-c", "import dtf; print(dtf.__file__)"], image.user)
    assert where.startswith("/opt/python/"), "not the checkout"
