"""Counts what makes the host wait for a device, while a step runs on a CPU that stands in for one; and says where the
model lies in memory.
"""

from __future__ import annotations

import traceback
from collections import Counter
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtf.strategies.replica import Replica
from tests.support.harness import Case, _Run

_CALLS = frozenset(
    {
        *("item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "unique", "masked_select", "equal", "is_nonzero"),
        *("allclose", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__"),
        *("pin_memory", "new_tensor", "tensor", "as_tensor"),
    }
)
"""Of torch's Python interface. The last four copy memory that is not pinned."""

_OPERATORS = frozenset(
    {
        *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"),
        *("_unique2", "unique_dim", "unique_consecutive"),
    }
)
"""Of the dispatcher: what functions in C++ and the backward pass call."""


class _Calls(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CALLS:
            self._found[f"{name} in {_place()}"] += 1
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = [index for index in (args[1] if name in ("index", "index_put_") else ()) if index is not None]
        # torch's DistributedDataParallel counts the uses of parameters in host memory on any device, as int32
        waits = name in _OPERATORS and args[0].dtype is not torch.int32
        if waits or any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            self._found[f"{name} in {_place()}"] += 1
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """Where in the package the host waits."""
    frames = [frame for frame in traceback.extract_stack() if "/dtf/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/dtf/')[2]}:{frames[-1].lineno}" if frames else "torch"


def train(rank: int, size: int, **case: Any) -> dict[str, Any]:
    """As `harness.train`. Returns how often the steps after the first made the host wait, `waits`; and `places`, for
    each replica the addresses of all parameters and buffers in each pass.
    """
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    places: dict[str, list[list[int]]] = {}
    with patch("dtf.host.devices.host_reads", lambda device_type: False):
        run = _Run(rank, size, Case(**case))
        step, accumulate, steps = run.program.step, Replica.accumulate, Counter[str]()

        def counting(work: Any, key: str) -> Any:
            def counted(*args: Any) -> Any:
                steps[key] += 1
                if steps[key] == 1:  # the recipe's first answers are checked
                    return work(*args)
                with _Calls(found), _Operators(found):
                    return work(*args)

            return counted

        def passes(replica: Replica, *args: Any) -> Any:
            """In whichever thread the replica computes: a mode is that of one thread."""
            mine = places.setdefault(str(id(replica)), [])
            hook = replica.model.register_forward_pre_hook(lambda model, inputs: mine.append(_addresses(model)))
            try:
                return counting(accumulate, f"passes of {id(replica)}")(replica, *args)
            finally:
                hook.remove()

        run.program.step = counting(step, "step")  # type: ignore[method-assign]
        with patch.object(Replica, "accumulate", passes):
            run.fit()
    return {"waits": dict(found), "places": list(places.values()), "steps": steps["step"]}


def _addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())]
