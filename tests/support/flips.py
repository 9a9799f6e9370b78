"""Ranks that flip bits in their own memory and passes, and look whether the guard finds them. Many flips a run: after
each the state from before it is put back.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dtf.core.errors import CorruptionError
from dtf.core.types import Shard, Train
from dtf.distributed.sharding import local
from dtf.engine.guarded_steps import GuardedSteps, guarded_steps
from tests.support.harness import Case, _Run

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, draw: random.Random) -> int:
    """Flip a random bit of a tensor in place. Returns which one."""
    flat = local(tensor.detach()).view(-1).view(BITS[tensor.element_size()])
    bit = draw.randrange(8 * tensor.element_size())
    mask = torch.tensor(1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit), dtype=flat.dtype)
    flat[draw.randrange(len(flat))] ^= mask
    return bit


class Run:
    """A run of which each step is asked for, with a guard."""

    def __init__(self, rank: int, size: int, every: int, case: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank, self.size, self.every = rank, size, every
        self.run = _Run(rank, size, Case(**case))
        self.program = self.run.program
        self.notes: list[str] = []
        guard = guarded_steps(self.program, every, 0, None, self.notes.append)
        assert isinstance(guard, GuardedSteps)
        self.guard, self.inner = guard, guard._guard
        self.rest = [torch.zeros(0)]

    def groups(self) -> list[dict[str, Tensor]]:
        """The tensors that replicas have alike, of the copies of this process: parameters, state, buffers."""
        return [
            {f"{part} {name}": tensor for part, held in copy.held().items() for name, tensor in held.items()}
            for copy in self.inner.copies  # type: ignore[attr-defined]
        ]

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        everything = chain(*(group.values() for group in self.groups()), *(r.buffers() for r in self.models()))
        return [(tensor, local(tensor.detach()).clone()) for tensor in everything]

    def models(self) -> list[torch.nn.Module]:
        one = getattr(self.program, "_replica", None)
        return [one.model] if one is not None else [r.model for r in getattr(self.program, "_replicas", [])]

    @staticmethod
    def restore(kept: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            for tensor, value in kept:
                local(tensor.detach()).copy_(value)

    def step(self, step: int) -> str:
        """One step, guarded where it is due. What the guard says, empty where it says nothing."""
        epochs = self.run.epochs
        epoch, index = divmod(step, epochs.batches)
        ticket = Train(step, epoch, index, epochs.size(index), 0.01)
        batch = self.program.prepare(self.run.loader.get(epoch, index))
        if not self.guard.due(step):
            self.program.step(ticket, batch)
            return ""
        try:
            self.guard.step(ticket, batch)
        except CorruptionError as error:
            return f"{error.blames} {error}"
        return ""

    def same(self) -> bool:
        """Whether all copies have the same bytes, told without the guard. Collective."""
        own = [
            {
                name: zlib.crc32(local(t.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                for name, t in group.items()
            }
            for group in self.groups()
        ]
        everyone, found = self.run.world.gather(own), None
        if everyone is not None:
            found = all(
                one[name] == other[name]
                for one in chain(*everyone)
                for other in chain(*everyone)
                for name in one.keys() & other.keys()
            )
        return self.run.world.broadcast(found)


def persistent(rank: int, size: int, trials: int, every: int, seed: int, **case: Any) -> dict[str, Any]:
    """Flips of bits of what replicas hold alike. Returns how many were found, and how many healed by themselves before
    the next guarded step: nothing differs any more, in no byte. `named`: the right rank; `wrong`: another one.
    """
    run, draw = Run(rank, size, every, case), random.Random(seed)
    met = {"found": 0, "healed": 0, "missed": [], "named": 0, "wrong": 0, "kinds": {}}
    for step in range(every):
        assert not run.step(step)
    for _ in range(trials):
        kept, groups = run.snapshot(), run.groups()
        victim, late, place = draw.randrange(max(size, len(groups))), draw.randrange(every), draw.random()
        group = groups[victim if len(groups) > 1 else 0]
        names = sorted(name for name, t in group.items() if local(t).numel())
        name = names[int(place * len(names))]
        own = random.Random(draw.random())
        said = ""
        for step in range(every, 2 * every + 1):
            if step == every + late and (rank == victim or len(groups) > 1):
                flip(group[name], own)
            said = said or run.step(step)
            if said:
                break
        kind = "state" if "optimizer" in name or "master" in name else "parameter or buffer"
        met["kinds"][kind] = met["kinds"].get(kind, 0) + 1
        if said:
            met["found"] += 1
            met["named"] += said.startswith(f"{victim} ")
            met["wrong"] += not said.startswith((f"{victim} ", "None "))
        elif run.same():
            met["healed"] += 1
        else:
            met["missed"].append(f"{name} of {victim}")
        run.restore(kept)
    return met


def transient(rank: int, size: int, trials: int, seed: int, **case: Any) -> dict[str, Any]:
    """Flips in one pass over the guarded micro-batch: of an activation, or of the gradient of one; in the passes that
    all make, or in the step itself. Returns what became of those that change the gradient by more than rounding.
    """
    run, draw = Run(rank, size, 1, case), random.Random(seed)
    inner: Any = run.inner
    modules = [m for m in run.models()[0].modules() if not list(m.children()) and not isinstance(m, torch.nn.Dropout)]
    armed: list[Callable[[Tensor], None] | None] = [None]

    def hook(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        if armed[0] is not None and module is target[0]:
            act, armed[0] = armed[0], None
            act(output)

    target: list[Any] = [None]
    for module in modules:
        module.register_forward_hook(hook)
    original = inner.program_step
    assert not run.step(0)
    met = {"beyond": 0, "found": 0, "blamed": 0, "within": 0, "within_found": 0, "missed": []}
    for _ in range(trials):
        kept = run.snapshot()
        victim, step = draw.randrange(size), draw.randrange(1, 50)
        in_step = draw.random() < 0.5
        if in_step:
            victim = step % size  # who computes the micro-batch
        target[0], backward, noise = modules[draw.randrange(len(modules))], draw.random() < 0.5, draw.random()
        act = partial(_act, backward, noise)
        change = _change(run, inner, step, act, armed) if rank == victim else 0.0
        changes = run.run.world.gather(change)
        change = run.run.world.broadcast(max(changes) if changes else None)
        own = act if rank == victim else None

        if in_step:
            inner.program_step = partial(_armed_step, original, armed, own)
        else:
            armed[0] = own
        said = run.step(step)
        armed[0], inner.program_step = None, original
        run.restore(kept)
        if change > 1e-6:
            met["beyond"] += 1
            met["found"] += bool(said)
            met["blamed"] += said.startswith(f"{victim} ")
            if not said.startswith(f"{victim} "):
                met["missed"].append(f"{type(target[0]).__name__} {backward=} {in_step=} {change:.1e} {said[:60]}")
        else:
            met["within"] += 1
            met["within_found"] += bool(said)
    return met


def _act(backward: bool, noise: float, output: Tensor) -> None:
    """Flip a bit of an output of a module, or of its gradient when it comes."""
    if backward:
        output.register_hook(lambda gradient: _flipped(gradient, noise))
    else:
        flip(output.data, random.Random(noise))


def _armed_step(original: Any, armed: list[Any], own: Any, ticket: Any, batch: Any) -> Any:
    armed[0] = own
    return original(ticket, batch)


def _flipped(gradient: Tensor, noise: float) -> Tensor:
    gradient = gradient.clone()
    flip(gradient, random.Random(noise))
    return gradient


def _keep(gradients: list[Tensor], gradient: Tensor) -> None:
    gradients.append(gradient.double().flatten().clone())


def _change(run: Run, inner: Any, step: int, act: Any, armed: list[Any]) -> float:
    """By how much of its norm the gradient of the micro-batch changes, on this rank alone."""
    epochs, replica = run.run.epochs, run.program._replica  # type: ignore[attr-defined]
    index, owner = step % epochs.batches, step % run.size
    loader = run.run._rows("train", Shard(owner, run.size), run.program.micro_batch_rows)
    rows = run.program.prepare(loader.get(step // epochs.batches, index))
    assert rows is not None
    found: list[Tensor] = []
    for planted in (None, act):
        grads: list[Tensor] = []
        hooks = [p.register_hook(partial(_keep, grads)) for p in replica.model.parameters()]
        armed[0] = planted
        replica.again(rows, step, owner, torch.ones(()).to(rows.weight))
        armed[0] = None
        for each in hooks:
            each.remove()
        found.append(torch.cat(grads))
    difference = (found[1] - found[0]).norm() / found[0].norm()
    return float(difference) if torch.isfinite(difference) else 1e30


def clean(rank: int, size: int, steps: int, **case: Any) -> dict[str, Any]:
    """So many guarded steps without a fault. Returns what the guard has told, which is nothing."""
    run = Run(rank, size, 1, case)
    said = [text for step in range(steps) if (text := run.step(step))]
    return {"said": said, "notes": run.notes}
