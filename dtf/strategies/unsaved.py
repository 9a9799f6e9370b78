"""Tells what passes of a model have changed and no checkpoint holds, where one replica trains alone: several are
refused at the start, as each would go on from its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from dtf.api.precision import Format
from dtf.distributed.sharding import local
from dtf.model.attributes import GENERATOR, Attributes
from dtf.strategies.start_check import TOLERANCES, Gather, Numbers, numbers_differ

NAMED = 4
"""Attributes and buffers that the warning names."""


class Unsaved:
    """Attributes, and buffers that are not saved, as they are now: after a start, also one that resumes."""

    def __init__(self, model: nn.Module, scratch: frozenset[str]) -> None:
        self._model, self._scratch = model, scratch
        self._attributes = Attributes(model)
        saved = set(model.state_dict(keep_vars=True))
        self._saved = {name for name, _ in model.named_buffers() if name in saved}
        self._buffers = self._now()

    def warning(self, numbers: Callable[[], Numbers], compute: Format, peers: Gather) -> str:
        """What a run that goes on from a checkpoint would start anew, and would compute other numbers for it. Empty:
        nothing. `numbers`: those of the same few rows, without a trace. Collective over `peers`.
        """
        everyone = peers.gather(self._changed())
        names = peers.broadcast(None if everyone is None else list(dict.fromkeys(chain(*everyone))))
        if not names:
            return ""
        attributes, buffers = Attributes(self._model), self._now()
        parameters = [local(p).detach().to("cpu", copy=True) for p in self._model.parameters()]
        try:
            now = numbers()
            self._put_parameters(parameters)
            self._attributes.restore()
            self._put(self._buffers)
            then = numbers()
        finally:
            attributes.restore()
            self._put(buffers)
            self._put_parameters(parameters)
        matters = peers.gather(numbers_differ(now, then, TOLERANCES[compute]))
        if not peers.broadcast(None if matters is None else any(matters)):
            return ""
        listed = ", ".join(name.removesuffix(GENERATOR) for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if names[NAMED:] else ""
        return (
            f"passes of the model change {listed}{more}; its numbers depend on this, and checkpoints do not hold it: a "
            "run that goes on from one starts anew with it; register what matters in the constructor, as a persistent "
            "buffer with a rule in the recipe's Layout.buffers; get_extra_state() is not saved"
        )

    def _changed(self) -> list[str]:
        now = self._now()
        buffers = [name for name in {**self._buffers, **now} if not _same(self._buffers.get(name), now.get(name))]
        return buffers + self._attributes.changed()

    def _now(self) -> dict[str, Tensor]:
        """Copies of the buffers that are not saved."""
        kept = self._saved | self._scratch
        return {name: buffer.detach().clone() for name, buffer in self._model.named_buffers() if name not in kept}

    @torch.no_grad()
    def _put_parameters(self, parameters: list[Tensor]) -> None:
        """Undo what passes have done to parameters, which one process may do."""
        for parameter, value in zip(self._model.parameters(), parameters, strict=True):
            own = local(parameter).detach()
            if not torch.equal(own.cpu(), value):
                own.copy_(value)

    def _put(self, buffers: dict[str, Tensor]) -> None:
        """Give the model these buffers in place of those that are not saved."""
        modules = dict(self._model.named_modules())
        for name in {**self._now(), **buffers}:
            module, _, key = name.rpartition(".")
            if name in buffers:
                modules[module]._buffers[key] = buffers[name].clone()
            else:
                del modules[module]._buffers[key]


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.shape == two.shape and one.dtype is two.dtype and bool(torch.equal(one, two))
