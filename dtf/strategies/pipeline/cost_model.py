"""What each block of a split model costs: measured on the device, or counted without running.

The model itself is never touched nor materialised.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from dtf.core.errors import ConfigError
from dtf.model.memory import Footprint
from dtf.strategies.pipeline.graph_split import GraphSplit
from dtf.strategies.pipeline.partition import Cost

StateBytes = Callable[[nn.Module, str], int]
"""A part of the model -> bytes of its parameters, their gradients and their optimizer state. The name: of its only
parameter, "" for a part that has those of the model.
"""

LEAST_ROUNDS, MOST_ROUNDS = 2, 10
"""Of `measure` over the blocks; the most are for a small model."""

Work = Callable[[nn.Module, Callable[[], Any], Callable[[Any], None]], float]


def measure(
    split: GraphSplit,
    sample: Any,
    state_bytes: StateBytes,
    autocast: torch.dtype | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    upkeep: Callable[[nn.Module], Callable[[], None]] | None = None,
    passes: int = 1,
    seconds: float = 3.0,
) -> list[Cost]:
    """Time the blocks one by one on the device of `sample`, the model's input for one micro-batch; work in seconds.

    `prepare` does to a block what a run does to its model before the first step, e.g. cast it. `upkeep`: a block that
    has gradients -> what a run does with them, once for so many `passes`; it counts for its part.

    Goes over all blocks again and again, `LEAST_ROUNDS` to `MOST_ROUNDS` times, for about `seconds`, and takes the
    fastest pass of each: a burst of other work on the machine then spoils one time of a block, not all. Never holds
    more than a block.
    """
    device = _device(sample)
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if one_thread else time.perf_counter  # thread_time stands still while others have the core

    def timed(run: Callable[[], Any]) -> float:
        _synchronize(device)
        start = clock()
        run()
        _synchronize(device)
        return clock() - start

    def work(block: nn.Module, forward: Callable[[], Any], backward: Callable[[Any], None]) -> float:
        once = timed(upkeep(block)) / passes if upkeep is not None else 0.0
        return once + timed(lambda: backward(forward()))

    start, rounds = time.monotonic(), []
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.monotonic() - start < seconds):
        rounds.append(list(_costs(split, sample, state_bytes, autocast, prepare, work)))
    return [min(times, key=lambda cost: cost.work) for times in zip(*rounds, strict=True)]


def count(
    split: GraphSplit,
    sample: Any,
    state_bytes: StateBytes,
    autocast: torch.dtype | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> list[Cost]:
    """As `measure`, but nothing runs and no memory is taken; work in floating-point operations of convolutions and
    matrix products.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def work(block: nn.Module, forward: Callable[[], Any], backward: Callable[[Any], None]) -> float:
        with FlopCounterMode(display=False) as counter:
            backward(forward())
        return float(counter.get_total_flops())

    with FakeTensorMode():
        sample = tree_map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device), sample)
        return list(_costs(split, sample, state_bytes, autocast, prepare, work))


def _costs(
    split: GraphSplit,
    sample: Any,
    state_bytes: StateBytes,
    autocast: torch.dtype | None,
    prepare: Callable[[nn.Module], None] | None,
    work: Work,
) -> Iterator[Cost]:
    """One round over the blocks, each with the outputs of the one before as inputs.

    Each makes one pass to warm up; then `work` says what a forward and a backward pass cost.
    """
    device = _device(sample)
    values: Sequence[Any] = (sample,)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        for index, name in enumerate(split.names):
            block = _stand_in(split.segment(index, index + 1), device)
            state = state_bytes(block, "")
            shared = {key: state_bytes(_alone(p), key) for key, p in split.shared_parameters(index).items()}
            if prepare is not None:
                prepare(block)
            trial = _Trial(block.train(), values, autocast)
            try:
                outputs, kept, again = trial.keep()
                cost = work(block, trial.forward, trial.backward)
            except RuntimeError as error:
                raise ConfigError(
                    f"block {name} does not run by itself on {device}: {error}; strategy=ddp names the line, where it "
                    "fails there too"
                ) from error
            last = index == len(split) - 1
            sent, uncut = (0, "") if last else _sent(outputs, name, split.changed(index + 1))
            yield Cost(name, cost, state, kept, sent, again, shared, uncut)
            values = outputs
            # its graph and it refer to each other, and would stay until they are collected
            for part in block.modules():
                part._parameters.clear()
                part._buffers.clear()


def _sent(outputs: Sequence[Any], name: str, changed: Sequence[bool]) -> tuple[int, str]:
    """Bytes of what is used after a block, and why it cannot be sent on, or "". `changed`: whether what follows changes
    it in place. ConfigError for a view of what is changed.
    """
    why = f"the model cannot be cut after block {name}: "
    kinds = [type(value).__name__ for value in outputs if not isinstance(value, Tensor)]
    if kinds:
        return 0, (
            f"{why}only tensors can be sent on, and what is used after it has {', '.join(kinds)}; read sizes again "
            "where they are used, or name it and what follows as one block in Recipe.layout"
        )
    places = [value.untyped_storage()._cdata for value in outputs]
    if any(changes and places.count(place) > 1 for changes, place in zip(changed, places, strict=True)):
        raise ConfigError(
            f"{why}a tensor is changed in place later, and another that crosses is a view of it; copy one"
        )
    return sum(value.nbytes for value in outputs), ""


class _Trial:
    """ForwardPass of one block over the same inputs."""

    def __init__(self, block: nn.Module, inputs: Sequence[Any], autocast: torch.dtype | None) -> None:
        self._block, self._inputs, self._autocast = block, inputs, autocast
        self._device = _device(inputs)
        self._gradients: list[Tensor] = []

    def forward(self) -> Any:
        inputs = [
            value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in self._inputs
        ]
        with nullcontext() if self._autocast is None else torch.autocast(self._device.type, dtype=self._autocast):
            return self._block(*inputs)

    def backward(self, outputs: Any) -> None:
        ends = [value for value in _tensors(outputs) if value.requires_grad]
        if not self._gradients:
            # constant ones would vanish in normalisations
            self._gradients = [torch.randn_like(value) for value in ends]
        if ends:
            torch.autograd.backward(ends, self._gradients)

    def keep(self) -> tuple[Any, int, int]:
        """(outputs, bytes kept until the backward pass, bytes that backward computes again).

        The kept bytes include the outputs.
        """
        known = {
            tensor.untyped_storage()._cdata
            for tensor in (*self._block.parameters(), *self._block.buffers(), *_tensors(self._inputs))
        }
        with Footprint() as footprint:
            outputs = self.forward()
            self.backward(outputs)
        made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(outputs)}
        # the outputs are still there
        kept = footprint.saved_bytes + sum(size for storage, size in made.items() if storage not in known)
        leaves = tree_map(
            lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, outputs
        )
        return leaves, kept, footprint.recomputed_bytes


@torch.no_grad()
def _stand_in(block: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the block on the device, with random numbers through which activations keep their magnitude."""
    made: dict[int, Any] = {}
    for name, old in block.named_parameters():
        new = torch.empty(old.shape, dtype=old.dtype, device=device)
        if new.dim() > 1 and new.numel():
            bound = math.sqrt(3 * new.shape[0] / new.numel())
            new.uniform_(-bound, bound)
        else:
            new.fill_(float(name.endswith("weight")))
        made[id(old)] = nn.Parameter(new, old.requires_grad)
    for old in block.buffers():
        full = torch.ones if old.dtype.is_floating_point else torch.zeros  # divided by, or used as an index
        made[id(old)] = full(old.shape, dtype=old.dtype, device=device)
    for part in block.modules():  # what a hook makes of parameters before each pass; it makes it anew
        computed = [value for value in vars(part).values() if isinstance(value, Tensor) and not value.is_leaf]
        made |= {id(value): value.detach().to(device) for value in computed}
    return copy.deepcopy(block, made)  # deepcopy takes what it finds in `made` as copied already


def _alone(parameter: nn.Parameter) -> nn.Module:
    """A module that has this parameter only."""
    module = nn.Module()
    module.register_parameter("parameter", parameter)
    return module


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _device(values: Any) -> torch.device:
    return next(_tensors(values)).device


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
