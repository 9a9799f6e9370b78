"""How much memory a rank will need, estimated before training from a few rows, and how much it used."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_is_leaf, tree_leaves

from dtf.core.text import bytes_text
from dtf.core.types import Memory

_PLAIN = frozenset({bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments of an operation that are no tensors and hold none: most of them, in each of its calls."""


class Footprint(TorchDispatchMode):
    """Counts the memory of tensors in a forward and backward pass. Memory that a kernel takes for itself is not seen.

    `saved_bytes`: bytes that forward allocates, that are still there when backward starts, and that nobody holds in the
    end: without gradients. `recomputed_bytes`: the most at one time of what backward computes again (activation
    checkpointing). The peak is their sum.
    """

    supports_higher_order_operators = True  # torch refuses to run them otherwise

    def __init__(self) -> None:
        super().__init__()
        self.saved_bytes = self.recomputed_bytes = 0
        self._count = 0
        self._known: dict[int, weakref.ref] = {}  # storages by id
        self._made: dict[int, int] = {}  # number of the allocation -> bytes, while it is there
        self._found: dict[int, int] = {}  # those of them that backward found
        self._recomputed = 0
        self._backward = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's default wraps the method so that its first call imports torch._dynamo, a second's work."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        backward = torch._C._current_graph_task_id() >= 0
        if backward and not self._backward:
            self._backward, self._found = True, dict(self._made)
        for storage in _storages((args, kwargs)):
            self._meet(storage, made=False, again=False)  # unless known, it was there before the pass
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            # gradients are computed without a graph of their own
            self._meet(storage, made=True, again=backward and torch.is_grad_enabled())
        return results

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._known.clear()  # and with it all calls of `_lose`
        self.saved_bytes = sum(size for number, size in self._found.items() if number not in self._made)

    def _meet(self, storage: torch.UntypedStorage, made: bool, again: bool) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._count += 1
        self._known[key] = weakref.ref(storage, partial(self._lose, key, self._count, size if again else 0))
        if made:
            self._made[self._count] = size
        if again:
            self._recomputed += size
            self.recomputed_bytes = max(self.recomputed_bytes, self._recomputed)

    def _lose(self, key: int, number: int, again: int, reference: weakref.ref) -> None:
        self._known.pop(key, None)
        self._made.pop(number, None)
        self._recomputed -= again


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if is_traceable_wrapper_subclass(value):  # a DTensor: the tensor inside is what takes memory
                waiting += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            elif value.layout is torch.strided:
                yield value.untyped_storage()
        elif type(value) is tuple or type(value) is list:
            waiting += value
        elif type(value) is dict:
            waiting += value.values()
        elif value is not None and type(value) not in _PLAIN and not tree_is_leaf(value):
            waiting += tree_leaves(value)


def activations(trials: Sequence[tuple[int, Footprint]], rows: int, under_way: float = 1.0) -> int:
    """Bytes of activations for so many micro-batches of `rows` rows at once. `trials`: the number of rows and the
    footprint of two passes over fewer rows; memory is linear in rows.
    """
    (few, first), (more, second) = trials

    def line(a: int, b: int) -> float:
        return a + (b - a) * (rows - few) / (more - few) if few < more else a * rows / few

    return round(
        under_way * line(first.saved_bytes, second.saved_bytes) + line(first.recomputed_bytes, second.recomputed_bytes)
    )


def pending_grad_bytes(sizes: list[int], micro_batches: int) -> int:
    """Bytes of a gradient that waits to be added to that of the micro-batches before. `sizes`: bytes of each."""
    return max(sizes) if micro_batches > 1 else 0


def table_row(ranks: Sequence[Memory], who: str = "process") -> dict[str, str]:
    """The needs of the rank that needs most, for the start-up table. `who`: what to call a rank."""
    most = max(ranks, key=sum)
    names = (
        *("parameters", "gradients", "optimizer state", "activations", "exchange", "rows and index of sparse tables"),
        "copy for saves",
    )
    parts = (f"{bytes_text(size)} {name}" for size, name in zip(most, names, strict=True) if size)
    return {"memory": f"{bytes_text(sum(most))} planned a {who} = {' + '.join(parts)}"}


class MemoryMeter:
    """Measures the peak of this process's memory from now on.

    On CUDA: what torch allocates, over all devices. On a CPU: the growth of resident memory, which includes libraries,
    data and gaps of the allocator.
    """

    def __init__(self, device: str) -> None:
        self.measure = "allocated" if device == "cuda" else "resident"  # what the peak is of
        self._cuda = device == "cuda"
        if self._cuda:
            # by an earlier run in this process
            for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
                torch.cuda.reset_peak_memory_stats(index)
            return
        with suppress(OSError):  # where it is not allowed, the high-water mark is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # it begins anew at what there is now
        self._before = _resident("VmRSS")

    def peak(self) -> int:
        """The peak in bytes."""
        if self._cuda:
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        return _resident("VmHWM") - self._before

    def summary(self, planned: Sequence[Memory], peaks: Sequence[int]) -> dict[str, int]:
        """`Ended.memory`, from the plans and peaks of all ranks. `planned` may be empty."""
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        return ({"planned": sum(planned[rank])} if planned else {}) | {self.measure: peaks[rank], "rank": rank}


def _resident(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    return 0
