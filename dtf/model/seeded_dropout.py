"""Dropout masks that depend on the seed, the step, the micro-batch and the layer, not on the rank that draws them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError, LayoutError
from dtf.core.seeding import seed_of
from dtf.model.drawn_masks import Draws, DrawsByName, draw_factor, draw_in_compiled
from dtf.model.fingerprint import projections

MOST_IN_FLIGHT = 4096
"""Micro-batches of which the calls of layers are remembered: more than any schedule holds between forward and
backward.
"""


class Part(NamedTuple):
    """What a rank has along axis 1 of something that ranks divide."""

    width: int  # of the whole
    first: int
    last: int  # + 1
    own: bool  # whether each rank has another part; else those that divide layers have it together


class Inputs(NamedTuple):
    """Projections of what dropouts get that draw their mask for all channels, and so must get all of them. By name,
    the same names on all ranks.
    """

    everywhere: dict[str, Tensor]
    """What all ranks that compute a layer together must have alike."""
    by_layer: dict[str, Tensor]
    """The same of the ranks that divide layers, where others have other positions."""
    tolerance: float


class SeededDropout:
    """Seeds the dropout layers of one replica of a model, in place. One key per micro-batch, the same on every rank."""

    def __init__(self, model: nn.Module, seed: int, device: torch.device) -> None:
        self._seed, self.key = seed, 0
        self.begins: Callable[[int, int], None] = lambda step, micro_batch: None
        """Called before each pass over a micro-batch of a step, forward or backward."""
        self._calls: dict[int, dict[str, int]] = {}  # key of a micro-batch -> layer -> how often it was called
        self._again: dict[str, int] | None = None  # the same in a pass that is computed again; None: in no such pass
        self._seeded: list[Any] = []
        self.dropping: set[str] = set()
        """The forwards that were found to call dropout functions, see `seeded_calls`."""
        self.computing_again: Callable[[nn.Module], AbstractContextManager[None]] = lambda module: nullcontext()
        """A context in which dtf computes the forward of a module again, past its hooks."""
        self.part_of: Callable[[str, Sequence[int]], Part | None] = lambda name, shape: None
        """Of what the module of a name drops from, by its shape: which positions; None: ranks do not divide them."""
        self._inputs: Inputs | None = None
        # on CUDA a model may draw on the CPU too, such as which layers it skips
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._seeders: list[Callable[[int], Any]] = [generator.manual_seed for generator in self._generators]
        for name, module in model.named_modules():
            if is_seeded(module):
                # The class changes, the module and its name stay: parameter names and hooks of the user's model are
                # untouched. What draws by functions of torch is found in passes, see `seeded_calls`.
                module.__class__ = _seeded(type(module))
                self._seeded.append(module)
                module.__dict__ |= {"_masks": self, "_name": name, "_draws": Draws(self._seeded[-1])}

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy that a pass makes of a layer counts its calls with it, and so has masks of its own

    @contextmanager
    def record_inputs(self, tolerance: float) -> Iterator[Inputs]:
        """A context. What it yields gets those of all dropouts in it. `tolerance`: see `projections`."""
        self._inputs = Inputs({}, {}, tolerance)

        def note(module: Any, inputs: tuple[Tensor, ...]) -> None:
            self.note(f"inputs of {module._name}", inputs[0], self.part_of(module._name, inputs[0].shape))

        hooks = [module.register_forward_pre_hook(note) for module in self._seeded if not module._slice]
        try:
            yield self._inputs
        finally:
            self._inputs = None
            for hook in hooks:
                hook.remove()

    def note(self, name: str, x: Tensor, part: Part | None) -> None:
        """What a dropout gets, and which part it is, see `record_inputs`."""
        if self._inputs is None or torch.compiler.is_dynamo_compiling():
            return
        alike, (everywhere, by_layer, tolerance) = part is None, self._inputs
        found = projections(x, tolerance)
        for seen, counts in ((everywhere, alike), (by_layer, not alike and not part.own)):  # type: ignore[union-attr]
            seen[name] = seen.get(name, 0.0) + (found if counts else torch.zeros_like(found))

    def rng_state(self) -> Tensor:
        """The state of torch's global generators, from which everything but the seeded layers draws."""
        return torch.cat([generator.get_state() for generator in self._generators])

    def seed_as(self, other: SeededDropout) -> None:
        """Seed the generators that another replica of the model was found to draw from."""
        self._seeders += other._seeders[len(self._seeders) :]

    @contextmanager
    def find_other_generators(self) -> Iterator[None]:
        """A context for a trial pass. Where it draws from Python's or numpy's global generator, that one is seeded with
        each micro-batch from then on, and left as it was.
        """
        python, state, numpy = random.getstate(), np.random.get_state(), _numpy_state()
        yield
        if random.getstate() != python:
            random.setstate(python)
            self._seeders.append(random.seed)
        if _numpy_state() != numpy:
            np.random.set_state(state)
            self._seeders.append(lambda key: np.random.seed(key % 2**32))

    def drew(self, before: Tensor) -> bool:
        """Whether the model drew from torch's global generators since `before`, after `begin_micro_batch`."""
        return not torch.equal(before, self.rng_state())

    @property
    def draws_elsewhere(self) -> bool:
        """Whether the model was found to draw from Python's or numpy's global generator."""
        return len(self._seeders) > len(self._generators)

    def begin_micro_batch(self, step: int, micro_batch: int) -> None:
        """Called before a micro-batch. All random numbers in it are functions of (seed, step, micro-batch)."""
        self.return_to(step, micro_batch)
        self._calls[self.key] = {}
        if len(self._calls) > MOST_IN_FLIGHT:
            del self._calls[next(iter(self._calls))]
        for seed in self._seeders:  # for torch.rand in a user's forward
            seed(self.key)

    def return_to(self, step: int, micro_batch: int) -> None:
        """Called before the backward pass of a micro-batch, where others have begun since: parts of its forward may be
        computed again in it.
        """
        self.key = seed_of(self._seed, "mask", step, micro_batch)
        self.begins(step, micro_batch)

    def calls(self) -> dict[str, int]:
        """How often each layer was called so far in this micro-batch."""
        return dict(self._calls.get(self.key, {}))

    @contextmanager
    def again(self, key: int, calls: dict[str, int]) -> Iterator[None]:
        """A context for a pass that is computed again: the micro-batch of `key`, after these calls."""
        now, self.key, self._again = (self.key, self._again), key, dict(calls)
        try:
            yield
        finally:
            self.key, self._again = now

    @property
    def computes_again(self) -> bool:
        """Whether a part of a forward pass is computed again at the moment, see `again`."""
        return self._again is not None

    def made(self, name: str) -> int:
        """The number of the next call of a layer, see `call`."""
        if self._again is None:
            return 0 if in_backward() else self._calls.setdefault(self.key, {}).get(name, 0)
        return self._again.get(name, 0)

    def call(self, name: str) -> int:
        """The number of this call of a layer within its micro-batch, from 0."""
        calls = self._calls.setdefault(self.key, {}) if self._again is None else self._again
        if self._again is None and in_backward():
            # torch.utils.checkpoint in the model's own code computes a part of its forward again
            if calls.get(name, 1) > 1:
                raise ConfigError(
                    f"{name} is called {calls[name]} times in a forward pass, and torch.utils.checkpoint computes it "
                    "again: which of its masks is wanted is not known; give each call a module of its own, or use "
                    "step.remat"
                )
            return 0
        number = calls.get(name, 0)
        calls[name] = number + 1
        return number


def is_seeded(module: nn.Module) -> bool:
    """Whether the masks of a module are those of `Seeded`: torch's dropout layers, and layers that drop whole rows."""
    if _drops_rows(type(module)):
        return getattr(module, "scale_by_keep", True)
    return isinstance(module, DROPOUTS) and type(module).forward in _FORWARDS  # also one whose class FSDP changed


def _drops_rows(kind: type) -> str:
    """The attribute with the share of rows that a class drops; empty: it is no such class. Imports none of them."""
    return _ROWS.get(f"{kind.__module__}.{kind.__qualname__}", "")


_ROWS = {"torchvision.ops.stochastic_depth.StochasticDepth": "p", "timm.layers.drop.DropPath": "drop_prob"}
"""Stochastic depth (Huang et al. 2016, arXiv:1603.09382)."""


@functools.cache
def _seeded(kind: type) -> Any:
    """One class for all layers of a kind: what is compiled for one serves all."""
    share = _drops_rows(kind)
    if not share:
        return type(f"Seeded{kind.__name__}", (Seeded, kind), {"_channels": not issubclass(kind, nn.Dropout)})
    own = {} if share == "p" else {"p": property(lambda module: getattr(module, share))}
    return type(f"Seeded{kind.__name__}", (SeededRows, kind), own)


def in_backward() -> bool:
    """Whether a backward pass calls: it computes a part of a forward pass again."""
    return torch._C._current_graph_task_id() != -1


class Seeded(DrawsByName):
    """A dropout layer whose mask is drawn from hash(seed, step, micro-batch, layer name, number of the call)."""

    _masks: SeededDropout
    _channels = True  # whether whole channels are dropped
    # axis, its whole width, this rank's first and last + 1: the mask is drawn whole, then cut
    _slice: tuple[int, int, int, int] | None = None
    _in_positions = False  # whether ranks are known to divide the positions of its input
    p: float
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        shape = self._shape(x)
        # not is_compiling(), which is true in all threads while one compiles
        if self._draws.compiled and torch.compiler.is_dynamo_compiling():
            number = len(self._draws.log)
            self._draws.log.append(number)
            return x * draw_in_compiled(self._draws.layer, number, 0, self.p, shape, x.dtype, x.device)
        return x * self.draw(self._masks.call(self._name), 0, self.p, shape, x.dtype, x.device)

    def _shape(self, x: Tensor) -> list[int]:
        """Of the mask of `x`."""
        shape = [*x.shape]
        if self._slice:
            axis, width, first, last = self._slice
            if shape[axis] != last - first:
                raise LayoutError(
                    f"the recipe's layout splits {self._name} as local, but axis {axis} of its input has {shape[axis]} "
                    f"elements and not the {last - first} that are this rank's of the {width} channels divided before "
                    "it; put it where channels are as the divided layer makes them"
                )
        if self._channels:
            shape[2:] = [1] * len(shape[2:])
        return shape

    def _cuts(self, shape: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Where the whole mask is cut to this shape: axis, its whole width, this rank's first and last + 1."""
        cuts = []
        if self._slice and not (self._channels and self._slice[0] % len(shape) > 1):  # else it drops all channels
            cuts.append(self._slice)
        if self._slice is None or self._slice[0] != 1:
            part = self._masks.part_of(self._name, shape)
            cuts += [(1, *part[:3])] if part is not None else []
        return cuts

    def draw(
        self, number: int, index: int, p: float, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The mask of a call of this micro-batch, as a factor. `index` is 0: a call draws once."""
        whole, cuts = [*shape], self._cuts(shape)
        for axis, width, _, _ in cuts:
            whole[axis] = width
        mask = draw_factor(self._masks.key, self._name, number, index, p, whole, dtype, device)
        for axis, _, first, last in cuts:
            mask = mask.narrow(axis, first, last - first)
        return mask

    def ready_for_compilation(self) -> str:
        """Why the layer cannot be in a compiled module; empty: it can, from now on."""
        if self._slice or self._in_positions:
            return "ranks divide what it drops"
        self._draws.compiled = True
        return ""


class SeededRows(Seeded):
    """A layer that drops whole rows, or all rows of a micro-batch."""

    mode = "row"

    def _shape(self, x: Tensor) -> list[int]:
        return [x.shape[0] if self.mode == "row" else 1, *[1] * (x.dim() - 1)]

    def _cuts(self, shape: Sequence[int]) -> list[tuple[int, int, int, int]]:
        return []


@contextmanager
def seeded_dropouts(model: nn.Module) -> Iterator[SeededDropout]:
    """A context in which the dropout layers of a model on CPU are seeded; at its end they are what they were."""
    masks = SeededDropout(model, 0, torch.device("cpu"))
    try:
        yield masks
    finally:
        for module in masks._seeded:
            module.__class__ = type(module).__bases__[1]
            for key in ("_masks", "_name", "_draws"):
                del module.__dict__[key]


def host_states() -> tuple[Any, ...]:
    """Of the global generators of Python and numpy."""
    return random.getstate(), _numpy_state()


def _global_states() -> tuple[Any, ...]:
    """Of all generators that a forward pass may draw from: torch's, Python's and numpy's."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [torch.get_rng_state(), *devices]
    return (*(state.numpy().tobytes() for state in states), *host_states())


@contextmanager
def find_drawing_modules(
    modules: Iterable[tuple[str, nn.Module]], states: Callable[[], tuple[Any, ...]] = _global_states
) -> Iterator[list[str]]:
    """A context for a trial pass. The list that it yields gets those of the named modules whose own forward pass draws
    from a global generator, innermost first: their names and classes. `states`: of the generators that are watched.
    """
    found: list[str] = []
    before: list[tuple[Any, ...]] = []

    def enter(module: nn.Module, inputs: object) -> None:
        before.append(states())

    def leave(module: nn.Module, name: str) -> None:
        if before and before.pop() != states():
            kind = type(module).__name__.removeprefix("Divided")
            found.append(f"{name} ({kind})" if name else f"the model itself ({kind})")

    hooks: list[Any] = []
    for name, module in modules:
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(lambda module, _, __, name=name: leave(module, name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _numpy_state() -> bytes:
    """Of numpy's global generator."""
    state: Any = np.random.get_state()
    return state[1].tobytes() + bytes(str(state[2]), "ascii")


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


_FORWARDS = [kind.forward for kind in DROPOUTS]
