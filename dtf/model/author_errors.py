"""Errors inside what a recipe's author wrote become errors that name the method or module, and the author's line.

The traceback tells all of it, so nothing is recorded while a model runs.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch
from torch import nn

from dtf.api.evaluator import Evaluator
from dtf.api.recipe import Dataset, Recipe
from dtf.core import nest
from dtf.core.author_line import DTF, RECIPES, author_line
from dtf.core.errors import ConfigError, DataError, DtfError
from dtf.core.types import Batch

_CALLED_BY_AUTHORS = tuple(
    DTF + place for place in ("api", "core", "model/losses.py", "model/metrics.py", "model/auc.py")
)
_TORCH = f"{torch.__path__[0]}{os.sep}"
_BASES = (Recipe, Dataset, Evaluator)
_METHODS = frozenset(name for base in _BASES for name in dir(base) if name == "__len__" or not name.startswith("__"))
_CALL = re.compile(r"^(?:.*<locals>\.)?(\w+)\.(\w+)\(\) (?:takes|missing|got)")
_NO_CLASS = re.compile(r"^Target -?\d+ is out of bounds")
_NOT_THEIRS = ("gloo", "NCCL", "CUDA", "cuDNN", "CUBLAS", "out of memory", "allocate memory")
"""Words in errors of other causes: another rank is gone, a device failed, there is not enough memory."""
_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in errors of torch that have no class of their own."""
_OPENS_DATA = ("open_data", "open_inputs", "fetch")


@contextmanager
def name_author_errors() -> Iterator[None]:
    """A context: an error that a method of a recipe, or a module of its model, raises becomes one that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        named = author_error(error)
        if named is None:
            raise
        raise named from error


def author_error(error: BaseException) -> DtfError | None:
    """What to raise for an error that comes from a recipe's methods, a data set's, or its model's passes: a ConfigError
    that names it, or a DataError where a file of the data cannot be read. None for errors of other causes.
    """
    if isinstance(error, DtfError | MemoryError | ConnectionError | torch.distributed.DistError):
        return None
    if isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _NOT_THEIRS):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = frames[_last_call(frames) + 1 :]
    if inside and _is_communication(inside[-1][0].f_code.co_filename) and isinstance(error, RuntimeError):
        return None
    who, opens_data = _called(frames, inside, error)
    if not who:
        return None
    place = author_line(inside)
    text = f"{who} raised {type(error).__name__}: {error}{f', at {place}' if place else ''}"
    rows = next(
        (rows for frame, _ in reversed(frames) for rows in frame.f_locals.values() if isinstance(rows, Batch)), None
    )
    if rows is not None and (" pass of " in who or who.endswith((".loss()", ".measure()"))):
        text += f"; the rows were {_shapes(rows)}"
    if _NO_CLASS.search(str(error)):
        text += "; targets are numbers of classes from 0 on, and the model needs an output for each"
    if type(error).__name__ == "BdbQuit":
        text += "; breakpoint() needs a terminal: use launcher=inline with a strategy of one process, such as ddp"
    named = DataError(text) if opens_data and isinstance(error, OSError) else ConfigError(text)
    named.by_author = True
    return named


def memory_error(error: BaseException) -> ConfigError | None:
    """What to raise where there is not enough memory, of the host or the device. None for errors of other causes."""
    if isinstance(error, DtfError) or not (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY))
    ):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = frames[_last_call(frames) + 1 :]
    who, place = _called(frames, inside, error)[0], author_line(inside)
    what = " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
    where = f"{f' in {who}' if who else ''}{f', at {place}' if place else ''}"
    return ConfigError(
        f"there is not enough memory{where} ({what[:400]}); each process needs less with a smaller "
        "step.micro_batch_rows, with step.remat=blocks or under strategy=fsdp, and a host with fewer "
        "launcher.processes"
    )


def line_of(error: Exception) -> str:
    """The author's line at which a pass failed, `my_model.py:12 in forward`; empty where there is none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return author_line(frames[_last_call(frames) + 1 :])


def _shapes(rows: Batch) -> str:
    """`inputs (8, 3) float32, targets (8,) int64`."""
    named = nest.named(rows.inputs, "inputs") | nest.named(rows.targets, "targets")
    return ", ".join(
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in named.items()
        if isinstance(tensor, torch.Tensor)
    )


def _last_call(frames: list[tuple[FrameType, int]]) -> int:
    """The place of the last frame of dtf's own machinery, -1 without one."""
    return max((i for i, (frame, _) in enumerate(frames) if _calls(frame.f_code)), default=-1)


def _called(
    frames: list[tuple[FrameType, int]], inside: list[tuple[FrameType, int]], error: BaseException
) -> tuple[str, bool]:
    """What dtf had called when the error came, "" where that is nobody's code, and whether it reads data."""
    for frame, _ in inside:
        this, name = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(this, _BASES) and name in _METHODS:
            return f"{type(this).__name__}.{name}()", name in _OPENS_DATA
    if reader := _reader(frames, inside):
        return reader, True
    backward = any(frame.f_code.co_filename.endswith("autograd/__init__.py") for frame, _ in inside)
    modules = [this for frame, _ in inside if isinstance(this := frame.f_locals.get("self"), nn.Module)]
    if modules:
        of = "backward" if backward else "forward"
        return f"the {of} pass of {_module_name(frames, modules[-1])}", False
    if backward:
        return "the backward pass of the model", False
    call = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if call and call[2] in _METHODS:
        return f"{call[1]}.{call[2]}()", False
    return "", False


def _reader(frames: list[tuple[FrameType, int]], inside: list[tuple[FrameType, int]]) -> str:
    """What a data set of dtf's own had called for rows of the author's: `Photos.__getitem__(7)`, the collate function.
    Empty where none was reading.
    """
    calls = frames[: len(frames) - len(inside)]
    reading = [i for i, (frame, _) in enumerate(calls) if frame.f_code.co_name == "fetch"]
    source = calls[reading[-1]][0].f_locals.get("self") if reading else None
    if not isinstance(source, Dataset):
        return ""
    items = [frame for frame, _ in calls[reading[-1] :] if frame.f_code.co_name == "_item"]
    row = items[-1].f_locals["number"] if items else None
    if not inside:
        return "" if row is None else f"row {row} of the data set"
    first = inside[0][0]
    if first.f_code.co_name in ("__getitem__", "__getitems__"):
        owner = type(first.f_locals.get(first.f_code.co_varnames[0])).__name__  # its own `self`, whatever it is called
        return f"{owner}.{first.f_code.co_name}({'...' if row is None else row})"
    return str(getattr(source, "batch_source", "")) if row is None else f"what makes row {row} of the data set"


def _module_name(frames: list[tuple[FrameType, int]], module: nn.Module) -> str:
    """`blocks.0 (Residual)`: its name in the outermost module that was called."""
    kind = type(module).__name__.removeprefix("FSDP").removeprefix("Divided")
    for frame, _ in frames:
        root = frame.f_locals.get("self")
        if isinstance(root, nn.parallel.DistributedDataParallel):
            root = root.module
        if isinstance(root, nn.Module):
            name = next((name for name, other in root.named_modules() if other is module), None)
            if name is not None:
                return f"{name} ({kind})" if name else f"the model ({kind})"
    return f"a {kind}"


def _calls(code: CodeType) -> bool:
    """Whether code is of dtf's own machinery: no recipe, no function that recipes call, and not between torch and
    its operators.
    """
    path = code.co_filename
    if not path.startswith(DTF) or code.co_name in ("__torch_dispatch__", "__torch_function__"):
        return False
    return not path.startswith((RECIPES, *_CALLED_BY_AUTHORS))


def _is_communication(path: str) -> bool:
    distributed = f"{_TORCH}distributed{os.sep}"
    return path.startswith(distributed) and not path.startswith(f"{distributed}tensor{os.sep}")
