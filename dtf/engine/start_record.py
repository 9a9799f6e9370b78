"""Remembers which models have passed the check at the start, so that it is made once: by the code, the config and the
number of processes.

A record lies in the run folder, for whoever goes on with the run, and in the user's cache folder, for later runs. One
that is damaged, or that others may have written, counts for nothing: then the check is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtf.api.recipe import Recipe
from dtf.api.task import StartCheck
from dtf.checkpoint.resolve_path import run_folder_of
from dtf.core.author_line import DTF
from dtf.core.consistency import keys_of_all_commands
from dtf.core.main_module import is_interactive
from dtf.core.own_code import is_own
from dtf.core.version import __version__
from dtf.host.user_cache import user_cache
from dtf.model.attributes import digests

FORMAT = 1
NAME = "start_check.json"
"""The record in a run folder."""
KEPT = 1000
"""Records in the cache folder; the oldest are removed."""
_LONGEST = 1 << 16
"""Bytes of a record."""
_GROUPS = ("recipe", "strategy", "precision", "step", "sparse", "plugins")
"""What of the config decides the outcome."""
_KNOWN = sys.stdlib_module_names | {"torch", "dtf"}
"""Packages whose version stands for their files."""


@dataclass(frozen=True)
class StartRecord:
    """What passed, and where it is remembered. `digest`: empty where the code has no files to compare."""

    digest: str
    processes: int
    folder: Path
    """Of the run."""

    def read(self, resume: str) -> tuple[dict[str, str] | None, dict[str, str]]:
        """What the check found when it was made before (None: it is to be made), and the plans of this run, see
        `StartCheck`. `resume`: `checkpoint.resume`.

        A run that goes on does so with any number of processes; others need a record with as many.
        """
        if not self.digest:
            return None, {}
        plans: dict[str, str] = {}
        for folder in (self.folder, run_folder_of(resume)):
            record = _read(folder / NAME, self.digest) if folder is not None else None
            if record is not None:
                plans = record.get("plans", {})
                if record["found"] is not None:
                    return record["found"], plans
                break  # a run that had plans alone
        cache = user_cache("start_checks")
        record = _read(cache / self._name, self.digest) if cache is not None else None
        return record["found"] if record is not None and record["processes"] == self.processes else None, plans

    def write(self, check: StartCheck) -> None:
        """Remember what the check has found, for those who go on with this run; in the cache if it is news.

        What cannot be written is not remembered, and the next start makes the check again.
        """
        found = check.found
        if not self.digest or (found is None and not check.plans):
            return
        record = {"format": FORMAT, "digest": self.digest, "processes": self.processes, "found": found}
        with suppress(OSError):
            _write(self.folder / NAME, record | {"plans": check.plans})
        cache = user_cache("start_checks")
        if cache is None or not check.fresh:
            return
        with suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(cache / self._name, record)
            _prune(cache)

    @property
    def _name(self) -> str:
        return f"{self.digest[:32]}-{self.processes}.json"


def start_digest(config: dict[str, Any], recipe: Recipe, model: nn.Module, device: str, data: Any) -> str:
    """A text that differs where the check at the start might end otherwise: with the code of the recipe and the model,
    the values in it, the config, the data, or the versions of what computes. Empty where that cannot be told.

    The seed, the optimizer and the schedule are not in it. `data`: what tells one data set from another.
    """
    code = _code(recipe, model)
    if code is None:
        return ""
    shared = keys_of_all_commands(config)
    facts = {
        "dtf": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "config": {group: shared.get(group) for group in _GROUPS},
        "data": data,
        "modules": [(name, type(module).__qualname__) for name, module in model.named_modules()],
        "shapes": [(name, tuple(t.shape), str(t.dtype)) for name, t in [*_tensors(model)]],
        "attributes": digests(model),
        "code": code,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


# ------------------------------------------------------------ code


def _code(recipe: Recipe, model: nn.Module) -> dict[str, str] | None:
    """What tells source files from others: dtf's own; those loaded from outside of Python's folders for libraries; of
    libraries that define the recipe or a part of the model those that are loaded, of others those that own files use.
    None where a class has no file, or its code is none of Python's; and where somebody types what runs here, whose
    files may have changed since they were imported.
    """
    if is_interactive():
        return None
    classes = {cls for part in (recipe, *model.modules()) for cls in type(part).__mro__}
    own = {cls.__module__ for cls in classes} - {"builtins", "__builtin__"}
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return None
    if any(not _has_file(name) for name in own if not _is_frozen(name)):
        return None
    files = {
        name: path
        for name, module in sorted(sys.modules.items())
        if isinstance(path := getattr(module, "__file__", None), str)
        and name.partition(".")[0] not in _KNOWN
        and not path.startswith(DTF)
    }
    theirs = {name for name, path in files.items() if is_own(path)}
    used = {source for name in theirs for source in _used_by(name)}
    used |= {source.partition(".")[0] for source in used}
    packages = {name.partition(".")[0] for name in own}
    found = {"dtf": _dtf()}
    for name, path in files.items():
        if name in theirs:
            found[name] = _digest(path)
        elif name in used or name.partition(".")[0] in packages:
            found[name] = _stamp(path)
    return None if "" in found.values() else found


def _used_by(name: str) -> Iterator[str]:
    """The modules that the names in a module come from."""
    for value in list(vars(sys.modules[name]).values()):
        source = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(source, str):
            yield source


def _dtf() -> str:
    """Of all source files of dtf."""
    paths = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(DTF, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    return hashlib.sha256(repr([(path, _stamp(path)) for path in sorted(paths)]).encode()).hexdigest()


def _stamp(path: str) -> str:
    """Size and time of change of an installed file, of which there are hundreds."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _is_frozen(name: str) -> bool:
    """Whether a module is a part of the interpreter."""
    return name in sys.builtin_module_names or name.partition(".")[0] in sys.stdlib_module_names


def _has_file(name: str) -> bool:
    path = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(path, str) and os.path.isfile(path)


def _digest(path: str) -> str:
    """Of the content of a file. Empty where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


# ------------------------------------------------------------ files


def _seal(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _write(path: Path, record: dict[str, Any]) -> None:
    """Replace a record whole: several runs may write one of the same name at the same time."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(record | {"seal": _seal(record)}, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(path: Path, digest: str) -> dict[str, Any] | None:
    """A whole record of this digest that this user has written. None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            record = json.loads(file.read(_LONGEST))
        seal = record.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    if seal != _seal(record) or record.get("format") != FORMAT or record.get("digest") != digest:
        return None
    for texts in (record.get("found") or {}, record.get("plans", {})):
        if not isinstance(texts, dict) or not all(isinstance(text, str) for pair in texts.items() for text in pair):
            return None
    return record


def _prune(cache: Path) -> None:
    """Remove the oldest records beyond KEPT, and what killed processes left half written."""
    entries = [entry for entry in os.scandir(cache) if entry.is_file(follow_symlinks=False)]
    if len(entries) > KEPT:
        for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime)[: len(entries) - KEPT]:
            os.unlink(entry.path)
