"""What passes take: how much memory a rank will need, estimated before training from a few rows, and how much it used;
and the arithmetic of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from dtf.distributed.traffic import COLLECTIVES, Traffic
from dtf.model.flops import flops

_PLAIN = frozenset({bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments of an operation that are no tensors and hold none: most of them, in each of its calls."""


FIXED = 0.01
"""Which share of a small pass may be operations that do not grow with its rows: they are few in a large one."""


class Footprint(TorchDispatchMode):
    """Counts the memory of tensors and the arithmetic in a forward and backward pass. Memory that a kernel takes for
    itself is not seen.

    `saved_bytes`: bytes that forward allocates, that are still there when backward starts, and that nobody holds in the
    end: without gradients. `recomputed_bytes`: the most at one time of what backward computes again (activation
    checkpointing). The peak is their sum.

    `whole_flops`, `part_flops`: operations, see `model.flops`, without what backward computes again. What is computed
    from tensors of `add_parts` is a part, up to a collective that makes it whole; all, with `all_parts`.

    `traffic`: what the pass sends to other ranks.
    """

    supports_higher_order_operators = True  # torch refuses to run them otherwise

    def __init__(self) -> None:
        super().__init__()
        self.saved_bytes = self.recomputed_bytes = self.whole_flops = self.part_flops = 0
        self.traffic = Traffic()
        self._count = 0
        self._known: dict[int, weakref.ref] = {}  # storages by id
        self._made: dict[int, int] = {}  # number of the allocation -> bytes, while it is there
        self._found: dict[int, int] = {}  # those of them that backward found
        self._recomputed = 0
        self._backward = False
        self._plain: set[int] = set()  # backward passes that make no graph for one more
        self._again: dict[int, list[int]] = {}  # backward pass -> operations with a graph: in a plain one, once more
        self._parts, self.all_parts = set[int](), False

    def add_parts(self, tensors: Iterable[Tensor]) -> None:
        """These hold a part of the model, of which other ranks have the others."""
        self._parts |= {id(storage) for storage in _storages([*tensors])}

    def is_part(self, tensor: Tensor) -> bool:
        return any(id(storage) in self._parts for storage in _storages(tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's default wraps the method so that its first call imports torch._dynamo, a second's work."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        task, part = torch._C._current_graph_task_id(), self.all_parts
        backward = task >= 0
        if backward and not self._backward:
            self._backward, self._found = True, dict(self._made)
        for storage in _storages((args, kwargs)):
            self._meet(storage, made=False, again=False)  # unless known, it was there before the pass
            part = part or id(storage) in self._parts
        # gradients are computed without a graph of their own
        again = backward and torch.is_grad_enabled()
        if backward and not again:
            self._plain.add(task)
        results = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES:
            self.traffic.see(func, args, results)
        if count := flops(func, args, results):
            counts = [0, count] if part else [count, 0]
            if again:
                self._again[task] = [a + b for a, b in zip(self._again.get(task, (0, 0)), counts, strict=True)]
            else:
                self._add(counts)
        part = part and not _makes_whole(func)
        for storage in _storages(results):
            self._meet(storage, made=True, again=again)
            if part:
                self._parts.add(id(storage))
        return results

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._known.clear()  # and with it all calls of `_lose`
        self.saved_bytes = sum(size for number, size in self._found.items() if number not in self._made)
        for task, counts in self._again.items():
            if task not in self._plain:
                self._add(counts)

    def _add(self, counts: Sequence[int]) -> None:
        self.whole_flops, self.part_flops = self.whole_flops + counts[0], self.part_flops + counts[1]

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
        self._parts.discard(key)
        self._made.pop(number, None)
        self._recomputed -= again


def _makes_whole(operator: Any) -> bool:
    """Whether it is a collective that gives each rank the whole, as those of dtf.distributed.collectives do."""
    return operator.namespace == "_c10d_functional" and "reduce_scatter" not in operator.name()


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


def row_flops(
    trials: Sequence[tuple[int, Footprint]],
    total: Callable[[Tensor], Tensor] = lambda parts: parts,
    others: Callable[[Tensor], Tensor] = lambda wholes: wholes,
) -> float | None:
    """Operations of the whole model for each row. `trials`: as above. `total`: sums a tensor over the ranks that have
    the other parts, `others` over those that compute other layers or positions; collective.

    None where they do not grow with the rows: the loss compares all rows with each other, or blocks are left out by
    chance.
    """
    (few, first), (more, second) = trials
    parts = total(torch.tensor([first.part_flops, second.part_flops], dtype=torch.float64)).tolist()
    wholes = others(torch.tensor([first.whole_flops, second.whole_flops], dtype=torch.float64)).tolist()
    less, much = wholes[0] + parts[0], wholes[1] + parts[1]
    rate = (much - less) / (more - few) if few < more else much / more
    return rate if 0 <= less - few * rate <= FIXED * less else None


def pending_grad_bytes(sizes: list[int], micro_batches: int) -> int:
    """Bytes of a gradient that waits to be added to that of the micro-batches before. `sizes`: bytes of each."""
    return max(sizes) if micro_batches > 1 else 0


def unsummed_grad_bytes(sizes: list[int], trials: Sequence[tuple[int, Footprint]], rows: int) -> int:
    """Bytes that a trial pass needs beyond a step with micro-batches of `rows` rows, where a wrapper of the model keeps
    gradients that are summed over ranks: those of a trial pass are not, and lie beside them, but it has few rows.
    `sizes`, `trials`: as above.
    """
    few = min(rows, trials[-1][0])
    return sum(sizes) - activations(trials, rows) + activations(trials, few)


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
