"""The one fork server of this launching process: started early, and kept for every run of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtf.host import devices
from dtf.host.devices import MOST_PROCESSES
from dtf.launch.forkserver import ForkServer

PRELOAD = ["dtf.cli.preload"]
"""What a rank imports before its first step. Must not touch CUDA: a forked process cannot use it after that."""

_server: ForkServer | None = None


def prestart(argv: Sequence[str]) -> None:
    """Start the fork server, which imports torch while this process composes the config.

    Only when the command line looks like a run whose ranks are forked on this host. A login node, from which jobs are
    submitted, must not load torch: where a file that dtf does not bring may choose the launcher, the words have to.
    """
    global _server
    flags = [
        word
        for word in argv
        if word.startswith("-")
        and word not in ("-m", "--multirun", "-r", "--run")
        and not word.startswith(("-cd", "--config-", "-cn"))
    ]
    words = dict(word.split("=", 1) for word in argv if "=" in word)
    in_slots = words.get("sweep.parallel", "0") not in ("0", "1")  # each has its own
    own_environment = any(key.lstrip("+").startswith("launcher.env") for key in words)
    forks = words.get("launcher", "local") in ("local", "static") and words.get("job", "train") in (
        "train",
        "verify",
        "relay",
        "doctor",
    )
    forks = forks and ("launcher" in words or not _may_choose_launcher(words, argv))
    if forks and not flags and not own_environment and not in_slots and _server is None:
        _server = _start({})


def _may_choose_launcher(words: dict[str, str], argv: Sequence[str]) -> bool:
    """Whether a config file of the user may choose the launcher: an experiment, or the root of the config."""
    named = words.get("experiment", words.get("+experiment", ""))
    own = Path(__file__).parents[1] / "conf" / "experiment"
    return any(word.startswith(("--config-name", "-cn")) for word in argv) or any(
        not (own / f"{name}.yaml").is_file() for name in named.strip("[]").split(",") if name
    )


def fork_server(environment: dict[str, str]) -> ForkServer:
    """The fork server, started if there is none.

    A new one when ranks need another environment from their first import on, or when the old one has died.
    """
    global _server
    if _server is not None and (
        _server.environment != _environment(environment) or (_server.used and not _server.alive)
    ):
        shut_down()
    if _server is None:
        _server = _start(environment)
    return _server


def shut_down() -> None:
    """End the fork server, if there is one. Called when the config is wrong, or nothing more is to be run."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def files(ranks: int) -> int:
    """Open files that are enough for the launching process and for a rank.

    A rank has a socket to each other rank, and may host their store.
    """
    return 128 + 4 * ranks


def _start(environment: dict[str, str]) -> ForkServer:
    devices.allow_files(files(MOST_PROCESSES))  # ranks inherit it
    return ForkServer(PRELOAD, _environment(environment))


def _environment(extra: dict[str, str]) -> dict[str, str]:
    return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **extra}  # is_available() without starting CUDA
