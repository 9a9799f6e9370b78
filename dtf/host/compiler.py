"""What torch.compile needs of a host. Torch-free."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from dtf.core.errors import ConfigError, io_failure

_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Variables that turn torch.compile off without a word."""

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Names the folder of machine code. torch makes it when it is imported, whether anything is compiled or not."""


def check_cache_folder(environment: Mapping[str, str]) -> None:
    """Make the folder that a user names for machine code, as torch does when it is imported. ConfigError where that
    cannot be, or nothing can be written there; SaveError on a full disk.
    """
    folder = environment.get(CACHE_VARIABLE, "")
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise io_failure(error) or ConfigError(
            f"{CACHE_VARIABLE}={folder}: torch cannot make this folder, or write there, when it is imported "
            f"({error.strerror}); name another one, or unset it"
        ) from error


def compiler_lack(devices: str, environment: Mapping[str, str]) -> str:
    """What this host lacks for torch.compile on `devices` (`cpu` or `cuda`), and how to get it; empty: nothing."""
    off = [name for name in _SWITCHES if environment.get(name, "0") not in ("", "0")]
    if off:
        return f"{off[0]}={environment[off[0]]} turns torch.compile off; unset it"
    path = environment.get("PATH")
    if devices == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed: python -m pip install triton, in the version that this torch wants"
    key, names = ("CC", ("gcc", "clang")) if devices == "cuda" else ("CXX", ("g++",))
    names = (environment[key],) if environment.get(key) else names
    if not any(shutil.which(name, path=path) for name in names):
        language, package = ("C", "gcc") if devices == "cuda" else ("C++", "g++")
        return (
            f"no {language} compiler is installed ({' or '.join(names)}): apt install {package}, dnf install "
            f"{'gcc' if devices == 'cuda' else 'gcc-c++'}, or name one by {key}"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        return f"Python's headers are not installed ({header}): apt install python3-dev, dnf install python3-devel"
    return ""
