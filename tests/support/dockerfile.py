"""Executes the steps of a Dockerfile where there is no builder: as root of a folder, with this machine's programs.

The base image is this machine's own /usr, read-only, and a fresh Python environment, which sees the packages that this
interpreter has: pip finds there what it would fetch, and asks no index. Of the instructions those of dtf's Dockerfile
are known, and any other is an error.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Instruction = tuple[str, str]


def instructions(text: str) -> Iterator[Instruction]:
    """Keyword and rest of each instruction; continued lines are one."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        keyword, _, rest = line.strip().partition(" ")
        yield keyword.upper(), rest.strip()


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether a path of the context is left out, by the lines of .dockerignore: the last that matches decides."""
    out = False
    for pattern in patterns:
        keeps, name = pattern.startswith("!"), pattern.removeprefix("!")
        parents = [path, *map(str, Path(path).parents)]
        if name.startswith("**/"):
            matches = any(fnmatch.fnmatchcase(part, name[3:]) for part in Path(path).parts)
        else:
            matches = any(fnmatch.fnmatchcase(parent, name) for parent in parents if parent != ".")
        out = not keeps if matches else out
    return out


@dataclass
class Image:
    """The root of a container and what its Dockerfile says of its processes."""

    root: Path
    context: Path
    variables: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0"
    command: list[str] = field(default_factory=list)

    def build(self, text: str, **arguments: str) -> None:
        """Execute the instructions. CalledProcessError for a step that fails."""
        self._base()
        for keyword, rest in instructions(text):
            getattr(self, f"_{keyword.lower()}")(rest, arguments)

    def run(self, words: list[str], user: str, timeout_s: float = 300.0) -> str:
        """Standard output of a command in the container."""
        inner = " && ".join(
            [
                *(f"mount --rbind {shlex.quote(path)} {self._at(path)}" for path in self._seen()),
                f"mount --rbind /proc {self._at('/proc')}",
                f"mount --rbind /dev {self._at('/dev')}",
                "exec chroot "
                + (f"--userspec={user}:{user} " if user != "0" else "")
                + f"{shlex.quote(str(self.root))} "
                f"/bin/sh -c {shlex.quote(f'cd {self.directory} && exec {shlex.join(words)}')}",
            ]
        )
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", inner], env=self._environment(user), capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr[-3000:])
        return done.stdout

    # ------------------------------------------------------------ instructions

    def _arg(self, rest: str, given: dict[str, str]) -> None:
        name, _, default = rest.partition("=")
        self.arguments[name] = given.get(name, default)

    def _from(self, rest: str, given: dict[str, str]) -> None:
        assert re.fullmatch(r"python:[0-9.]+-slim", self._filled(rest)), rest

    def _env(self, rest: str, given: dict[str, str]) -> None:
        self.variables |= dict(word.split("=", 1) for word in shlex.split(self._filled(rest)))

    def _workdir(self, rest: str, given: dict[str, str]) -> None:
        self.directory = rest
        self._at(rest)

    def _user(self, rest: str, given: dict[str, str]) -> None:
        self.user = rest

    def _run(self, rest: str, given: dict[str, str]) -> None:
        self.run(["sh", "-c", self._filled(rest)], self.user)

    def _cmd(self, rest: str, given: dict[str, str]) -> None:
        self.command = json.loads(rest)

    def _copy(self, rest: str, given: dict[str, str]) -> None:
        *sources, target = rest.split()
        patterns = [
            line for line in (self.context / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")
        ]
        to = Path(f"{self.root}/{Path(self.directory, target)}")
        if target.endswith("/"):
            to.mkdir(parents=True, exist_ok=True)
        for source in sources:
            assert not ignored(source, patterns), f"{source} is not in the context"
            path = self.context / source
            if path.is_dir():
                shutil.copytree(path, to, symlinks=True, ignore=lambda folder, names: {
                    name for name in names if ignored(str(Path(folder, name).relative_to(self.context)), patterns)
                })  # fmt: skip
            else:
                shutil.copy(path, to / source if target.endswith("/") else to)

    # ------------------------------------------------------------ the base image

    def _base(self) -> None:
        for name in ("bin", "sbin", "lib", "lib64"):
            os.symlink(f"usr/{name}", self.root / name)
        for path in ("/tmp", "/home", "/var/tmp"):
            Path(self._at(path)).chmod(0o1777)
        shutil.copytree("/etc", self.root / "etc", symlinks=True, ignore_dangling_symlinks=True)
        for name, line in (
            ("passwd", "root:x:0:0::/root:/bin/sh"),
            ("group", "root:x:0:"),
            ("shadow", "root:*:::::::"),
        ):
            (self.root / "etc" / name).write_text(f"{line}\n")
        self.variables["PATH"] = "/opt/python/bin:/usr/sbin:/usr/bin"
        self.run([sys.executable, "-m", "venv", "/opt/python"], "0")
        (packages,) = self.root.glob("opt/python/lib/python3*/site-packages")
        for old in [*packages.glob("setuptools*"), *packages.glob("pkg_resources")]:  # newer images have none
            shutil.rmtree(old)
        (packages / "host.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")

    def _seen(self) -> list[str]:
        """Folders of this machine that the container sees."""
        paths = ["/usr", sys.base_prefix, sysconfig.get_paths()["purelib"], str(Path(sys.prefix, "bin"))]
        return [path for path in paths if not path.startswith("/usr/")]

    def _at(self, path: str) -> str:
        """The place of a folder of the container, which is made."""
        place = self.root / path.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        return str(place)

    def _filled(self, text: str) -> str:
        known = {**self.arguments, **self.variables}
        return re.sub(r"\$\{(\w+)\}", lambda name: known[name[1]], text)

    def _environment(self, user: str) -> dict[str, str]:
        home = "/root" if user == "0" else "/home/dtf"
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: no isolation, says pip
        return {"HOME": home, "LANG": "C.UTF-8", **offline, **self.variables}
