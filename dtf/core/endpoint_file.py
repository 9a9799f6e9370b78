"""The file by which `job=status` finds the servers of a live run from its folder: endpoints, and a token that allows to
read the status only. It goes when the run ends.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dtf.core.errors import DataError, PeerError
from dtf.core.files import small_json

NAME = "live.json"


@dataclass(frozen=True)
class EndpointFile:
    """How to ask the servers of a run. `tls`: paths of ca, cert and key; empty without TLS."""

    endpoints: list[str]
    token: str
    tls: dict[str, str]
    mutual: bool


def announce(folder: Path, live: EndpointFile) -> None:
    """Write the file, readable by the user alone; replaces an earlier one."""
    new = folder / f".{NAME}.new"
    withdraw(folder)
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(live), file)
    os.replace(new, folder / NAME)


def withdraw(folder: Path) -> None:
    """Remove the file: the run has ended."""
    with suppress(OSError):
        (folder / NAME).unlink()


def find(folder: Path) -> EndpointFile:
    """Read the file of the run in `folder`.

    DataError when there is no such folder; PeerError when the run has ended or has no servers.
    """
    if not folder.is_dir():
        raise DataError(f"job.run_folder={folder} does not exist; give the folder of a run")
    try:
        live = EndpointFile(**small_json(folder / NAME))
        texts = [live.token, *live.endpoints, *live.tls.values()]
        if not live.endpoints or not all(isinstance(text, str) for text in texts):
            raise TypeError("it is not what a run writes")
        return live
    except FileNotFoundError:
        raise PeerError(
            f"no run in {folder} can be asked: it has ended, has not begun, or has no servers (strategy=pserver has)"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PeerError(f"{folder / NAME} cannot be read: {error}") from None
