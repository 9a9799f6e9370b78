"""What a run in this process sets for the whole process, so that code which goes on afterwards finds what it left.

A run starts with torch's own number formats, default device and modes, as in a process of its own, whatever a notebook
has set.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch

from dtf.core.errors import ConfigError
from dtf.model.compiled_forward import CACHE_VARIABLE, compiler_options_kept


@contextmanager
def process_state_kept() -> Iterator[None]:
    """A context for one run, at whose end the state of torch, Python and numpy is what it was at its beginning: number
    of threads, number formats and switches, default device, modes of this thread, generators, options of the compiler.

    Inside, number formats, default device and modes are those of a new process. ConfigError within
    `with torch.device(...)`.
    """
    with ExitStack() as stack:
        for keep in (_cache_variable, _threads, _switches, _defaults, _generators, compiler_options_kept):
            stack.enter_context(keep())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _cache_variable() -> Iterator[None]:
    before = os.environ.get(CACHE_VARIABLE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(CACHE_VARIABLE, None)
        else:
            os.environ[CACHE_VARIABLE] = before


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _switches() -> Iterator[None]:
    """Those that `set_switches` sets, and the current GPU."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    matmul, device = torch.get_float32_matmul_precision(), None
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = before
        torch.set_float32_matmul_precision(matmul)
        if device is not None:
            torch.cuda.set_device(device)


@contextmanager
def _defaults() -> Iterator[None]:
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    own = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)  # of set_default_device, in each thread
    set_device = getattr(own, "device_context", None) is not None
    try:
        torch.set_default_dtype(torch.float32)
        if set_device:
            torch.set_default_device(None)
        if torch.get_default_device().type != "cpu":
            raise ConfigError(
                f"a run in this process was started within `with torch.device({torch.get_default_device().type!r})`, "
                "which would move its tensors; start it outside of that block"
            )
        yield
    finally:
        torch.set_default_dtype(dtype)
        if set_device:
            torch.set_default_device(device)


@contextmanager
def _generators() -> Iterator[None]:
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    restore: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        *(partial(generator.set_state, generator.get_state()) for generator in generators),
    ]
    try:
        yield
    finally:
        for put_back in restore:
            put_back()
