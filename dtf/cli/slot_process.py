"""A slot's end: runs the trials that the process of a sweep sends, one after the other. See `slots`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from dtf.cli.slots import receive_order
from dtf.host import starting


def serve(order: dict[str, Any]) -> None:
    """Run trials until the process of the sweep closes its end, or dies, which the kernel answers with SIGKILL."""
    from dtf.launch.forkserver import die_with

    die_with(order["parent"])
    starting.listen()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, order["cores"])  # of the fork server and the ranks too, whose threads follow from it
    control = socket.socket(fileno=order["fd"])
    control.set_inheritable(False)
    if order["forks"]:
        from dtf.launch.forkserver_cache import prestart

        prestart([])
    from dtf.host.signals import Stop

    code = 0
    try:
        with Stop():  # a signal that comes between two trials is not forgotten
            while (trial := receive_order(control)) is not None:
                message = _run(trial)
                sys.stdout.flush()
                sys.stderr.flush()
                control.send(json.dumps(message).encode())
    except ConnectionError:
        pass
    finally:
        _leave(code)


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Run a trial: its config is composed here again, and has the values that it had there."""
    from dataclasses import replace

    from dtf.cli.main import reported
    from dtf.cli.run_trial import run_trial
    from dtf.config.command_line import parse_arguments
    from dtf.config.compose import Composed, Composer

    made: list[Composed] = []

    def compose() -> int:
        flags = parse_arguments(order["command"])
        composed = Composer(flags.config_dir, flags.config_name, order["typed"]).compose(flags.overrides)
        made.append(replace(composed, config=order["config"]))
        return 0

    code, best = reported(compose), None
    if not code:
        code, best = run_trial(made[0], Path(order["folder"]) if order["folder"] else None, reported)
    return {"code": int(code), "best": best}


def _leave(code: int) -> None:
    """End at once, with the fork server: threads of gloo may not outlive an interpreter that was a rank itself."""
    cache = sys.modules.get("dtf.launch.forkserver_cache")
    if cache is not None:
        cache.shut_down()
    os._exit(code)
