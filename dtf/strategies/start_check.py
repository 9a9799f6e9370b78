"""What only running a model can show, before the first step: a few rows pass through it in the order A, B, A, and all
ranks take the same rows. Where the numbers differ the model keeps or draws something that dtf cannot keep right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtf.api.precision import Format
from dtf.api.task import Task
from dtf.core.consistency import Peers
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Evaluated
from dtf.model.attributes import GENERATOR, Attributes
from dtf.model.counters import MULTIPLE, Counters, Move
from dtf.model.forward import copy_of, rows_of

Numbers = dict[str, float]
"""What a trial pass gives: name -> number. The sums of `Recipe.measure`, the size of each gradient as of `take_size`,
and the norm of each buffer that a rule keeps.
"""

BUFFER, GRADIENT = "buffer ", "gradient of "
"""Begin the names of buffers and of gradients among numbers."""

TOLERANCES = {Format.fp64: 1e-9, Format.fp32: 2e-5, Format.bf16: 3e-2, Format.fp16: 1e-2}
"""Relative differences that rounding may make: kernels of GPUs need not sum in the same order twice."""

ALIKE = 1e-3
"""Largest relative difference of what is bitwise equal unless kernels are not deterministic, but for `TOLERANCES`."""


class Trials(NamedTuple):
    """The passes that a check makes. Each is collective where passes are."""

    a: Callable[[], Numbers]
    b: Callable[[], Numbers]
    modules: Callable[[], Mapping[str, nn.Module]]
    """The modules whose outputs may name the place, by name."""

    counters: Sequence[Counters] = ()
    """Of the models that passes run."""

    evaluates: bool = False
    """Whether the passes are those of an evaluation."""

    alike: bool = True
    """Whether an exception in a pass comes on all ranks."""


class Collectives:
    """Peers by their operations: the ranks that make the same passes."""

    def __init__(self, gather: Callable[[Any], list[Any] | None], broadcast: Callable[[Any], Any]) -> None:
        self._gather, self._broadcast = gather, broadcast

    def gather(self, value: Any) -> list[Any] | None:
        return self._gather(value)

    def broadcast(self, value: Any) -> Any:
        return self._broadcast(value)


def alike_within(compute: Format) -> float:
    """By how much of its norm a tensor may differ between ranks that compute it alike."""
    return max(ALIKE, TOLERANCES[compute])


def take_size(gradient: Tensor) -> Tensor:
    """The norm () of a gradient whose negative numbers count half, in fp64: a change of signs shows."""
    parts = gradient.detach().reshape(-1).split(_PART)  # a copy of the whole in fp64 might not fit
    copy, squares = torch.empty_like(parts[0], dtype=torch.float64), list[Tensor]()
    for part in parts:
        numbers = copy[: len(part)].copy_(part)
        squares += [numbers.norm().square() / 4, numbers.clamp_(min=0).norm().square() * 0.75]
    return torch.stack(squares).sum().sqrt()


_PART = 1 << 20
"""Of how many numbers `take_size` makes a copy at a time."""

LARGE = 2.0**12
"""By how much a loss is multiplied to find gradients that do not grow with it; a power of two rounds nothing."""

AHEAD = (1, 10, 1_000, 1_000_000, MULTIPLE - 1, MULTIPLE)
"""By how many passes counters are moved ahead, to see what a model does later, and every so many passes."""

RAISED = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)
"""What a pass may raise whose counters have a value that its author did not expect."""

ALONE = Collectives(lambda value: [value], lambda value: value)


def check_passes(
    trials: Trials, compute: Format, peers: Peers, changed: Callable[[], list[str]], instead: str
) -> tuple[Numbers, Numbers]:
    """The numbers of `trials.a`, twice. Raise ConfigError on all ranks where rows give other numbers after other rows,
    or on another rank. Collective.

    `changed`: names of attributes that passes have changed. `instead`: what to use for a model that cannot be divided.
    """
    bound = TOLERANCES[compute]
    first = _counted(trials.a, trials)
    _counted(trials.b, trials)
    again = _counted(trials.a, trials)
    counting = [name for counters in trials.counters for name in counters.names()]
    everyone = peers.gather([first, again, counting])
    kind, move, differ = None, None, list[str]()
    if everyone is not None:
        differ = [name for one, two, _ in everyone for name in differences(one, two, bound)]
        if differ:
            kind = "pass"
        elif any(numbers_differ(_sums(everyone[0][0]), _sums(one), bound) for one, *_ in everyone[1:]):
            kind = "rank"
        elif any(names for *_, names in everyone):
            kind = "count"
    kind = peers.broadcast(kind)
    if kind == "count":
        move = _acts_later(trials, first, bound, peers, instead)
    if kind is None or (kind == "count" and move is None):
        return first, again
    with _recorded(trials.modules()) as outputs:
        trials.a()
        one = _taken(outputs)
        if kind == "pass":
            trials.b()
            outputs.clear()
        if kind != "rank":
            with _moved(trials, move), suppress(*RAISED if move is not None else ()):
                trials.a()
        two = _taken(outputs)
    answers = peers.gather([one, two, counting if kind == "count" else changed()])
    place = None
    if answers is not None:
        pairs = (
            [(one, two) for one, two, _ in answers]
            if kind != "rank"
            else [(answers[0][0], other) for other, _, _ in answers]
        )
        names = [name for name in (_first_difference(*pair, bound) for pair in pairs) if name]
        place = [names[0] if names else "", sorted({name for _, _, more in answers for name in more})]
        buffers = [name for name in differ if name.startswith(BUFFER)]
        if not place[0] and buffers == differ:  # all modules give the same outputs
            place[0] = (buffers or [""])[0]
    module, attributes = peers.broadcast(place)
    raise ConfigError(_refusal(kind, module, attributes, instead, trials.evaluates))


def _counted(run: Callable[[], Numbers], trials: Trials) -> Numbers:
    numbers = run()
    for counters in trials.counters:
        counters.note()
    return numbers


@contextmanager
def _moved(trials: Trials, move: Move | None) -> Iterator[None]:
    """A context in which counters are somewhere else."""
    with ExitStack() as stack:
        if move is not None:
            for counters in trials.counters:
                stack.enter_context(counters.moved(move))
        yield


def _moves(trials: Trials, peers: Peers) -> list[Move]:
    """Where counters are tried, the same on all ranks: later, and where they are or become what they may be compared
    with. Collective.
    """
    everyone = peers.gather([{str(number): 0 for counters in trials.counters for number in counters.constants()}])
    constants = None if everyone is None else sorted({int(number) for (numbers,) in everyone for number in numbers})
    values = {value for number in peers.broadcast(constants) for value in (number - 1, number)}
    return [*(Move(passes) for passes in AHEAD), *(Move(value=value) for value in sorted(values))]


def _acts_later(trials: Trials, once: Numbers, bound: float, peers: Peers, instead: str) -> Move | None:
    """Where a counter changes the numbers; None: nowhere that is tried. Collective. ConfigError on one rank alone where
    a pass raises and others wait in theirs.
    """
    for move in _moves(trials, peers):
        numbers: Numbers = {}  # differs from all others
        try:
            with _moved(trials, move):
                numbers = trials.a()
        except RAISED as error:
            if not trials.alike:  # other ranks wait for this one
                raise ConfigError(_refusal("count", "", [], instead, trials.evaluates, error)) from error
        everyone = peers.gather([once, numbers])
        found = None if everyone is None else any(numbers_differ(one, two, bound) for one, two in everyone)
        if peers.broadcast(found):
            return move
    return None


def check_evaluation(
    evaluate: Callable[[Batch], Evaluated],
    batch: Batch,
    models: Sequence[nn.Module],
    task: Task,
    peers: Peers,
    instead: str,
    modules: Callable[[], Mapping[str, nn.Module]] | None = None,
    alike: bool = True,
) -> None:
    """As `check_passes` for evaluations of these rows, the same on all ranks, unless an earlier run has made the check.
    `models`: what `evaluate` runs on this rank; its effects on them are the caller's to undo. `modules`, `alike`: see
    `Trials`; without `modules` they are those of the first model. Collective.
    """
    if not task.start_check.fresh:
        return
    some = rows_of(batch, 0, max(1, len(batch.ids) // 2))

    def numbers(rows: Batch) -> Numbers:
        return {f"sum {i}": value for i, value in enumerate(evaluate(copy_of(rows)).sums.tolist())}

    def changed() -> list[str]:
        return [name for each in attributes for name in each.changed()]

    attributes, counters = (
        [Attributes(model, task.recipe) for model in models],
        [Counters(model, task.recipe) for model in models],
    )
    modules = modules or (lambda: dict(models[0].named_modules()))
    trials = Trials(lambda: numbers(some), lambda: numbers(batch), modules, counters, evaluates=True, alike=alike)
    check_passes(trials, task.precision.compute, peers, changed, instead)


class Passes(NamedTuple):
    """What one replica computes of rows that are the same for all replicas."""

    run: Callable[[], Numbers]
    modules: Callable[[], Mapping[str, nn.Module]]


def differing_module(replicas: Sequence[Passes], compute: Format, peers: Peers) -> str | None:
    """Have all replicas, those of this process and of all `peers`, compute the same rows. None where they give the same
    numbers, else the first module whose outputs differ; empty where those of all are the same. Collective.
    """
    bound = TOLERANCES[compute]
    numbers = peers.gather([replica.run() for replica in replicas])
    differ = None
    if numbers is not None:
        first, *others = (_sums(one) for own in numbers for one in own)
        differ = any(numbers_differ(first, other, bound) for other in others)
    if not peers.broadcast(differ):
        return None
    recorded = []
    for replica in replicas:
        with _recorded(replica.modules()) as outputs:
            replica.run()
        recorded.append(_taken(outputs))
    everyone, name = peers.gather(recorded), None
    if everyone is not None:
        first, *others = (one for own in everyone for one in own)
        name = next((found for other in others if (found := _first_difference(first, other, bound))), "")
    return peers.broadcast(name)


def _refusal(
    kind: str, module: str, attributes: list[str], instead: str, evaluates: bool, raised: Exception | None = None
) -> str:
    where = f"{module} is the first module whose output differs"
    if raised is not None:
        where = f"{type(raised).__name__}: {raised}"
    elif not module:
        where = (
            "all modules give the same outputs, so look at the recipe's receive() and loss(), and at what acts in the "
            "backward pass: hooks, autograd functions"
        )
    elif module.startswith(BUFFER):
        where = f"the {module} has another value after them"
    generators = [name for name in attributes if name.endswith(GENERATOR)]
    if generators:
        attributes = []
        where += f"; it draws from a generator of its own, {generators[0].removesuffix(GENERATOR)}"
    kept = f"; passes change the attribute{'s' if len(attributes) > 1 else ''} {', '.join(attributes[:3])}"
    what = (
        "the model gives other numbers for the same rows after it has seen others"
        if kind == "pass"
        else "the model gives other numbers for the same rows after more passes"
        if kind == "count"
        else "ranks get different numbers from the same rows"
    )
    return (
        f"{what}{' in evaluation' if evaluates else ''}: {where}{kept if attributes else ''}. Each rank would go on "
        "from its own rows. Make what is kept from pass to pass a buffer with a rule in the recipe's Layout.buffers, "
        f"and draw random numbers from torch's global generator; or use {instead}"
    )


def not_linear(trial: Callable[[float], Numbers], once: Numbers, again: Numbers, compute: Format) -> str:
    """The name of a gradient that does not grow with the loss. Empty: all do. `trial`: those of a factor x the loss;
    `once` and `again`: those of the loss, which show what kernels make differ.

    Such are those of hooks and functions that clip or round gradients.
    """
    least, factor = 1.0, LARGE
    if compute is Format.fp16:  # small gradients vanish, and large ones are infinite
        least, factor = 2.0**6, 2.0**4
        once, again = trial(least), trial(least)
    more, bound = trial(least * factor), min(TOLERANCES[compute], 1e-3)
    gradients = {name: value for name, value in once.items() if name.startswith(GRADIENT)}
    largest = max((abs(value) for value in gradients.values()), default=0.0)
    for name, value in gradients.items():
        scaled = more.get(name, 0.0) / factor
        noise = 10 * abs(again.get(name, 0.0) - value)
        if not abs(scaled - value) <= bound * (abs(value) + 1e-3 * largest) + noise and math.isfinite(scaled):
            return name
    return ""


def _sums(numbers: Numbers) -> Numbers:
    """What all ranks have alike: gradients may be slices."""
    return {name: value for name, value in numbers.items() if not name.startswith(GRADIENT)}


def numbers_differ(one: Numbers, two: Numbers, bound: float) -> bool:
    """Whether two passes differ by more than rounding."""
    return bool(differences(one, two, bound))


def differences(one: Numbers, two: Numbers, bound: float) -> list[str]:
    """Names of the numbers in which two passes differ by more than rounding. Gradients are compared with the largest of
    them. Where a pass does not use a parameter, its gradient may be none or zero, as wrappers of the model have it.
    """
    unused = {name: 0.0 for name in one.keys() ^ two.keys() if name.startswith(GRADIENT)}
    one, two = unused | one, unused | two
    found = [*(one.keys() ^ two.keys())]
    sizes = (abs(value) for name, value in one.items() if name.startswith(GRADIENT))
    largest = max(filter(math.isfinite, sizes), default=0.0)  # an infinite one would let all others pass
    for name in one.keys() & two.keys():
        value = one[name]
        scale = largest if name.startswith(GRADIENT) else max(abs(value), abs(two[name]))
        if value == two[name] or (math.isnan(value) and math.isnan(two[name])):  # infinities too
            continue
        if not abs(value - two[name]) <= bound * max(scale, 1e-30):
            found.append(name)
    return sorted(found)


@contextmanager
def _recorded(modules: Mapping[str, nn.Module]) -> Iterator[list[tuple[str, Tensor]]]:
    """A context. The list gets the name of each module that is called, and the sum of squares of its outputs."""
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            if floats and torch._C._current_graph_task_id() == -1:
                parts = [getattr(leaf, "_local_tensor", leaf).detach().double().square().sum() for leaf in floats]
                outputs.append((name, torch.stack(parts).sum()))

        return hook

    hooks = [
        module.register_forward_hook(note(name))
        for name, module in modules.items()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _taken(outputs: list[tuple[str, Tensor]]) -> list[tuple[str, float]]:
    taken = [(name, float(value)) for name, value in outputs]
    outputs.clear()
    return taken


def _first_difference(one: list[tuple[str, float]], two: list[tuple[str, float]], bound: float) -> str:
    """The name of the first call that differs; empty where none does."""
    for (name, value), (other, number) in zip(one, two, strict=False):
        if name != other or not abs(value - number) <= bound * max(abs(value), 1e-30):
            return name or "the model"
    return ""
